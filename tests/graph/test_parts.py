"""Rows of weight expressions by themselves: the numbers of the whole, from what they need alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from bessemer.graph import (
    DType,
    TensorType,
    Value,
    constant,
    emit,
    evaluate_rows,
    evaluate_value,
    param,
    splits,
)

SHAPES = {"a": (6, 4, 5), "b": (6, 4, 5), "m": (12, 10), "row": (5,), "rows": (12,), "one": ()}
TENSORS = {
    name: np.random.default_rng(i).standard_normal(shape).astype(np.float32)
    for i, (name, shape) in enumerate(SHAPES.items())
}
P = {name: param(name, TensorType(DType.F32, shape)) for name, shape in SHAPES.items()}


def stacked(count: int = 4) -> Value:
    """Matrices [3, 5] of single experts, gate over up: [count, 6, 5]."""
    parts = [param(f"{e}.{w}", TensorType(DType.F32, (3, 5))) for e in range(count) for w in "gu"]
    return emit("reshape", emit("concat", *parts, axis=-2), shape=(count, 6, 5))


def tensor(name: str) -> np.ndarray:
    if name in TENSORS:
        return TENSORS[name]
    expert, which = name.split(".")
    rng = np.random.default_rng(100 + 2 * int(expert) + "gu".index(which))
    return rng.standard_normal((3, 5)).astype(np.float32)


CASES: dict[str, Callable[[], Value]] = {
    "param": lambda: P["a"],
    "one dimension": lambda: emit("add", P["rows"], constant(1.0)),
    "stacked experts": stacked,
    "gate and up side by side": lambda: emit("concat", P["a"], P["b"], axis=-2),
    "one below the other": lambda: emit("concat", P["a"], P["b"], axis=-3),
    "halves": lambda: emit("reshape", stacked(), shape=(4, 2, 3, 5)),
    "merged to rows": lambda: emit("reshape", P["a"], shape=(24, 5)),
    "rows of another length": lambda: emit("reshape", P["m"], shape=(8, 15)),
    "transposed inside": lambda: emit("permute", P["a"], perm=(0, 2, 1)),
    "every second": lambda: emit("slice", P["a"], axis=-2, start=1, stop=4, step=2),
    "every second row": lambda: emit("slice", P["m"], axis=-2, start=1, stop=12, step=2),
    "some rows": lambda: emit("slice", P["m"], axis=-2, start=3, stop=11),
    "times a column": lambda: emit("mul", P["m"], emit("reshape", P["rows"], shape=(12, 1))),
    "times a row": lambda: emit("mul", P["a"], emit("add", P["row"], constant(1.0))),
    "times a number": lambda: emit("mul", P["m"], P["one"]),
    "repeated": lambda: emit("expand", emit("reshape", P["row"], shape=(1, 5)), shape=(7, 5)),
    "widened": lambda: emit("expand", emit("reshape", P["rows"], shape=(12, 1)), shape=(12, 3)),
    "a table": lambda: emit("mul", P["row"], emit("iota", size=5, dtype=DType.F32)),
}
WHOLE: dict[str, Callable[[], Value]] = {
    "transposed": lambda: emit("permute", P["m"], perm=(1, 0)),
    "summed": lambda: emit("reduce_sum", P["a"], axes=(-1,)),
}


@pytest.mark.parametrize("case", [*CASES, *WHOLE])
def test_any_rows_are_those_of_the_whole(case: str) -> None:
    value = {**CASES, **WHOLE}[case]()
    whole = evaluate_value(value, tensor)

    def read(name: str, rows: range | None = None) -> np.ndarray:
        return tensor(name) if rows is None else tensor(name)[rows.start : rows.stop]

    count = len(whole)
    for start in range(count):
        for stop in range(start + 1, count + 1):
            part = evaluate_rows(value, read, range(start, stop))
            assert part.dtype == whole.dtype
            assert np.array_equal(part, whole[start:stop])
    assert splits(value, 30) == (case in CASES)


def test_only_what_rows_need_is_read() -> None:
    asked: list[tuple[str, range | None]] = []

    def read(name: str, rows: range | None = None) -> np.ndarray:
        asked.append((name, rows))
        return tensor(name) if rows is None else tensor(name)[rows.start : rows.stop]

    evaluate_rows(stacked(), read, range(2, 3))
    assert asked == [("2.g", range(3)), ("2.u", range(3))]
    asked.clear()
    evaluate_rows(CASES["gate and up side by side"](), read, range(4, 6))
    assert asked == [("a", range(4, 6)), ("b", range(4, 6))]


def test_what_is_read_in_large_pieces_does_not_split() -> None:
    assert splits(stacked(), 5)
    assert not splits(stacked(), 4)  # a row has 5 numbers
    assert not splits(CASES["merged to rows"](), 19)  # one of the 6 rows of 4 x 5
    assert not splits(P["one"], 100)
