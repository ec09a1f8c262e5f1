"""Sessions that are steered, and DeepSeek V4 in low precision: compiled, against references."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.cli.options import SteeringArguments
from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from bessemer.errors import GenerationError, UsageError
from bessemer.graph import Env
from bessemer.importer import Imported, import_model, reference_logits
from bessemer.models import DefinitionOptions
from bessemer.runtime.model import Model
from bessemer.steering import DIRECTIONS, MOST_SCALE, SCALES
from tests.e2e.compiled import CHUNK, CONTEXT, F32_ERROR, error, token_ids
from tests.embedding.c_api import Api, CError, CModel
from tests.importer.cases import run
from tests.tiny_models import V4_KINDS, tiny

# A last bit more or less before a rounding is a step of the narrow format after it, in single
# elements of some rows; the rounding itself moves logits by several per cent.
ROUNDED_ERROR = 2e-2
OPTIONS = {"weights": "f32", "kv": "f32", "context": CONTEXT, "chunk": CHUNK}
COUNT = 2 * CHUNK + 7


class Steered:
    """A compiled model, and the same in NumPy."""

    def __init__(self, folder: Path, source: Any, **options: bool) -> None:
        compile_model(source, CompileOptions(**OPTIONS, **options), folder)
        self.model = Model.load(folder, threads=2)
        self.imported = import_model(source, options=DefinitionOptions(**options))

    def directions(self, seed: int = 0) -> np.ndarray:
        draw = np.random.default_rng(seed).standard_normal(self.model.steering_shape)
        return (draw / np.linalg.norm(draw, axis=1, keepdims=True)).astype(np.float32)

    def expected(self, ids: list[int], directions: np.ndarray, *scales: float) -> np.ndarray:
        return steered_by_numpy(self.imported, ids, directions, scales)


def steered_by_numpy(
    found: Imported, ids: list[int], directions: np.ndarray, scales: tuple[float, ...]
) -> np.ndarray:
    """Logits of the imported graph's reference, whose steering is held against transformers with
    hooks in `tests/models`.
    """
    states = {DIRECTIONS: directions, SCALES: np.array(scales, np.float32)}
    return run(found, ids, env=Env(states=states))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Steered:
    folder = tmp_path_factory.mktemp("llama") / "model"
    return Steered(folder, tiny("llama")[1], steering=True)


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Steered:
    """A sparse and a heavy layer in low precision."""
    _, model = tiny(
        "deepseek_v4",
        num_hidden_layers=2,
        layer_types=V4_KINDS[1:],
        mlp_layer_types=["hash_moe", "moe"],
        head_dim=72,
        partial_rotary_factor=1 / 9,
        index_head_dim=32,
    )
    folder = tmp_path_factory.mktemp("v4") / "model"
    return Steered(folder, model, steering=True, low_precision=True)


# --- steering ------------------------------------------------------------------------------------


def test_steering_by_scales(llama: Steered) -> None:
    """Both sites, out of the output and into it; prefill in chunks, then steps."""
    ids, directions, model = token_ids(COUNT), llama.directions(), llama.model
    plain = llama.expected(ids, directions, 0.0, 0.0)
    for attention, ffn in ((1.0, 0.0), (0.0, 1.0), (0.5, -2.0)):
        want = llama.expected(ids, directions, attention, ffn)
        assert error(want, plain) > 1e-2
        model.steer(directions, attention=attention, ffn=ffn)
        session = model.session()
        assert error(session.prefill(ids[:-4], all_logits=True), want[:-4]) < F32_ERROR
        for i in range(COUNT - 4, COUNT):
            assert error(session.decode(ids[i]), want[i]) < F32_ERROR
    model.steer(None)
    assert error(model.session().prefill(ids, all_logits=True), plain) < F32_ERROR


def test_a_session_is_steered_anew(llama: Steered) -> None:
    """What it holds is computed again; copies are steered alike; a rewind keeps the steering."""
    ids, directions = token_ids(COUNT), llama.directions()
    session = llama.model.session()
    session.prefill(ids[:20])
    session.steer(directions, attention=1.0, ffn=0.5)
    want = llama.expected(ids, directions, 1.0, 0.5)
    assert error(session.decode(ids[20]), want[20]) < F32_ERROR
    copy = session.fork()
    session.rewind(7)
    assert error(session.prefill(ids[7:], all_logits=True), want[7:]) < F32_ERROR
    assert error(copy.prefill(ids[21:], all_logits=True), want[21:]) < F32_ERROR


def test_steering_by_the_c_api(llama: Steered, tmp_path: Path) -> None:
    """The numbers of Python, also after a copy and through a file, which keeps the steering."""
    folder, ids, directions = llama.model.path, token_ids(COUNT), llama.directions()
    info = Api(folder / "model.so").info
    assert (info.steering_layers, info.steering_width) == llama.model.steering_shape
    ours = CModel(Api(folder / "model.so"), folder, threads=2).session()
    theirs = llama.model.session()
    for session in (ours, theirs):
        session.prefill(ids[:20])
        session.steer(directions, attention=1.0, ffn=-0.5)
    assert ours.logits is None
    want = theirs.decode(ids[20])
    assert np.array_equal(ours.decode(ids[20]), want)
    ours.steer(directions, attention=1.0, ffn=-0.5)  # as it was: nothing is forgotten
    assert ours.logits is not None
    copy = ours.fork()
    ours.save(tmp_path / "kept")
    theirs.save(tmp_path / "theirs")
    assert (tmp_path / "kept").read_bytes() == (tmp_path / "theirs").read_bytes()
    ours.steer(None)
    plain = llama.model.session().prefill(ids[:21])
    ours.rewind(20)
    assert np.array_equal(ours.decode(ids[20]), plain)
    ours.load(tmp_path / "kept")
    want = theirs.decode(ids[21])
    assert np.array_equal(ours.decode(ids[21]), want)
    assert np.array_equal(copy.decode(ids[21]), want)
    for scale in (float("nan"), 1e300):
        with pytest.raises(CError, match="finite"):
            ours.steer(directions, ffn=scale)
    for scale, factor in ((1e30, 1), (-2.0, 100)):
        with pytest.raises(CError, match=r"by scales of 0 and .* more than 10000 times"):
            ours.steer(directions * np.float32(factor), ffn=scale)
    assert np.array_equal(ours.decode(ids[22]), theirs.decode(ids[22]))


def test_idle_sessions_of_a_model_follow(llama: Steered) -> None:
    """`generate` keeps a session for the next time."""
    ids, directions, model = token_ids(9), llama.directions(), llama.model
    for scale in (0.0, 1.0):
        model.steer(directions, attention=scale)
        session = model._borrow()
        want = llama.expected(ids, directions, scale, 0.0)
        assert error(session.prefill(ids, all_logits=True), want) < F32_ERROR
        model._give_back(session)
    model.steer(None)


def test_the_file_of_the_command_line(llama: Steered, tmp_path: Path) -> None:
    path, directions = tmp_path / "directions.f32", llama.directions(seed=3)
    path.write_bytes(directions.astype("<f4").tobytes())
    assert not SteeringArguments().is_given
    arguments = SteeringArguments(path, steering_ffn=1.5)
    assert arguments.is_given
    arguments.apply(llama.model)
    ids = token_ids(9)
    want = llama.expected(ids, directions, 0.0, 1.5)
    assert error(llama.model.session().prefill(ids, all_logits=True), want) < F32_ERROR
    llama.model.steer(None)
    with pytest.raises(UsageError, match="--steering-ffn need --steering FILE"):
        _ = SteeringArguments(steering_ffn=1.0).is_given


def test_wrong_steering_is_named(llama: Steered, tmp_path: Path) -> None:
    layers, hidden = llama.model.steering_shape
    short = tmp_path / "short"
    short.write_bytes(bytes(4 * hidden))
    rows = f"{layers} rows of {hidden} float32"
    with pytest.raises(UsageError, match=rf"{4 * hidden} bytes; {rows}.*{4 * layers * hidden}"):
        llama.model.read_directions(short)
    with pytest.raises(UsageError, match="can't be read"):
        llama.model.read_directions(tmp_path / "absent")
    with pytest.raises(UsageError, match=rf"\[2, 3\].*{layers} layers of width {hidden}"):
        llama.model.steer(np.zeros((2, 3)))
    for scale in (float("nan"), float("-inf"), 1e30, -2e4):
        with pytest.raises(UsageError, match=r"a steering scale of .*finite numbers from -1"):
            llama.model.steer(llama.directions(), attention=scale)
        with pytest.raises(UsageError, match="a steering scale of"):
            _ = SteeringArguments(short, steering_ffn=scale).is_given
    directions = llama.directions()
    directions[1] *= 200
    with pytest.raises(UsageError, match=r"layer 1's direction, of length 200.* 4e\+04 times"):
        llama.model.steer(directions, ffn=-1.0)
    directions[1, 2] = np.inf
    with pytest.raises(UsageError, match="directions must be finite"):
        llama.model.steer(directions)


def test_the_largest_steering_still_computes(llama: Steered) -> None:
    """Beyond it squares overflow in norms, which then give zeros: all logits would be equal."""
    ids, directions = token_ids(9), llama.directions()
    session = llama.model.session()
    session.steer(directions, attention=-MOST_SCALE, ffn=-MOST_SCALE)
    got = session.prefill(ids, all_logits=True)
    want = llama.expected(ids, directions, -MOST_SCALE, -MOST_SCALE)
    assert error(got, want) < 10 * F32_ERROR
    assert got.std(axis=-1).min() > 1e-3


# --- low precision -------------------------------------------------------------------------------


def test_low_precision(rounded: Steered) -> None:
    """Against the definition in PyTorch, and the same with steering against NumPy."""
    ids = token_ids(COUNT)
    want = reference_logits(rounded.imported)(ids)
    session = rounded.model.session()
    assert error(session.prefill(ids[:-9], all_logits=True), want[:-9]) < ROUNDED_ERROR
    for i in range(COUNT - 9, COUNT):
        assert error(session.decode(ids[i]), want[i]) < ROUNDED_ERROR, i
    directions = rounded.directions()
    steered = rounded.expected(ids, directions, 1.0, 1.0)
    assert error(steered, want) > 10 * ROUNDED_ERROR
    session = rounded.model.session()
    session.steer(directions, attention=1.0, ffn=1.0)
    assert error(session.prefill(ids, all_logits=True), steered) < ROUNDED_ERROR


# --- bad numbers ---------------------------------------------------------------------------------


def test_router_logits_that_are_no_numbers(rounded: Steered, tmp_path: Path) -> None:
    """A clear error, and no expert beyond the last is asked."""
    folder = tmp_path / "broken"
    shutil.copytree(rounded.model.path, folder)
    (router,) = [w for w in rounded.model.manifest.weights if "layers.1.mlp.gate.weight" in w.name]
    assert router.dtype == "f32"
    with (folder / "weights.bin").open("r+b") as file:
        file.seek(router.offset)
        file.write(np.full(router.nbytes // 4, np.nan, "<f4").tobytes())
    session = Model.load(folder, threads=2).session()
    ids = token_ids(COUNT)
    with pytest.raises(GenerationError, match="computed NaN at position"):
        session.prefill(ids)
    with pytest.raises(GenerationError, match="computed NaN at position 0"):
        session.decode(ids[0])
