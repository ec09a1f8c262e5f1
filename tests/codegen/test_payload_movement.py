"""Views, concatenation, look-ups and stores by the generic lowering."""

from __future__ import annotations

import re

import numpy as np
import pytest

from bessemer.codegen.payload import emit_payload
from bessemer.errors import CompileError
from bessemer.graph.core import Value
from bessemer.graph.dtypes import DType
from bessemer.graph.schema import constant, emit
from tests.codegen.payload_harness import Case, Library, R, Stored, T, index, state, tensor, weight

BOOL = DType.BOOL


def _reshape(x: Value, *shape: object) -> Value:
    return emit("reshape", x, shape=shape)


def _slice(x: Value, start: object, stop: object, axis: int = -1, step: int = 1) -> Value:
    return emit("slice", x, axis=axis, start=start, stop=stop, step=step)


def _views() -> list[Case]:
    x, wide = tensor("x", T, 3, 8), tensor("x", T, 24)
    heads = _reshape(wide, T, 3, 8)
    return [
        Case("copy", [emit("expand", x, shape=(T, 3, 8))]),
        Case("merge", [_reshape(x, T, 24)]),
        Case("split", [heads]),
        Case("regroup", [_reshape(x, T, 4, 6)]),
        Case("flatten", [_reshape(x, T * 24)]),
        Case("merge_rows", [emit("neg", _reshape(x, T * 3, 8))]),
        Case("split_rows", [emit("neg", _reshape(tensor("y", T * 3, 8), T, 3, 8))]),
        Case("unsqueeze", [emit("neg", _reshape(tensor("v", T), T, 1, 1))]),
        Case("squeeze", [emit("exp", _reshape(tensor("u", T, 1, 5, 1), T, 5))]),
        Case("merge_computed", [_reshape(emit("exp", x), T, 24)]),
        Case("merge_twice", [_reshape(emit("exp", _reshape(emit("neg", x), T, 24)), T, 6, 4)]),
        Case("reshape_and_base", [_reshape(emit("exp", x), T, 24), emit("exp", x)]),
        Case("permute", [emit("permute", x, perm=(0, 2, 1))]),
        Case("permute_rows", [emit("permute", x, perm=(1, 0, 2))]),
        Case("permute_chain", [_reshape(emit("permute", emit("exp", x), perm=(0, 2, 1)), T, 24)]),
        Case("expand", [emit("add", emit("expand", tensor("c", T, 1), shape=(T, 24)), wide)]),
        Case("slice", [_slice(wide, 5, 20)]),
        Case("slice_step", [_slice(wide, 3, 24, step=4)]),
        Case("slice_middle", [emit("neg", _slice(x, 1, 3, axis=-2))]),
        Case("slice_rows", [_slice(x, T - 1, T, axis=-3)]),
        Case("slice_heads", [emit("mul", _reshape(_slice(wide, 8, 24), T, 2, 8), constant(2.0))]),
        Case("slice_computed", [_slice(emit("exp", wide), 5, 20), emit("exp", _slice(wide, 1, 3))]),
        Case("even_odd", [emit("sub", _slice(wide, 0, 24, step=2), _slice(wide, 1, 24, step=2))]),
        Case("shift_rows", [emit("sub", _slice(x, 1, T, axis=-3), _slice(x, 0, T - 1, axis=-3))]),
        Case("iota", [emit("add", emit("iota", size=T), index("i", T))]),
        Case("iota_steps", [emit("iota", size=T * 2, start=5, step=-3, dtype=DType.F32)]),
        Case("iota_static", [emit("mul", emit("iota", size=24, dtype=DType.F32), wide)]),
        Case("causal", [_causal()]),
    ]


def _causal() -> Value:
    rows = _reshape(emit("iota", size=T), T, 1)
    return emit("cast", emit("le", emit("iota", size=9), rows), dtype=DType.F32)


