"""Weights are written in parts: the same bytes, and never more than a part in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from bessemer.artifact import packing, writer
from bessemer.artifact.layout import StoredWeight
from bessemer.artifact.writer import weight_blocks
from bessemer.graph import DType, TensorType, Value, emit, param, topological

EXPERTS, INNER, HIDDEN = 24, 96, 128
ONE = 2 * INNER * HIDDEN  # numbers of an expert's gate and up


def tensor(name: str) -> np.ndarray:
    rng = np.random.default_rng(sum(name.encode()))
    if name == "embed":
        return rng.standard_normal((EXPERTS * 2 * INNER + 7, HIDDEN)).astype(np.float32)
    shape = (EXPERTS, INNER, HIDDEN) if name.endswith("_exps") else (INNER, HIDDEN)
    return rng.standard_normal(shape).astype(np.float32)


def of_each() -> Value:
    one = TensorType(DType.F32, (INNER, HIDDEN))
    parts = [param(f"experts.{e}.{w}", one) for e in range(EXPERTS) for w in ("w1", "w3")]
    whole = emit("concat", *parts, axis=-2)
    return emit("reshape", whole, shape=(EXPERTS, 2, INNER, HIDDEN))


def of_all() -> Value:
    stack = TensorType(DType.F32, (EXPERTS, INNER, HIDDEN))
    whole = emit("concat", param("gate_exps", stack), param("up_exps", stack), axis=-2)
    return emit("reshape", whole, shape=(EXPERTS, 2, INNER, HIDDEN))


def embedding() -> Value:
    return param("embed", TensorType(DType.F32, (EXPERTS * 2 * INNER + 7, HIDDEN)))


class Reader:
    """Remembers the most numbers that were asked for at once. Tensors are made beforehand, so that
    only copies are measured.
    """

    def __init__(self, value: Value) -> None:
        names = [str(n.attrs["name"]) for n in topological([value]) if n.op == "param"]
        self.held = {name: tensor(name) for name in names}
        self.most = 0

    def __call__(self, name: str, rows: range | None = None) -> np.ndarray:
        whole = self.held[name]
        values = (whole if rows is None else whole[rows.start : rows.stop]).copy()
        self.most = max(self.most, values.size)
        return values


@pytest.mark.parametrize("make", [of_each, of_all, embedding])
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_parts_give_the_same_bytes_in_bounded_memory(
    make: Callable[[], Value], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = make()
    shape = tuple(int(str(n)) for n in value.shape)
    weight = StoredWeight.place("w", shape, dtype, "panels", 0)
    read = Reader(value)
    blocks_of = weight_blocks({"w": value}, read, None)
    assert len(packing.row_parts(weight)) == 1
    whole = np.concatenate(list(blocks_of(weight)))
    assert whole.nbytes == weight.nbytes
    for module in (packing, writer):
        monkeypatch.setattr(module, "PART_NUMBERS", ONE)
    monkeypatch.setattr(packing, "BLOCK_NUMBERS", 1 << 10)
    read.most = 0
    tracemalloc.start()
    at = 0
    for block in blocks_of(weight):
        assert np.array_equal(block, whole[at : at + block.nbytes])
        at += block.nbytes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert at == whole.nbytes
    assert read.most <= ONE
    # Tensors of a part and what is made of them, float32; all of it would be EXPERTS times as much.
    assert peak < 4 * (4 * ONE)


def test_parts_of_a_matrix_are_whole_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PART_NUMBERS", 100)
    flat = StoredWeight.place("w", (70, 2), "f16", "panels", 0)
    assert packing.row_parts(flat) == [range(32), range(32, 64), range(64, 70)]
    assert packing.row_parts(StoredWeight.place("w", (3, 70, 2), "f16", "panels", 0)) == [
        range(1),
        range(1, 2),
        range(2, 3),
    ]
    assert packing.row_parts(StoredWeight.place("w", (70, 2), "f32", "plain", 0))[0] == range(50)


def test_the_stored_dtype_is_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PART_NUMBERS", 64 * 4)
    bits = np.arange(200 * 4, dtype=np.uint16).reshape(200, 4)
    asked: list[range | None] = []

    def read_stored(name: str, dtype: str, rows: range | None = None) -> np.ndarray | None:
        asked.append(rows)
        return bits[rows.start : rows.stop] if rows and dtype == "f16" else None

    def read(name: str, rows: range | None = None) -> np.ndarray:
        raise AssertionError("the way over float32")

    weight = StoredWeight.place("w", bits.shape, "f16", "panels", 0)
    data = np.concatenate(list(weight_blocks({}, read, read_stored)(weight)))
    assert asked == [range(64), range(64, 128), range(128, 192), range(192, 200)]
    assert np.array_equal(data, np.concatenate(list(packing.pack(bits, weight, stored=True))))
