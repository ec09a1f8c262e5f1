"""Reductions, softmax, running sums and selections by the generic lowering."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.graph.dtypes import DType
from bessemer.graph.schema import build, constant, emit
from tests.codegen.payload_harness import Case, Library, T, tensor

F32, I64, BOOL = DType.F32, DType.I64, DType.BOOL
REDUCTIONS = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod")


def _cases() -> list[Case]:
    x, n = tensor("x", T, 3, 17), tensor("x", T, 3, 17, dtype=I64)
    p = tensor("x", T, 3, 17, dtype=BOOL)
    wide, mask = tensor("x", T, 37), tensor("m", T, 3, 17, dtype=BOOL)
    cases = []
    for op in REDUCTIONS:
        cases += [
            Case(f"{op}_last", [emit(op, x, axes=(-1,))]),
            Case(f"{op}_keep", [emit(op, x, axes=(-2,), keepdims=True)]),
            Case(f"{op}_two", [emit(op, x, axes=(-1, -2))], both=False),
            Case(f"{op}_rows", [emit(op, x, axes=(-3,))]),
            Case(f"{op}_int", [emit(op, n, axes=(-1,), keepdims=True)], both=False),
        ]
        if op != "reduce_mean":
            cases.append(Case(f"{op}_bool", [emit(op, p, axes=(-1,))], both=False))
    cases += [
        Case("sum_all", [emit("reduce_sum", x, axes=(-1, -2, -3))]),
        Case("sum_of_chain", [emit("reduce_sum", emit("exp", emit("mul", x, x)), axes=(-1,))]),
        Case("sum_of_slice", [emit("reduce_sum", _part(wide), axes=(-1,))]),
        Case("sum_of_computed_slice", [emit("reduce_sum", _part(emit("exp", wide)), axes=(-1,))]),
        Case("sum_of_nothing_read", [emit("reduce_sum", emit("iota", size=9), axes=(-1,))]),
        Case("sum_of_expand", [_sum_of_expand()]),
        Case("softmax", [emit("softmax", wide)]),
        Case("softmax_middle", [emit("softmax", x, axis=-2)]),
        Case("softmax_rows", [emit("softmax", x, axis=-3)]),
        Case(
            "masked",
            [
                emit(
                    "softmax",
                    emit("where", mask, x, constant(-np.inf)),
                )
            ],
        ),
        Case("cumsum", [emit("cumsum", wide)]),
        Case("cumsum_middle", [emit("cumsum", x, axis=-2)]),
        Case("cumsum_rows", [emit("cumsum", n, axis=-3)]),
        Case("argmax", [emit("argmax", wide, axes=(-1,))]),
        Case("argmax_keep", [emit("argmax", x, axes=(-2,), keepdims=True)]),
        Case("argmax_int", [emit("argmax", n, axes=(-1,))]),
        Case("topk1", list(build("topk", [wide], k=1).outputs)),
        Case("topk5", list(build("topk", [wide], k=5).outputs)),
        Case("topk_all", list(build("topk", [emit("neg", x)], k=17).outputs)),
        Case("topk_int", list(build("topk", [n], k=4).outputs)),
        Case("topk_indices", [build("topk", [x], k=3).outputs[1]]),
        Case("router", [emit("softmax", build("topk", [emit("softmax", wide)], k=4).outputs[0])]),
        Case("two_sums", [emit("div", emit("exp", x), _sum(emit("exp", x))), _sum(x)]),
    ]
    return cases


def _part(x):  # type: ignore[no-untyped-def]
    return emit("slice", x, axis=-1, start=5, stop=30)


def _sum(x):  # type: ignore[no-untyped-def]
    return emit("reduce_sum", x, axes=(-1,), keepdims=True)


def _sum_of_expand():  # type: ignore[no-untyped-def]
    return emit("reduce_sum", emit("expand", tensor("b", 4, 1), shape=(4, 6)), axes=(-1,))


CASES = _cases()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(CASES, tmp_path_factory.mktemp("reduction"))


@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_random_values(library: Library, name: str) -> None:
    for rows in (1, 2, 5, 33):
        library.check(name, rows, library.cases[name].data(rows, seed=rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "softmax_middle", "softmax_rows"])
def test_masked_scores_give_zeros(library: Library, name: str) -> None:
    data = library.cases[name].data(3, scale=40.0)
    x = data["x"]
    x[1] = -np.inf
    x[2, ..., ::2] = -np.inf
    library.check(name, 3, data)


@pytest.mark.parametrize("name", ["topk1", "topk5", "argmax", "cumsum", "reduce_max_last"])
def test_ties_infinities_and_nan(library: Library, name: str) -> None:
    shape = library.cases[name].shape(library.cases[name].leaves["x"], 4)
    x = np.zeros(shape, np.float32)
    x[0, ..., 1::2] = -0.0  # equal to 0: the lower index comes first
    x[1] = 7.0
    x[2, ..., 3] = np.inf
    x[2, ..., 0] = -np.inf
    x[3, ..., 2] = np.nan
    if name == "reduce_max_last":
        x[3, ..., 4] = np.inf
    library.check(name, 4, {"x": x})


def test_sums_of_small_integers_are_exact(library: Library) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-50, 50, (33, 3, 17)).astype(np.float32)
    for op in ("reduce_sum", "reduce_max", "reduce_min"):
        library.check(f"{op}_last", 33, {"x": x}, exact=True)


def test_an_operand_of_a_reduction_has_no_memory(library: Library) -> None:
    group = library.groups["sum_of_chain", "rows"]
    assert group.text.count("linalg.generic") == 1
    assert group.thread_scratch_bytes == 0


def test_rows_that_mix_are_not_split(library: Library) -> None:
    for name in ("reduce_sum_rows", "softmax_rows", "cumsum_rows", "sum_all"):
        assert not library.cases[name].splits, name
    for name in ("reduce_sum_last", "softmax", "softmax_middle", "cumsum", "topk5", "argmax"):
        assert library.cases[name].splits, name