def _joins() -> list[Case]:
    x, y = tensor("x", T, 3, 8), tensor("y", T, 3, 5)
    low, high = _slice(x, 0, 4), _slice(x, 4, 8)
    return [
        Case("concat", [emit("concat", x, y, axis=-1)]),
        Case("concat_one", [emit("concat", x, axis=-1)]),
        Case("concat_rows", [emit("concat", x, emit("neg", x), axis=-3)]),
        Case("concat_middle", [emit("concat", x, emit("exp", x), x, axis=-2)]),
        Case("rotate_half", [emit("mul", emit("concat", emit("neg", high), low, axis=-1), x)]),
        Case("concat_static_rows", [emit("concat", tensor("a", 2, 8), tensor("b", T, 8), axis=-2)]),
        Case("pad", [emit("pad", y, low=(0, 1, 2), high=(0, 0, 3), value=-1.5)]),
        Case("pad_rows", [emit("pad", emit("exp", y), low=(2, 0, 0), high=(1, 0, 0))]),
        Case("bool", [emit("concat", *[tensor(n, T, 3, dtype=BOOL) for n in "pq"], axis=-1)]),
    ]


def _lookups() -> list[Case]:
    x, table = tensor("x", T, 7), weight("table", 11, 6)
    ids = index("ids", T)
    picks = index("picks", T, 4)
    return [
        Case("take", [emit("take", table, ids, axis=-2)]),
        Case("take_two", [emit("take", table, picks, axis=-2)]),
        Case("take_columns", [emit("take", x, index("cols", 3), axis=-1)]),
        Case("take_of_computed", [emit("take", emit("exp", x), index("cols", 2, 2), axis=-1)]),
        Case("take_bool", [emit("take", tensor("b", 11, 2, dtype=BOOL), ids, axis=-2)]),
        Case("take_i32", [emit("take", table, emit("cast", ids, dtype=DType.I32), axis=-2)]),
        Case("embedding", [emit("embedding", table, ids)]),
        Case("embedding_scaled", [emit("mul", emit("embedding", table, ids), constant(2.5))]),
        Case("embedding_f16", [emit("embedding", table, ids)], {"table": Stored("f16")}),
        Case(
            "embedding_panels",
            [emit("embedding", weight("table", 70, 6), emit("add", ids, constant(40)))],
            {"table": Stored("bf16", "panels")},
        ),
        Case("select_rows", [emit("select_rows", tensor("h", T, 9), index("rows", R))]),
        Case(
            "select_then", [emit("exp", emit("select_rows", tensor("h", T, 9), index("rows", R)))]
        ),
        Case("gather", [emit("gather", x, picks, axis=-1)]),
        Case("gather_rows", [emit("gather", tensor("b", 11, 4), picks, axis=-2)]),
        Case("gather_computed", [emit("gather", emit("exp", x), emit("abs", picks), axis=-1)]),
        Case("gather_table", [emit("gather", constant(np.arange(7.0)[None]), picks, axis=-1)]),
        Case(
            "gather_f16", [emit("gather", weight("w", 1, 8), picks, axis=-1)], {"w": Stored("f16")}
        ),
    ]


def _stores() -> list[Case]:
    x, cache = tensor("x", T, 12), state("s", 50, 6)
    where = index("picks", T, 4)
    rows, new = index("rows", T), tensor("new", T, 6)
    put = emit("put", cache, rows, new, axis=-2)
    other = state("s", 3, 50, 2)
    put_middle = emit("put", other, rows, tensor("new", 3, T, 2), axis=-2)
    twice = emit("put", put, index("more", 3), tensor("extra", 3, 6), axis=-2)
    kept = emit("put", cache, rows, new, axis=-2, accumulate=True)
    shifted = emit("concat", _slice(cache, 6, 50, axis=-2), tensor("six", 6, 6), axis=-2)
    return [
        Case("scatter", [emit("scatter", x, where, tensor("new", T, 4), axis=-1)]),
        Case("scatter_add", [emit("scatter", x, where, tensor("new", T, 4), axis=-1,
                                  accumulate=True)]),
        Case("scatter_rows", [emit("scatter", tensor("y", 9, 4), where, tensor("new", T, 4),
                                   axis=-2)]),
        Case("scatter_mask", [emit("scatter", emit("mul", x, constant(0.0)), where,
                                   emit("exp", tensor("new", T, 4)), axis=-1)]),
        Case("put", [put], updates={put: cache}),
        Case("put_and_read", [put, emit("reduce_sum", put, axes=(-2,))], updates={put: cache}),
        Case("put_middle", [put_middle], updates={put_middle: other}),
        Case("put_twice", [twice], updates={twice: cache}),
        Case("put_add", [kept], updates={kept: cache}),
        Case("put_functional", [emit("put", tensor("y", 50, 6), rows, new, axis=-2)]),
        Case("put_columns", [emit("put", x, index("cols", 3), tensor("new", T, 3), axis=-1)]),
        _decayed(),
        Case("window", [emit("reduce_max", shifted, axes=(-1,))]),
    ]  # fmt: skip


