"""Which ops keep rows apart, op by op."""

from __future__ import annotations

import pytest

from bessemer.codegen.payload import row_wise
from bessemer.codegen.payload.rows import row_symbol
from bessemer.graph.core import Value, topological
from bessemer.graph.schema import build, constant, emit
from tests.codegen.payload_harness import R, T, index, state, tensor, weight

X, FLAT, COLUMN = tensor("x", T, 3, 8), tensor("f", T, 24), tensor("c", T)
IDS, PICKS = index("ids", T), index("picks", T, 4)
TABLE, COS = weight("table", 11, 8), tensor("cos", T, 4)
STATIC = tensor("s", 5, 6)


def _slice(x: Value, axis: int, start: object, stop: object) -> Value:
    return emit("slice", x, axis=axis, start=start, stop=stop)


APART = {
    "elementwise": emit("add", X, tensor("b", 8)),
    "broadcast": emit("mul", X, tensor("k", T, 1, 1)),
    "reduce": emit("reduce_sum", X, axes=(-1, -2)),
    "argmax": emit("argmax", X, axes=(-1,)),
    "softmax": emit("softmax", X, axis=-2),
    "cumsum": emit("cumsum", FLAT),
    "topk": build("topk", [FLAT], k=3).outputs[0],
    "reshape": emit("reshape", X, shape=(T, 24)),
    "reshape_to_more_rows": emit("reshape", X, shape=(T * 3, 8)),
    "permute": emit("permute", X, perm=(0, 2, 1)),
    "expand": emit("expand", emit("reshape", COLUMN, shape=(T, 1)), shape=(T, 5)),
    "expand_rows": emit("expand", tensor("b", 1, 8), shape=(T, 8)),
    "slice": _slice(X, -1, 2, 5),
    "concat": emit("concat", X, X, axis=-1),
    "pad": emit("pad", FLAT, low=(0, 1), high=(0, 2)),
    "iota": emit("iota", size=T),
    "take": emit("take", TABLE, PICKS, axis=-2),
    "take_columns": emit("take", FLAT, index("i", 3), axis=-1),
    "embedding": emit("embedding", TABLE, IDS),
    "select_rows": emit("select_rows", FLAT, index("rows", R)),
    "gather": emit("gather", FLAT, PICKS, axis=-1),
    "scatter": emit("scatter", FLAT, PICKS, tensor("n", T, 4), axis=-1),
    "put": emit("put", FLAT, index("i", 3), tensor("n", T, 3), axis=-1),
    "matmul": emit("matmul", FLAT, tensor("b", 24, 2)),
    "batched": emit("matmul", X, X, transpose_b=True),
    "left_is_whole": emit("matmul", tensor("a", 2, 3), X),
    "linear": emit("linear", FLAT, weight("w", 7, 24)),
    "rms_norm": emit("rms_norm", X, eps=1e-5),
    "rope": emit("rope", X, COS, COS),
    "expert": emit("expert_linear", FLAT, PICKS, weight("e", 6, 5, 24)),
}
MIXED = {
    "reduce": emit("reduce_sum", X, axes=(-3,)),
    "reduce_last_of_one": emit("reduce_sum", COLUMN, axes=(-1,)),
    "softmax": emit("softmax", X, axis=-3),
    "cumsum": emit("cumsum", FLAT, axis=-2),
    "topk_of_rows": build("topk", [emit("permute", FLAT, perm=(1, 0))], k=1).outputs[0],
    "permute": emit("permute", X, perm=(1, 0, 2)),
    "slice": _slice(X, -3, 1, T),
    "concat": emit("concat", X, X, axis=-3),
    "pad": emit("pad", FLAT, low=(1, 0), high=(0, 0)),
    "batch_before_rows": emit("exp", tensor("x", 1, T, 8)),
    "table_of_rows": emit("take", FLAT, index("i", 3), axis=-2),
    "rows_from_rows": emit("take", FLAT, IDS, axis=-2),
    "gather": emit("gather", FLAT, PICKS, axis=-2),
    "scatter": emit("scatter", FLAT, PICKS, tensor("n", T, 4), axis=-2),
    "put": emit("put", state("s", 50, 24), IDS, FLAT, axis=-2),
    "gram": emit("matmul", FLAT, FLAT, transpose_b=True),
    "over_rows": emit("matmul", emit("permute", FLAT, perm=(1, 0)), FLAT),
    "static": emit("exp", STATIC),
    "two_symbols": emit("concat", FLAT, tensor("r", R, 24), axis=-2),
}


def _nodes(value: Value) -> tuple:
    return tuple(n for n in topological([value]) if n.op not in ("input", "param", "state"))


@pytest.mark.parametrize("name", APART)
def test_rows_apart(name: str) -> None:
    assert row_wise(_nodes(APART[name]), [APART[name]])


@pytest.mark.parametrize("name", MIXED)
def test_rows_mixed(name: str) -> None:
    assert not row_wise(_nodes(MIXED[name]), [MIXED[name]])


def test_one_mixing_op_is_enough() -> None:
    total = emit("reduce_sum", emit("exp", X), axes=(-3,))
    assert not row_wise(_nodes(emit("mul", X, total)))


def test_outputs_must_have_rows() -> None:
    whole = emit("exp", STATIC)
    rows = emit("add", FLAT, emit("reduce_sum", whole, axes=(-1, -2)))
    assert row_wise(_nodes(rows), [rows])
    assert not row_wise(_nodes(rows), [rows, whole])


def test_symbol_of_the_rows() -> None:
    assert row_symbol(_nodes(APART["select_rows"])) == "R"
    assert row_symbol(_nodes(emit("add", FLAT, constant(1.0)))) == "T"
    assert row_symbol(_nodes(MIXED["static"])) is None
