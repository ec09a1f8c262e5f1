"""Attention by plain loops, against the reference and the scheduled kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import bessemer.codegen.payload  # noqa: F401
from tests.codegen.attention_case import CASES, Case, Filled
from tests.codegen.kernel_harness import CompiledKernel, kv_update_spec

NAMES = ["mha", "group 3", "odd widths", "mla", "softcap", "small window, sinks", "window"]
MIXED = Case(6, 2, 8, 12, window=40, softcap=1.5, sinks=True, kv="f16")


def _generic(case: Case, filled: Filled) -> CompiledKernel:
    return CompiledKernel(replace(case.flash(), kind="generic_attention"), filled.target)


def _run(
    case: Case, filled: Filled, q: np.ndarray, positions: np.ndarray, threads: int = 3
) -> np.ndarray:
    out = np.full((len(q), case.heads, case.value_width), np.nan, np.float32)
    operands = (q, positions, filled.cache.slots(len(q)), filled.cache.state, *filled.sink_arrays)
    literals = (0, case.window)
    _generic(case, filled)(len(q), (*operands, out), literals, threads=threads, order="reversed")
    return out


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_single_rows(name: str) -> None:
    case = CASES[name]
    filled = Filled(case)
    for n in (1, 5, 33, 64, 1):
        positions = filled.append(n)
        q = filled.queries(n)
        got = _run(case, filled, q, positions)
        np.testing.assert_allclose(got, filled.expected(q, positions), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [CASES["odd widths"], MIXED])
def test_the_update_writes_what_the_kernel_writes(case: Case) -> None:
    by_kernel, by_loops = Filled(case), Filled(case)
    spec = replace(kv_update_spec(case.layer()), kind="generic_kv_update")
    update = CompiledKernel(spec, by_loops.target)
    rng = np.random.default_rng(0)
    start = 0
    for n in (1, 40, 64, 7):
        k, v = (rng.standard_normal((n, case.kv_heads, w)).astype(np.float32)
                for w in (case.key_width, case.value_width))  # fmt: skip
        positions = np.arange(start, start + n)
        positions[n // 2] = -1 if n == 40 else positions[n // 2]  # a row of padding
        by_kernel.cache.append(0, k, v, positions)
        operands = (k, v, positions, by_loops.cache.slots(n), by_loops.cache.state)
        update(n, operands, (0,), threads=2)
        start += n
    assert by_kernel.cache.state.tobytes() == by_loops.cache.state.tobytes()


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    case = replace(MIXED, sinks=False)
    filled = Filled(case)
    positions = filled.append(9)
    q = filled.queries(9)
    hidden = positions.copy()
    hidden[4] = -1
    got = _run(case, filled, q, hidden)
    assert (got[4] == 0).all()
    seen = np.arange(9) != 4
    expected = filled.expected(q, positions)
    np.testing.assert_allclose(got[seen], expected[seen], rtol=1e-5, atol=2e-6)


def test_small_integers_have_the_bits_of_the_kernel() -> None:
    """One key per query wins by far, so that both sum exactly one value."""
    case = Case(4, 2, 40, 8, kv="f16")
    filled = Filled(case)
    n = 40
    k = np.zeros((n, 2, 40), np.float32)
    k[np.arange(n), :, np.arange(n)] = 8
    v = np.random.default_rng(0).integers(-9, 9, (n, 2, 8)).astype(np.float32)
    positions = np.arange(n)
    filled.cache.append(0, k, v, positions)
    q = np.zeros((n, 4, 40), np.float32)
    q[np.arange(n), :, np.arange(n)] = 1024
    fast = np.full((n, 4, 8), np.nan, np.float32)
    operands = (q, positions, filled.cache.slots(n), filled.cache.state)
    CompiledKernel(case.flash(), filled.target)(n, (*operands, fast), (0, 0))
    assert _run(case, filled, q, positions).tobytes() == fast.tobytes()
