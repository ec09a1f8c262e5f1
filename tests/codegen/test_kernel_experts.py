"""Routed experts' linear layers against the graph's reference."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import bessemer.codegen.kernels  # noqa: F401
from bessemer.codegen.group import ROWS, GroupSpec, Operand
from bessemer.graph.ops.fused import _expert_linear
from tests.codegen.kernel_harness import LANES, CompiledKernel, codegen_target, row_operand

DTYPES = {"f32": np.float32, "f16": np.float16}


def _panels(w: np.ndarray) -> np.ndarray:
    """[..., N, K] as [..., ceil(N/32), K, 32], missing rows zero."""
    *lead, n, k = w.shape
    room = np.zeros((*lead, -(-n // 32) * 32, k), w.dtype)
    room[..., :n, :] = w
    return np.ascontiguousarray(room.reshape(*lead, -1, 32, k).swapaxes(-1, -2))


@dataclass(frozen=True)
class Case:
    experts: int
    choices: int
    width: int
    depth: int
    gated: bool = False
    activation: str = "none"
    bias: bool = False
    each: bool = False  # x has a row for each choice
    weights: str = "f32"
    lanes: int = 8

    @property
    def attrs(self) -> dict[str, Any]:
        return {
            "activation": self.activation,
            "alpha": 1.702,
            "limit": 7.0,
            "gated": self.gated,
            "has_bias": self.bias,
        }

    def spec(self, rows: int | str) -> GroupSpec:
        parts = (2,) if self.gated else ()
        panels = -(-self.width // 32)
        x = (self.choices, self.depth) if self.each else (self.depth,)
        weight = (self.experts, *parts, panels, self.depth, 32)
        bias = Operand("f32", (self.experts, *parts, self.width))
        operands = (
            row_operand("f32", x, rows=rows),
            row_operand("i64", (self.choices,), rows=rows),
            Operand(self.weights, weight, role="weight"),
            *((bias,) if self.bias else ()),
            row_operand("f32", (self.choices, self.width), rows=rows),
        )
        return GroupSpec("expert_linear", operands, attrs=tuple(self.attrs.items()))


class Layer:
    """Weights of a case, its kernel and its reference."""

    def __init__(self, case: Case, seed: int = 0, integers: bool = False) -> None:
        self.case = case
        self.rng = np.random.default_rng(seed)
        self.integers = integers
        parts = (2,) if case.gated else ()
        self.w = self.numbers(case.experts, *parts, case.width, case.depth)
        if not integers:
            self.w /= np.float32(case.depth**0.5)
        self.w = self.w.astype(DTYPES[case.weights])
        self.bias = self.numbers(case.experts, *parts, case.width)

    def numbers(self, *shape: int) -> np.ndarray:
        if self.integers:
            return self.rng.integers(-4, 5, shape).astype(np.float32)
        return self.rng.standard_normal(shape).astype(np.float32)

    def routes(self, rows: int, experts: list[int] | None = None) -> np.ndarray:
        """Distinct choices for each row."""
        pool = np.arange(self.case.experts) if experts is None else np.array(experts)
        each = [self.rng.permutation(pool)[: self.case.choices] for _ in range(rows)]
        return np.array(each, np.int64).reshape(rows, self.case.choices)

    def inputs(self, rows: int) -> np.ndarray:
        case = self.case
        shape = (rows, case.choices, case.depth) if case.each else (rows, case.depth)
        return self.numbers(*shape)

    def run(
        self, x: np.ndarray, indices: np.ndarray, one_row: bool = False, **how: object
    ) -> np.ndarray:
        case, rows = self.case, len(x)
        kernel = CompiledKernel(case.spec(1 if one_row else ROWS), codegen_target(case.lanes))
        out = np.full((rows, case.choices, case.width), np.nan, np.float32)
        bias = (self.bias,) if case.bias else ()
        operands = (x, indices, _panels(self.w), *bias, out)
        kernel(rows, operands, **how)  # type: ignore[arg-type]
        return out

    def expected(self, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
        bias = (self.bias,) if self.case.bias else ()
        return _expert_linear(x, indices, self.w.astype(np.float32), *bias, self.case.attrs)


CASES = {
    "mixtral up": Case(4, 2, 96, 40, gated=True, activation="silu", weights="f16"),
    "mixtral down": Case(4, 2, 40, 300, each=True),
    "gpt-oss up": Case(5, 4, 72, 33, gated=True, activation="swiglu_clamped", bias=True),
    "gpt-oss down": Case(5, 4, 33, 72, each=True, bias=True, weights="f16"),
    "many small experts": Case(40, 3, 24, 16, gated=True, activation="gelu_tanh"),
    "one choice": Case(3, 1, 7, 520, activation="relu", bias=True),
}


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", CASES)
def test_rows_against_the_reference(name: str, lanes: int) -> None:
    case = Case(**{**CASES[name].__dict__, "lanes": lanes})
    layer = Layer(case)
    for rows, threads in ((1, 1), (7, 2), (64, 8)):
        x, indices = layer.inputs(rows), layer.routes(rows)
        got = layer.run(x, indices, threads=threads, order="reversed")
        np.testing.assert_allclose(got, layer.expected(x, indices), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", CASES)
def test_one_row_against_the_reference(name: str, lanes: int) -> None:
    case = Case(**{**CASES[name].__dict__, "lanes": lanes})
    layer = Layer(case)
    for threads in (1, 3):
        x, indices = layer.inputs(1), layer.routes(1)
        got = layer.run(x, indices, one_row=True, threads=threads)
        np.testing.assert_allclose(got, layer.expected(x, indices), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("weights", ["f32", "f16"])
def test_small_integers_have_the_same_bits(one_row: bool, weights: str) -> None:
    layer = Layer(Case(6, 3, 50, 70, bias=True, weights=weights), integers=True)
    rows = 1 if one_row else 20
    x, indices = layer.inputs(rows), layer.routes(rows)
    got = layer.run(x, indices, one_row, threads=2)
    np.testing.assert_array_equal(got, layer.expected(x, indices))


@pytest.mark.parametrize("one_row", [False, True])
def test_other_experts_do_not_matter(one_row: bool) -> None:
    layer = Layer(Case(8, 2, 40, 40, gated=True, activation="silu", bias=True))
    rows = 1 if one_row else 30
    x, indices = layer.inputs(rows), layer.routes(rows, [1, 6])
    expected = layer.expected(x, indices)
    for expert in (0, 2, 3, 4, 5, 7):
        layer.w[expert] = np.nan
        layer.bias[expert] = np.nan
    got = layer.run(x, indices, one_row)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_every_choice_is_the_same_expert() -> None:
    """More pairs of one expert than a chunk has rows."""
    layer = Layer(Case(3, 4, 40, 40, each=True))
    x, indices = layer.inputs(64), np.full((64, 4), 2, np.int64)
    got = layer.run(x, indices, threads=2, order="concurrent")
    np.testing.assert_allclose(got, layer.expected(x, indices), rtol=1e-5, atol=1e-5)


def test_no_rows() -> None:
    layer = Layer(Case(3, 2, 40, 40))
    assert layer.run(layer.inputs(0), layer.routes(0)).shape == (0, 2, 40)


@pytest.mark.parametrize("one_row", [False, True])
def test_choices_that_name_no_expert_stay_in_the_weights(one_row: bool) -> None:
    """What a router of NaN may give: the other row's values are right, and nothing is overrun."""
    layer = Layer(Case(3, 2, 40, 40))
    rows = 1 if one_row else 2
    x, indices = layer.inputs(rows), layer.routes(rows)
    indices[0] = [-1, 2**40]
    got = layer.run(x, indices, one_row)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[1:], layer.expected(x[1:], indices[1:]), rtol=1e-5, atol=1e-5)
