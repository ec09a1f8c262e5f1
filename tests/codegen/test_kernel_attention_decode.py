"""Decode attention and its combination, against the graph's reference and the prefill kernel."""

from dataclasses import replace

import numpy as np
import pytest

from bessemer.backend.target import Target
from bessemer.codegen.group import GroupSpec, Operand
from bessemer.codegen.kernels.attention_decode import PART_BLOCKS, partial_shape, splits
from tests.codegen.attention_case import CASES, Case, Filled
from tests.codegen.kernel_harness import CompiledKernel, codegen_target


class Run(Filled):
    """A filled cache with both kernels."""

    def __init__(
        self, case: Case, seed: int = 0, capacity: int = 2048, machine: Target | None = None
    ) -> None:
        super().__init__(case, seed, capacity)
        attrs = (*case.attrs.items(), ("heads", case.heads))
        shape = partial_shape(case.heads, case.kv_heads, case.value_width)
        partials = Operand("f32", shape)
        out = Operand("f32", (1, case.heads, case.value_width), role="out")
        part_spec = GroupSpec(
            "decode_attention", (*case.inputs(1), partials), ("entry", "window"), attrs
        )
        combine_spec = GroupSpec(
            "decode_combine", (partials, *case.sink_operands, out), attrs=attrs
        )
        self.part = CompiledKernel(part_spec, self.target, machine)
        self.combine = CompiledKernel(combine_spec, self.target, machine)
        self.partials = np.full(shape, np.nan, np.float32)

    def attention(self, q: np.ndarray, position: int, **how: object) -> np.ndarray:
        """One row's output [1, Hq, Dv]."""
        self.partials[:] = np.nan
        out = np.full((1, self.case.heads, self.case.value_width), np.nan, np.float32)
        at = np.array([position])
        operands = (q, at, self.cache.slots(1), self.cache.state, self.partials)
        self.part(1, operands, (0, self.case.window), **how)  # type: ignore[arg-type]
        self.combine(1, (self.partials, *self.sink_arrays, out), **how)  # type: ignore[arg-type]
        return out

    def check(self, **how: object) -> None:
        """The row at the cache's end."""
        q = self.queries(1)
        got = self.attention(q, self.at - 1, **how)
        expected = self.expected(q, np.array([self.at - 1]))
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_lengths_against_the_reference(name: str) -> None:
    run = Run(CASES[name])
    for i, n in enumerate((1, 1, 29, 1, 1, 30, 64, 64, 64, 64, 64, 64, 13)):
        run.append(n)
        orders = ("forward", "reversed", "concurrent")
        run.check(threads=(1, 2, 3, 8)[i % 4], order=orders[i % 3])


def test_every_cpu_of_the_architecture() -> None:
    """Without FMA and f16 instructions the kernels are the same."""
    case = Case(6, 2, 40, 24, kv="f16", lanes=4, softcap=3.0, sinks=True)
    run = Run(case, machine=Target.parse("native", "baseline"))
    run.append(64)
    run.append(36)
    run.check(threads=2)


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_every_split_works_on_long_contexts(kv: str, kv_heads: int) -> None:
    case = Case(4, kv_heads, 16, 16, kv=kv, chunk=512)
    run = Run(case, capacity=4096)
    keys = 32 * PART_BLOCKS * splits(kv_heads)
    for _ in range(keys // 512):
        run.append(512)
    for _ in range(3):
        run.append(1)
        run.check(threads=3, order="reversed")
    assert (run.partials[:, -1] > 0).all()


@pytest.mark.parametrize("window", [3, 32, 33, 100])
def test_ring_wraps(window: int) -> None:
    run = Run(Case(2, 1, 16, 16, window=window, kv="f16", chunk=16), capacity=4096)
    while run.at < 300:
        run.append(7)
        run.check(threads=2)
    assert run.at > run.cache.region(0)[2]


@pytest.mark.parametrize("kv", ["f32", "f16"])
def test_huge_scores(kv: str) -> None:
    """N01: a raw score of 131072 exceeds f16; all keys weigh the same."""
    run = Run(Case(2, 1, 128, 128, kv=kv, chunk=256))
    v = np.random.default_rng(3).integers(-8, 9, (200, 1, 128)).astype(np.float32)
    run.cache.append(0, np.full((200, 1, 128), 32.0, np.float32), v, np.arange(200))
    got = run.attention(np.full((1, 2, 128), 32.0, np.float32), 199)
    np.testing.assert_allclose(got, np.repeat(v.mean(0)[None], 2, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_that_sees_nothing(sinks: bool) -> None:
    """N05."""
    run = Run(Case(4, 2, 16, 16, sinks=sinks))
    run.append(20)
    assert (run.attention(run.queries(1), -1) == 0).all()


def test_nan_stays_visible() -> None:
    """A NaN query is no row of zeros, whichever parts are empty; other heads keep their values."""
    run = Run(Case(4, 2, 8, 8))
    run.append(200)
    q = run.queries(1)
    expected = run.expected(q, np.array([199]))
    q[0, 1] = np.nan
    got = run.attention(q, 199)
    assert np.isnan(got[0, 1]).all()
    np.testing.assert_allclose(got[0, [0, 2, 3]], expected[0, [0, 2, 3]], rtol=2e-5, atol=2e-5)


def test_uniform_weights_have_the_same_bits() -> None:
    run = Run(Case(6, 2, 16, 16, kv="f16", chunk=256))
    rng = np.random.default_rng(5)
    v = rng.integers(-8, 9, (256, 2, 16)).astype(np.float32)
    run.cache.append(0, np.ones((256, 2, 16), np.float32), v, np.arange(256))
    q = rng.integers(-3, 4, (1, 6, 16)).astype(np.float32)
    for position in (0, 1, 63, 127, 255):
        expected = run.expected(q, np.array([position]))
        np.testing.assert_array_equal(run.attention(q, position, threads=3), expected)


def test_threads_do_not_change_bits() -> None:
    """The split depends on the model and the position alone."""
    run = Run(CASES["group 3"])
    run.append(64)
    run.append(64)
    q = run.queries(1)
    once = run.attention(q, 127)
    for threads in (2, 5, 8):
        again = run.attention(q, 127, threads=threads, order="concurrent")
        np.testing.assert_array_equal(once, again)


def test_strided_query() -> None:
    """q is a slice of the merged q, k, v row."""
    run = Run(Case(3, 1, 8, 8))
    run.append(50)
    q = run.queries(1)
    merged = np.zeros((1, 40), np.float32)
    merged[:, 8:32] = q.reshape(1, 24)
    spec = run.part.spec
    strided = replace(spec.operands[0], strides=(40, 8, 1))
    run.part = CompiledKernel(
        replace(spec, operands=(strided, *spec.operands[1:])), codegen_target()
    )
    view = np.lib.stride_tricks.as_strided(merged[:, 8:], (1, 3, 8), (160, 32, 4))
    expected = run.expected(q, np.array([49]))
    np.testing.assert_allclose(run.attention(view, 49), expected, rtol=2e-5, atol=2e-5)
