"""Reading checkpoint tensors back out of stored weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bessemer.artifact.layout import KVLayer, ScratchLayout, StateLayout, StoredWeight
from bessemer.artifact.manifest import Manifest
from bessemer.artifact.packing import pack
from bessemer.artifact.reader import Artifact
from bessemer.graph import DType, TensorType, Value, constant, emit, evaluate_value, param
from bessemer.verify import stored
from bessemer.verify.stored import NotInvertibleError, StoredTensors, read_weight, undo

SHAPES = {"a": (6, 4), "b": (3, 4), "v": (4,)}


def p(name: str) -> Value:
    return param(name, TensorType(DType.F32, SHAPES[name]))


def rows(value: Value, start: int, stop: int, step: int = 1) -> Value:
    return emit("slice", value, axis=-2, start=start, stop=stop, step=step)


def stacked_experts() -> Value:
    both = emit("concat", p("a"), p("b"), axis=-2)
    return emit("reshape", both, shape=(3, 3, 4))


def interleaved() -> Value:
    """Rows of `a` in another order, by slices and a concat, transposed."""
    halves = emit("concat", rows(p("a"), 1, 6, 2), rows(p("a"), 0, 6, 2), axis=-2)
    return emit("permute", halves, perm=(1, 0))


MOVES: dict[str, Callable[[], Value]] = {
    "param": lambda: p("a"),
    "permute": lambda: emit("permute", p("a"), perm=(1, 0)),
    "reshape": lambda: emit("reshape", p("a"), shape=(2, 3, 4)),
    "concat": lambda: emit("concat", p("b"), p("a"), axis=-2),
    "stacked": stacked_experts,
    "interleaved": interleaved,
    "expand": lambda: emit("expand", emit("reshape", p("a"), shape=(6, 1, 4)), shape=(6, 2, 4)),
    "expand to more axes": lambda: emit("expand", p("a"), shape=(5, 6, 4)),
    "neg": lambda: emit("neg", p("a")),
}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}


@pytest.mark.parametrize("name", MOVES)
def test_moved_tensors_come_back_exactly(name: str) -> None:
    expression, given = MOVES[name](), tensors()
    value = evaluate_value(expression, lambda n: given[n])
    np.testing.assert_array_equal(undo(expression, "a", np.array(value)), given["a"])


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_arithmetic_with_numbers_is_undone(op: str, side: int) -> None:
    given = tensors()
    number = constant(np.float32(1.7))
    operands = (p("a"), number) if side == 0 else (number, p("a"))
    expression = emit(op, *operands)
    value = np.array(evaluate_value(expression, lambda n: given[n]))
    np.testing.assert_allclose(undo(expression, "a", value), given["a"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (emit("mul", p("a"), p("v")), "two tensors"),
        (emit("mul", p("a"), constant(np.float32(0))), "with 0"),
        (rows(p("a"), 0, 3), "a part"),
        (emit("exp", p("a")), "exp"),
        (emit("mul", p("a"), constant(np.ones((2, 6, 4), np.float32))), "broadcast"),
    ],
)
def test_what_is_not_determined_is_refused(expression: Value, reason: str) -> None:
    given = tensors()
    value = np.array(evaluate_value(expression, lambda n: given[n]))
    with pytest.raises(NotInvertibleError, match=reason):
        undo(expression, "a", value)


def artifact_of(folder: Path, weights: dict[str, tuple[np.ndarray, str, str]]) -> Artifact:
    """An artifact whose weights.bin holds these tensors (values, dtype, layout)."""
    placed, end = [], 0
    for name, (values, dtype, layout) in weights.items():
        placed.append(StoredWeight.place(name, values.shape, dtype, layout, end))
        end = placed[-1].offset + placed[-1].nbytes
    with (folder / "weights.bin").open("wb") as stream:
        for weight in placed:
            stream.write(bytes(weight.offset - stream.tell()))
            for block in pack(weights[weight.name][0], weight):
                stream.write(block.data)
    state = StateLayout((KVLayer(0, 1, 4, 4, 0),), "f32", 8, 8)
    manifest = Manifest(
        "m", {}, {}, 6, 4, {}, {}, (), {}, tuple(placed), {}, state, ScratchLayout(0, 0), {}
    )
    return Artifact(folder, manifest)


@pytest.mark.parametrize("layout", ["plain", "panels"])
@pytest.mark.parametrize("shape", [(1, 1), (33, 5), (64, 3), (2, 35, 7), (70, 130)])
def test_weights_are_read_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], layout: str
) -> None:
    monkeypatch.setattr(stored, "BLOCK_NUMBERS", 256)  # many blocks, the last one short
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    artifact = artifact_of(tmp_path, {"w": (values, "f32", layout)})
    np.testing.assert_array_equal(read_weight(artifact, artifact.manifest.weights[0]), values)


def test_tensors_are_those_of_the_artifact_rounding_included(tmp_path: Path) -> None:
    given = tensors()
    merged = np.concatenate([given["a"], given["b"]])
    artifact = artifact_of(
        tmp_path, {"ab": (merged, "f16", "panels"), "norm": (given["v"] + 1, "f32", "plain")}
    )
    one = constant(np.float32(1))
    expressions = {
        "ab": emit("concat", p("a"), p("b"), axis=-2),
        "norm": emit("add", p("v"), one),
    }
    found = StoredTensors(artifact, expressions)
    rounded = given["b"].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(found.read("b"), rounded)
    assert (rounded != given["b"]).any()
    np.testing.assert_allclose(found.read("v"), given["v"], atol=1e-6)
    assert not found.fallen_back


def test_a_tensor_in_several_parts(tmp_path: Path) -> None:
    """Each part by itself says some rows; together they say all."""
    a = tensors()["a"]
    parts = {"low": (a[:2], "f32", "panels"), "high": (a[2:], "f32", "panels")}
    artifact = artifact_of(tmp_path, parts)
    expressions = {"low": rows(p("a"), 0, 2), "high": rows(p("a"), 2, len(a))}
    np.testing.assert_array_equal(StoredTensors(artifact, expressions).read("a"), a)
    with pytest.raises(KeyError, match="a part"):
        StoredTensors(artifact, {"low": expressions["low"]}).read("a")


def test_what_the_artifact_lacks_comes_from_the_checkpoint_and_is_told(tmp_path: Path) -> None:
    given = tensors()
    artifact = artifact_of(tmp_path, {"ab": (given["a"] * given["v"], "f32", "panels")})
    expressions = {"ab": emit("mul", p("a"), p("v"))}
    with pytest.raises(KeyError, match="two tensors"):
        StoredTensors(artifact, expressions).read("a")
    found = StoredTensors(artifact, expressions, given.__getitem__)
    np.testing.assert_array_equal(found.read("a"), given["a"])
    assert "two tensors" in found.fallen_back["a"]
