"""Rows as 16-bit integers, against NumPy: odd widths, extremes, and what is not finite."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.backend.codegen import compile_module
from bessemer.backend.target import Target
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import ROWS, GroupSpec, Operand
from bessemer.codegen.kernels.integer_rows import pair_dot
from tests.codegen.integer_reference import grouped, integers
from tests.codegen.kernel_harness import LANES, CompiledKernel, codegen_target

GROUP = 6


def spec(shape: tuple[int | str, ...], group: int) -> GroupSpec:
    rows, *inner, depth = shape
    blocks = -(-int(depth) // 32) * (int(inner[0]) if inner else 1)
    return GroupSpec(
        "quantise_rows",
        (
            Operand("f32", shape),
            Operand("i16", (rows, 32 * blocks), None, "out"),
            Operand("f32", (rows, blocks), None, "out"),
        ),
        (),
        (("group", group),),
    )


def run(x: np.ndarray, lanes: int = 8, group: int = GROUP) -> tuple[np.ndarray, np.ndarray]:
    """Integers and scales, row by row."""
    rows = x.reshape(-1, x.shape[-1])
    q, scales = (np.full_like(a, 99) for a in grouped(x, group))
    kernel = CompiledKernel(spec((ROWS, *x.shape[1:]), group), codegen_target(lanes))
    kernel(len(x), [x, q, scales], threads=2)
    by_row = q.reshape(len(q) // group, -1, group, 2).transpose(0, 2, 1, 3).reshape(q.shape)
    scale = scales.reshape(len(q) // group, -1, group).transpose(0, 2, 1).reshape(scales.shape)
    return by_row[: len(rows)], scale[: len(rows)]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("shape", [(3, 1), (2, 33), (13, 64), (4, 3, 47)])
def test_rows(shape: tuple[int, ...], lanes: int) -> None:
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32) * np.float32(7)
    for group in (1, GROUP):
        for got, want in zip(run(x, lanes, group), integers(x.reshape(-1, shape[-1])), strict=True):
            np.testing.assert_array_equal(got, want)


def test_small_integers_and_powers_keep_their_values() -> None:
    x = np.arange(-16, 16, dtype=np.float32)[None] * np.float32([[1.0], [2.0**-90], [2.0**100]])
    q, scales = run(x)
    np.testing.assert_array_equal(q * scales, x)


def test_extremes() -> None:
    x = np.zeros((4, 32), np.float32)
    x[1, 3] = 1e-40  # below what a scale is made for: zero
    x[2] = np.finfo(np.float32).max
    x[3, 0], x[3, 1] = 1.0, 2.0**-20  # far below its block's largest: zero
    q, scales = run(x)
    assert np.isfinite(scales).all()
    assert not q[:2].any()
    np.testing.assert_allclose(q[2] * scales[2].astype(np.float64), x[2], rtol=2**-14)
    np.testing.assert_array_equal(q[3] * scales[3], np.eye(1, 32, dtype=np.float32)[0])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    """N02, P06: an infinite scale, so that no product with the block is finite."""
    x = np.ones((2, 64), np.float32)
    x[1, 40] = bad
    q, scales = run(x)
    assert np.isinf(scales[1, 1])
    assert np.isfinite(scales[[0, 0, 1], [0, 1, 0]]).all()
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(np.float32(q[1, 40]) * scales[1, 1] * np.float32(0.5))


@pytest.mark.parametrize(
    ("target", "cpu", "lanes", "instruction"),
    [
        ("x86_64-linux-gnu", "baseline", 4, "pmaddwd"),
        ("x86_64-linux-gnu", "v3", 8, "vpmaddwd"),
        ("x86_64-linux-gnu", "v4", 16, "vpmaddwd"),
        ("x86_64-linux-gnu", "v4+avx512vnni", 16, "vpdpwssd"),
        ("x86_64-linux-gnu", "v3+avxvnni", 8, "vpdpwssd"),
        ("aarch64-linux-gnu", "baseline", 4, "smlal"),
    ],
)
def test_instructions(target: str, cpu: str, lanes: int, instruction: str) -> None:
    """Each processor's own instruction for pairs is what LLVM writes."""
    machine = Target.parse(target, cpu)
    assert machine.f32_lanes == lanes
    short, long = f"memref<{2 * lanes}xi16>", f"memref<{lanes}xi32>"
    fn = Fn("f", [("%a", short), ("%b", short), ("%c", long)])
    zero, pairs = fn.index(0), f"vector<{2 * lanes}xi16>"
    a, b = (fn.op(f"vector.load {x}[{zero}] : {short}, {pairs}") for x in ("%a", "%b"))
    c = fn.op(f"vector.load %c[{zero}] : {long}, vector<{lanes}xi32>")
    c = pair_dot(fn, codegen_target(lanes, pair_dot=machine.pair_dot), c, a, b)
    fn.line(f"vector.store {c}, %c[{zero}] : {long}, vector<{lanes}xi32>")
    text = f"module {{\n{fn.text()}}}\n"
    compiled = compile_module(text, machine, "pairs", exports=["f"], assembly=True)
    assert compiled.assembly is not None
    assert instruction in compiled.assembly
