"""Flash attention against the graph's reference, over caches that the update kernel wrote."""

from dataclasses import replace

import numpy as np
import pytest

from bessemer.backend.target import Target
from bessemer.graph.ops.fused import attend
from tests.codegen.attention_case import CASES, Case, Filled
from tests.codegen.kernel_harness import Cache, CompiledKernel, codegen_target, row_operand


class Run(Filled):
    """A filled cache with the kernel."""

    def __init__(
        self, case: Case, seed: int = 0, capacity: int = 512, machine: Target | None = None
    ) -> None:
        super().__init__(case, seed, capacity)
        self.kernel = CompiledKernel(case.flash(), self.target, machine)

    def attention(self, q: np.ndarray, positions: np.ndarray, **how: object) -> np.ndarray:
        out = np.full((len(q), self.case.heads, self.case.value_width), np.nan, np.float32)
        slots = self.cache.slots(len(q))
        operands = (q, positions, slots, self.cache.state, *self.sink_arrays, out)
        self.kernel(len(q), operands, (0, self.case.window), **how)  # type: ignore[arg-type]
        return out

    def chunk(self, n: int, **how: object) -> None:
        """Append n rows and compare their attention."""
        positions, q = self.append(n), self.queries(n)
        got = self.attention(q, positions, **how)
        np.testing.assert_allclose(got, self.expected(q, positions), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_chunks_against_the_reference(name: str) -> None:
    run = Run(CASES[name])
    for i, n in enumerate((1, 7, 33, 64, 50, 3, 64)):
        orders = ("forward", "reversed", "concurrent")
        run.chunk(n, threads=(1, 2, 3, 8)[i % 4], order=orders[i % 3])


def test_every_cpu_of_the_architecture() -> None:
    """Without FMA and f16 instructions the kernel is the same."""
    case = Case(6, 2, 40, 24, kv="f16", lanes=4, softcap=3.0, sinks=True)
    run = Run(case, machine=Target.parse("native", "baseline"))
    run.chunk(40, threads=2)
    run.chunk(30)


def test_widened_or_read_in_place() -> None:
    """The same numbers, whether a load widens or blocks of the cache are widened before."""
    found = []
    for loads_halves in (False, True):
        run = Run(Case(6, 2, 40, 24, kv="f16", window=40))
        target = replace(run.target, loads_halves=loads_halves)
        run.kernel = CompiledKernel(run.case.flash(), target)
        run.chunk(60)
        positions, q = run.append(50), run.queries(50)
        found.append(run.attention(q, positions, threads=2))
    assert np.array_equal(*found)


@pytest.mark.parametrize("window", [3, 8, 32, 33, 100])
@pytest.mark.parametrize("kv", ["f32", "f16"])
def test_ring_wraps(window: int, kv: str) -> None:
    run = Run(Case(2, 1, 16, 16, window=window, kv=kv, chunk=48), capacity=4096)
    for n in (48, 5, 48, 48, 48, 1, 48, 48, 31):
        run.chunk(n, threads=2)
    assert run.at > run.cache.region(0)[2]


@pytest.mark.parametrize("kv", ["f32", "f16"])
def test_huge_scores(kv: str) -> None:
    """N01: a raw score of 131072 exceeds f16; all keys weigh the same."""
    case = Case(2, 1, 128, 128, kv=kv)
    run = Run(case)
    rng = np.random.default_rng(3)
    k = np.full((40, 1, 128), 32.0, np.float32)
    v = rng.integers(-8, 9, (40, 1, 128)).astype(np.float32)
    positions = np.arange(40)
    run.cache.append(0, k, v, positions)
    got = run.attention(np.full((40, 2, 128), 32.0, np.float32), positions)
    expected = np.cumsum(v, 0) / (positions[:, None, None] + 1)
    np.testing.assert_allclose(got, np.repeat(expected, 2, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kv", ["f32", "f16"])
def test_rows_that_see_nothing(kv: str, sinks: bool) -> None:
    """N05: zeros for padding rows; their neighbours are as without them."""
    run = Run(Case(4, 2, 16, 16, kv=kv, sinks=sinks))
    positions = run.append(20)
    q = run.rows(20, 4, 16)
    expected = run.attention(q, positions)
    padded = positions.copy()
    padded[[0, 7, 19]] = -1
    q[7] = np.nan
    got = run.attention(q, padded, threads=2)
    others = np.setdiff1d(positions, [0, 7, 19])
    assert (got[[0, 7, 19]] == 0).all()
    np.testing.assert_array_equal(got[others], expected[others])
    alone = run.attention(q[:1], np.array([-1]))
    assert (alone == 0).all()


def test_nan_and_infinity_stay_visible() -> None:
    """A NaN query gives a NaN row, and no other row; an infinite score is no finite number."""
    run = Run(Case(2, 2, 8, 8))
    positions = run.append(40)
    q = run.rows(40, 2, 8)
    expected = run.expected(q, positions)
    q[5, 1] = np.nan
    q[9, 0] = np.inf
    got = run.attention(q, positions)
    assert np.isnan(got[5, 1]).all()
    assert np.isnan(got[9, 0]).any()
    keep = np.ones((40, 2), bool)
    keep[5, 1] = keep[9, 0] = False
    np.testing.assert_allclose(got[keep], expected[keep], rtol=2e-5, atol=2e-5)


def test_uniform_weights_have_the_same_bits() -> None:
    """With equal scores, a power of two of keys and small integers everything is exact."""
    run = Run(Case(6, 2, 16, 16, kv="f16"))
    rng = np.random.default_rng(5)
    v = rng.integers(-8, 9, (64, 2, 16)).astype(np.float32)
    k = np.ones((64, 2, 16), np.float32)
    positions = np.arange(64)
    run.cache.append(0, k, v, positions)
    q = rng.integers(-3, 4, (64, 6, 16)).astype(np.float32)
    got, expected = run.attention(q, positions, threads=3), run.expected(q, positions)
    exact = [0, 1, 3, 7, 15, 31, 63]
    np.testing.assert_array_equal(got[exact], expected[exact])


def test_strided_queries_and_slots() -> None:
    """q is a slice of a wider buffer; the second slot's cache is another one."""
    case = Case(3, 1, 8, 8)
    target = codegen_target()
    cache = Cache([case.layer()] * 2, target, capacity=64, slots=2, slot=1)
    rng = np.random.default_rng(6)
    positions = np.arange(10)
    k, v = (rng.standard_normal((10, 1, 8)).astype(np.float32) for _ in range(2))
    cache.append(1, k, v, positions)
    merged = rng.standard_normal((10, 40)).astype(np.float32)
    q = np.lib.stride_tricks.as_strided(merged[:, 8:], (10, 3, 8), (160, 32, 4))
    spec = case.flash()
    strided = (row_operand("f32", (3, 8), 40), *spec.operands[1:])
    out = np.full((10, 3, 8), np.nan, np.float32)
    kernel = CompiledKernel(replace(spec, operands=strided), target)
    kernel(10, (q, positions, cache.slots(10), cache.state, out), (1, 0), threads=2)
    allowed = positions[None] <= positions[:, None]
    expected = attend(q, k, v, allowed, case.attrs)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
