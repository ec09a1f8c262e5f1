"""Hyper-connections and low-precision steps against the graph's references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bessemer.codegen.kernels  # noqa: F401
from bessemer.codegen.group import ROWS, GroupSpec, Operand
from bessemer.graph.ops.rounding import NARROW
from bessemer.graph.schema import schema_of
from tests.codegen.kernel_harness import LANES, CompiledKernel, codegen_target

ROW_COUNT = 5


def run(op: str, arrays: list[np.ndarray], lanes: int, **attrs: Any) -> np.ndarray:
    """The op by its kernel, rows split three ways; held against its reference by the caller."""
    wanted = reference(op, arrays, **attrs)
    operands = tuple(Operand("f32", (ROWS, *a.shape[1:])) for a in (*arrays, wanted))
    spec = GroupSpec(op, operands, attrs=tuple(attrs.items()))
    out = np.full_like(wanted, np.nan)
    kernel = CompiledKernel(spec, codegen_target(lanes))
    kernel(len(wanted), [*arrays, out], threads=3, order="reversed")
    return out


def reference(op: str, arrays: list[np.ndarray], **attrs: Any) -> np.ndarray:
    result = schema_of(op).reference(*arrays, attrs)
    assert isinstance(result, np.ndarray)
    return result


@pytest.mark.parametrize("n", [1, 3, 4])
def test_sinkhorn(n: int) -> None:
    x = np.random.default_rng(0).random((ROW_COUNT, n, n)).astype(np.float32) + 1e-6
    out = run("sinkhorn", [x], 8, iterations=20, eps=1e-6)
    np.testing.assert_allclose(out, reference("sinkhorn", [x], iterations=20, eps=1e-6), rtol=1e-5)
    np.testing.assert_allclose(out.sum(-1), 1, atol=1e-3)
    once = run("sinkhorn", [x], 8, iterations=1, eps=1e-6)
    np.testing.assert_allclose(once.sum(-2), 1, atol=1e-4)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("n", "width"), [(4, 32), (3, 37), (1, 5)])
def test_streams(n: int, width: int, lanes: int) -> None:
    rng = np.random.default_rng(1)
    shapes = ((n, width), (width,), (n,), (n, n))
    x, y, post, comb = (rng.standard_normal((ROW_COUNT, *s)).astype(np.float32) for s in shapes)
    out = run("collapse_streams", [x, post], lanes)
    np.testing.assert_allclose(out, reference("collapse_streams", [x, post]), rtol=1e-5, atol=1e-5)
    out = run("mix_streams", [x, y, post, comb], lanes)
    wanted = reference("mix_streams", [x, y, post, comb])
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


def edges(name: str, count: int) -> np.ndarray:
    """Numbers of every binade, ties between neighbours of the format among them."""
    rng, narrow = np.random.default_rng(2), NARROW[name]
    exponents = rng.integers(narrow.least_exponent - 4, 6, count).astype(np.float32)
    steps = rng.integers(0, 4 << narrow.mantissa, count) / np.float32(2 << narrow.mantissa)
    signs = rng.choice([-1, 1], count)
    return (signs * steps * np.exp2(exponents)).astype(np.float32)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("name", "block"), [("e4m3", 64), ("e2m1", 32), ("e4m3", 3)])
def test_round_trip_has_the_same_bits(name: str, block: int, lanes: int) -> None:
    rng = np.random.default_rng(3)
    begin, end = 5, 5 + 4 * block
    x = edges(name, ROW_COUNT * 2 * (end + 6)).reshape(ROW_COUNT, 2, -1)
    x[0] *= rng.standard_normal(x[0].shape).astype(np.float32)
    x[1, :, begin : begin + block] = 0
    x[2] *= np.float32(1e-20)
    x[3] *= np.float32(3e30)
    how = {"format": name, "block": block, "begin": begin, "end": end}
    np.testing.assert_array_equal(
        run("round_trip", [x], lanes, **how), reference("round_trip", [x], **how)
    )


@pytest.mark.parametrize("width", [1, 2, 32])
def test_hadamard(width: int) -> None:
    x = np.random.default_rng(4).standard_normal((ROW_COUNT, 3, width)).astype(np.float32)
    np.testing.assert_array_equal(run("hadamard", [x], 8), reference("hadamard", [x]))
