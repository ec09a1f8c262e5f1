"""DeepSeek V4 compiled: every length, every split, every layer type, the choice of rows, sessions.

The reference is transformers' full forward without a cache. Where more rows are visible than are
chosen it picks among equal scores by chance; for these tests it takes the lowest row, as we do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from bessemer.runtime.model import Model
from tests.e2e.compiled import (
    CHUNK,
    CONTEXT,
    F32_ERROR,
    compiled,
    error,
    load,
    reference,
    tiny_pair,
    token_ids,
)
from tests.tiny_models import V4_KINDS, tiny

COUNT = 70
SLIDING, SPARSE, HEAVY = V4_KINDS

_folder = tempfile.TemporaryDirectory(prefix="bessemer-v4-")


@cache
def pair(**over: Any) -> tuple[torch.nn.Module, Model]:
    """A tiny model and its compiled form; `over` are entries of the config, but for `kinds` (one
    letter a layer: s, c or h) and `options` (of the compiler, as pairs).
    """
    kinds = over.pop("kinds")
    types = [{"s": SLIDING, "c": SPARSE, "h": HEAVY}[k] for k in kinds]
    options = dict(over.pop("options", ()))
    _, model = tiny(
        "deepseek_v4",
        num_hidden_layers=len(types),
        layer_types=types,
        mlp_layer_types=["moe"] * len(types),
        **over,
    )
    settings = {"weights": "f32", "kv": "f32", "context": CONTEXT, "chunk": CHUNK, **options}
    target = Path(tempfile.mkdtemp(dir=_folder.name))
    folder = compile_model(model, CompileOptions(**settings), target / "model")
    return model, Model.load(folder, threads=2)


@contextmanager
def lowest_first() -> Iterator[None]:
    """torch.topk takes the lowest index among equal values."""

    def topk(x: torch.Tensor, k: int, dim: int = -1, **how: Any) -> Any:
        values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
        keep = torch.arange(k)
        return torch.return_types.topk((values[..., keep], indices[..., keep]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", topk)
        yield


def test_every_length_and_every_split() -> None:
    """Prefills of 1 to 70 tokens; all of them in two calls, cut at every place; single steps."""
    ids = token_ids(COUNT)
    want = reference(tiny_pair("deepseek_v4")[1], ids)
    session = load("deepseek_v4").session()
    for length in range(1, COUNT + 1):
        session.rewind(0)
        assert error(session.prefill(ids[:length]), want[length - 1]) < F32_ERROR, length
    for split in range(1, COUNT):
        session.rewind(0)
        first = session.prefill(ids[:split], all_logits=True)
        rest = session.prefill(ids[split:], all_logits=True)
        assert error(np.concatenate([first, rest]), want) < F32_ERROR, split
    session.rewind(0)
    session.prefill(ids[:1])
    for i in range(1, COUNT):
        assert error(session.decode(ids[i]), want[i]) < F32_ERROR, i


@pytest.mark.parametrize("kinds", ["s", "c", "h"])
def test_each_layer_type_alone(kinds: str) -> None:
    """The sparse one chooses three of up to seventeen rows. All at once, in steps, and a chunk that
    begins in the middle.
    """
    model, loaded = pair(kinds=kinds, index_topk=3)
    ids = token_ids(COUNT, seed=2)
    with lowest_first():
        want = reference(model, ids)
    session = loaded.session()
    assert error(session.prefill(ids, all_logits=True), want) < F32_ERROR
    session.rewind(0)
    session.prefill(ids[:21])
    for i in range(21, 50):
        assert error(session.decode(ids[i]), want[i]) < F32_ERROR, i
    assert error(session.prefill(ids[50:], all_logits=True), want[50:]) < F32_ERROR


def test_same_bits_for_every_thread_count() -> None:
    ids = token_ids(COUNT)
    results = []
    for threads in (1, 2, 3):
        session = load("deepseek_v4", threads).session()
        rows = [session.prefill(ids[:-9], all_logits=True)]
        rows += [session.decode(i)[None] for i in ids[-9:]]
        results.append(np.concatenate(rows))
    for other in results[1:]:
        assert np.array_equal(results[0], other)


def test_sessions_go_back_fork_and_are_kept(tmp_path: Path) -> None:
    """Whether what is needed is still in the rings, or has to be fed again."""
    model = tiny_pair("deepseek_v4")[1]
    ids, other = token_ids(COUNT), token_ids(COUNT, seed=3)
    session = load("deepseek_v4").session()
    for keep in (69, 66, 61, 57, 48, 31, 8, 1):
        session.rewind(0)
        session.prefill(ids)
        session.rewind(keep)
        mixed = ids[:keep] + other[: min(9, COUNT + 5 - keep)]
        want = reference(model, mixed)
        assert error(session.decode(mixed[keep]), want[keep]) < F32_ERROR, keep
        got = session.prefill(mixed[keep + 1 :], all_logits=True)
        assert error(got, want[keep + 1 :]) < F32_ERROR, keep
    session.rewind(0)
    session.prefill(ids[:43])
    copy = session.fork()
    session.save(tmp_path / "kept")
    session.prefill(other[:11])
    loaded = load("deepseek_v4").session()
    loaded.load(tmp_path / "kept")
    want = reference(model, ids)
    for one in (copy, loaded):
        got = np.stack([one.decode(i) for i in ids[43:]])
        assert error(got, want[43:]) < F32_ERROR


def test_the_generic_lowering() -> None:
    """By plain loops alone."""
    small = {"hc_sinkhorn_iters": 2, "n_routed_experts": 3, "index_topk": 3}
    options = (("schedule", "generic"), ("context", 40))
    model, loaded = pair(kinds="ch", options=options, **small)
    ids = token_ids(CHUNK + 14)
    with lowest_first():
        want = reference(model, ids)
    session = loaded.session()
    assert error(session.prefill(ids[:-4], all_logits=True), want[:-4]) < F32_ERROR
    for i in range(len(ids) - 4, len(ids)):
        assert error(session.decode(ids[i]), want[i]) < F32_ERROR, i


def test_state_grows_by_compressed_rows_alone() -> None:
    """A token adds its share of a row in each stream; windows and projected rows don't grow."""
    from dataclasses import replace

    state = load("deepseek_v4").manifest.state
    width, index, size = 32, 16, 4
    expected = (width + index) * size / 4 + width * size / 8  # one sparse layer, one heavy one
    assert state.kv_bytes_per_token() == expected
    large, larger = (replace(state, capacity=n).nbytes for n in (1 << 16, 1 << 17))
    assert larger - large == (1 << 16) * expected


def test_inspect_shows_what_each_layer_keeps() -> None:
    from bessemer.inspect.memory import memory
    from bessemer.inspect.subject import open_subject

    page = memory(open_subject(compiled("deepseek_v4")))
    lines = [line.split() for line in page.text.splitlines()]
    assert ["0-2", "32", "8", "64", "8192"] in lines  # a ring of the window, a chunk and a block
    assert ["kv", "1", "32", "4", "32", "4096", "23", "11776"] in lines
    assert ["kv", "2", "32", "8", "32", "4096", "23", "5888"] in lines
    assert ["index", "1", "16", "4", "32", "2048", "23", "5888"] in lines