def _decayed() -> Case:
    cache = state("s", 5, 6)
    value = emit("add", emit("mul", cache, constant(0.5)), tensor("v", 6))
    return Case("decayed", [value], updates={value: cache})


CASES = _views() + _joins() + _lookups() + _stores()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(CASES, tmp_path_factory.mktemp("movement"))


def _data(case: Case, rows: int) -> dict[str, np.ndarray]:
    """Random contents; indices that fit, in any order, none twice where that matters."""
    data = case.data(rows, seed=rows)
    rng = np.random.default_rng(rows)
    for name, array in data.items():
        if array.dtype == np.int64:
            if name == "picks":
                data[name] = np.stack([rng.permutation(6)[:4] for _ in range(rows)])
            elif name == "rows":
                limit = rows if "select" in case.name else 50
                data[name] = rng.permutation(limit)[: array.size]
            else:
                data[name] = rng.integers(0, 5, array.shape)
            if name in ("ids", "cols"):
                data[name].reshape(-1)[0] = -1  # counted from the end
    return data


@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_random_values(library: Library, name: str) -> None:
    case = library.cases[name]
    for rows in (1, 2, 5, 33):
        data = _data(case, rows)
        if name == "embedding_panels":
            data["ids"] = np.abs(data["ids"])
        if name == "scatter_rows":
            data["picks"] = np.stack([(np.arange(rows) * 2 + j) % 9 for j in range(4)], 1)
        library.check(name, rows, data)


def test_state_is_changed_in_place(library: Library) -> None:
    for name in ("put", "put_middle", "put_twice", "put_add", "decayed"):
        group = library.groups[name, "whole"]
        assert group.thread_scratch_bytes == 0, name
        assert not re.search(r"copy %arg\d+,|copy %\w+, %arg", group.text), name


def test_views_take_no_memory(library: Library) -> None:
    for name in ("merge_computed", "slice_heads", "even_odd", "permute", "causal", "concat"):
        assert library.groups[name, "rows"].thread_scratch_bytes == 0, name
        assert "alloca" not in library.groups[name, "rows"].text, name


def test_a_result_is_computed_where_its_reshape_lies(library: Library) -> None:
    assert library.groups["merge_computed", "rows"].text.count("linalg.generic") == 1
    concat = library.groups["concat", "rows"].text
    assert concat.count("memref.copy") == 2
    assert "linalg.generic" not in concat


def test_copying_a_state_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    cache = state("s", 50, 6)
    put = emit("put", cache, index("rows", T), tensor("new", T, 6), axis=-2)
    old = emit("reduce_sum", emit("exp", cache), axes=(-1,))
    late = emit("mul", emit("reduce_sum", put, axes=(-1,)), old)
    flipped = emit("add", emit("permute", state("q", 6, 6), perm=(1, 0)), constant(1.0))
    cases = [
        Case(
            "late",
            [put, emit("add", emit("reduce_sum", cache, axes=(-1,)), late)],
            {},
            {put: cache},
        ),
        Case("flipped", [flipped], {}, {flipped: flipped.node.inputs[0].node.inputs[0]}),
    ]
    for case in cases:
        with pytest.raises(CompileError, match="state"):
            Library([case], tmp_path)


def test_a_missing_operand_is_named() -> None:
    from bessemer.codegen.payload import PayloadSpec

    y = emit("exp", tensor("x", T, 3))
    with pytest.raises(CompileError, match="exp needs"):
        emit_payload("p", PayloadSpec((y.node,), (), (y,)))
