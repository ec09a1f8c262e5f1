"""Rotary embedding against the graph's reference, in place too."""

import numpy as np
import pytest

import bessemer.codegen.kernels  # noqa: F401
from bessemer.codegen.group import GroupSpec
from bessemer.graph.ops.fused import _rope
from tests.codegen.kernel_harness import LANES, CompiledKernel, codegen_target, row_operand

SHAPES = [(3, 64, 32), (2, 80, 16), (1, 40, 20), (5, 6, 3), (4, 96, 48), (1, 8, 2)]


def _spec(
    style: str, heads: int, width: int, half: int, stride: int | None, offset: int = 0
) -> GroupSpec:
    x = row_operand("f32", (heads, width), stride)
    table = row_operand("f32", (half,))
    return GroupSpec("rope", (x, table, table, x), attrs=(("style", style), ("offset", offset)))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("heads", "width", "half"), SHAPES)
def test_against_the_reference(style: str, lanes: int, heads: int, width: int, half: int) -> None:
    rng = np.random.default_rng(0)
    rows = 7
    x = rng.standard_normal((rows, heads, width)).astype(np.float32)
    angle = rng.standard_normal((rows, half)).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    expected = _rope(x, cos, sin, {"style": style, "offset": 0})
    kernel = CompiledKernel(_spec(style, heads, width, half, None), codegen_target(lanes))
    out = np.full_like(x, np.nan)
    kernel(rows, (x, cos, sin, out), threads=3, order="reversed")
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)
    kernel(rows, (x, cos, sin, x), threads=2)
    assert x.tobytes() == out.tobytes()


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_small_integers_have_the_same_bits(style: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(-8, 9, (4, 2, 24)).astype(np.float32)
    cos, sin = (rng.integers(-4, 5, (4, 10)).astype(np.float32) for _ in range(2))
    out = np.empty_like(x)
    CompiledKernel(_spec(style, 2, 24, 10, None), codegen_target())(4, (x, cos, sin, out))
    np.testing.assert_array_equal(out, _rope(x, cos, sin, {"style": style, "offset": 0}))


def test_in_place_in_a_merged_buffer() -> None:
    """The slice of q in a wider buffer is rotated where it is; its neighbours stay."""
    rng = np.random.default_rng(2)
    merged = rng.standard_normal((6, 100)).astype(np.float32)
    before = merged.copy()
    q = np.lib.stride_tricks.as_strided(merged[:, 20:], (6, 3, 16), (400, 64, 4))
    angle = rng.standard_normal((6, 8)).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    expected = _rope(q.copy(), cos, sin, {"style": "half", "offset": 0})
    CompiledKernel(_spec("half", 3, 16, 8, 100), codegen_target())(6, (q, cos, sin, q), threads=4)
    np.testing.assert_allclose(q, expected, rtol=2e-6, atol=2e-6)
    assert (merged[:, :20] == before[:, :20]).all()
    assert (merged[:, 68:] == before[:, 68:]).all()


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rotated_from_an_offset(style: str) -> None:
    """The elements in front and behind are copied."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((5, 3, 30)).astype(np.float32)
    angle = rng.standard_normal((5, 6)).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    out = np.full_like(x, np.nan)
    spec = _spec(style, 3, 30, 6, None, offset=11)
    CompiledKernel(spec, codegen_target())(5, (x, cos, sin, out), threads=2)
    expected = _rope(x, cos, sin, {"style": style, "offset": 11})
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)
    assert (out[..., :11] == x[..., :11]).all()
    assert (out[..., 23:] == x[..., 23:]).all()
