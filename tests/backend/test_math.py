"""Math functions and float conversions of compiled code against NumPy, scalar and vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.backend.target import Target

from .support import WIDTHS, apply, elementwise, load

Array = np.ndarray[Any, Any]
TARGETS = {"native": Target.native(), "baseline": Target.parse("native", "baseline")}

_SPECIAL = """
0 -0.0 inf -inf nan 1 -1 1e-45 -1e-45 1e-38 1e38 -1e38 88.7 88.73 89 -87.3 -87.4 -103.9 -104 -1e4
0.5 -0.5 0.625 0.62499 2 127 128 -126 -149 -151 3.99 4 0.70710677 1.4142135 1e-20 3 9 10 1e6 -1e6
"""
SPECIAL = np.array(_SPECIAL.split(), np.float32)
_ERF = np.frompyfunc(math.erf, 1, 1)


def erf(x: Array) -> Array:
    return _ERF(x).astype(np.float64)


def sine(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """NaN for what is no angle: in f32 a turn lies between such numbers and their neighbours."""
    return lambda x: function(np.where(np.abs(x) < 2.0**50, x, np.nan))


# function, reference in f64, sampled interval, largest error in units in the last place.
FUNCTIONS = {
    "exp": (np.exp, (-104, 89), 2),
    "exp2": (np.exp2, (-150, 128), 2),
    "expm1": (np.expm1, (-20, 89), 3),
    "log": (np.log, (0, 100), 2),
    "log1p": (np.log1p, (-1, 100), 3),
    "tanh": (np.tanh, (-10, 10), 4),
    "erf": (erf, (-4.5, 4.5), 4),
    "sin": (sine(np.sin), (-1e6, 1e6), 0.51),
    "cos": (sine(np.cos), (-1e6, 1e6), 0.51),
    # one division and one square root
    "rsqrt": (lambda x: 1 / np.sqrt(x), (0, 1000), 2),
    "sqrt": (np.sqrt, (0, 1000), 0.51),
}


def samples(low: float, high: float) -> Array:
    """Special values, an even grid, and numbers of every magnitude near zero."""
    rng = np.random.default_rng(0)
    grid = np.linspace(low, high, 40_000)
    tiny = rng.uniform(-1, 1, 8000) * 10.0 ** rng.uniform(-40, 0, 8000)
    everything = np.concatenate([SPECIAL, grid, tiny]).astype(np.float32)
    return np.resize(everything, (everything.size + 7) // 8 * 8)


def ulps(got: Array, exact: Array) -> Array:
    """Error in units in the last place of the f32 result; 0 where both are the same special."""
    with np.errstate(all="ignore"):
        rounded = exact.astype(np.float32)
        unit = np.spacing(np.abs(rounded)).astype(np.float64)
        error = np.abs(got.astype(np.float64) - exact) / unit
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    return np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy(name: str, kind: str, cpu: str, tmp_path: Path) -> None:
    reference, interval, bound = FUNCTIONS[name]
    library = load(elementwise(f"%r = math.{name} %x : {{S}}", kind), tmp_path, TARGETS[cpu])
    x = samples(*interval)
    got = apply(library, x)
    with np.errstate(all="ignore"):
        exact = reference(x.astype(np.float64))
    error = ulps(got, exact)
    worst = int(np.argmax(error))
    assert error[worst] <= bound, (x[worst], got[worst], exact[worst])


@pytest.mark.parametrize("kind", WIDTHS)
def test_pow(kind: str, tmp_path: Path) -> None:
    body = "%c = arith.constant {} : {{S}}\n%r = math.powf %c, %x : {{S}}"
    literal = "dense<1.0e4>" if kind == "vector" else "1.0e4"
    library = load(elementwise(body.format(literal), kind), tmp_path)
    x = np.linspace(-1, 1, 4096, dtype=np.float32)
    assert ulps(apply(library, x), 1e4 ** x.astype(np.float64)).max() <= 1


@pytest.mark.parametrize("kind", WIDTHS)
def test_exact_values(kind: str, tmp_path: Path) -> None:
    """exp(-inf) is 0, signs of zero are kept, NaN goes through."""
    x = np.array([-np.inf, np.inf, np.nan, 0.0, -0.0, -1e30, 1e30, 1.0], np.float32)
    got = {}
    for name in ("exp", "tanh", "erf", "log"):
        folder = tmp_path / name
        folder.mkdir()
        got[name] = apply(load(elementwise(f"%r = math.{name} %x : {{S}}", kind), folder), x)
    assert got["exp"][[0, 1, 3, 4, 5, 6]].tolist() == [0, np.inf, 1, 1, 0, np.inf]
    for name in ("tanh", "erf"):
        assert got[name][[0, 1, 3, 5, 6]].tolist() == [-1, 1, 0, -1, 1]
        assert np.signbit(got[name][3:5]).tolist() == [False, True]
    assert got["log"][[1, 3, 4, 7]].tolist() == [np.inf, -np.inf, -np.inf, 0]
    assert np.isnan(got["log"][[0, 5]]).all()
    assert all(np.isnan(values[2]) for values in got.values())


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("kind", WIDTHS)
def test_falling_exp(kind: str, cpu: str, tmp_path: Path) -> None:
    """exp of at most 0: a small error of the result, and what is no normal number becomes 0."""
    body = "%r = math.exp %x fastmath<afn> : {S}"
    library = load(elementwise(body, kind), tmp_path, TARGETS[cpu])
    x = -np.abs(samples(-90, 0))
    got = apply(library, x)
    with np.errstate(all="ignore"):
        exact = np.exp(x.astype(np.float64))
    tiny = np.finfo(np.float32).tiny
    assert not got[exact < tiny * (1 - 1e-5)].any()
    kept = exact > tiny * (1 + 1e-5)
    error = np.abs(got[kept] / exact[kept] - 1)
    assert (error <= 1.7e-7 + 7.3e-8 * np.abs(x[kept])).all()
    assert (error * exact[kept]).max() <= 1.7e-7
    special = apply(library, np.array([0.0, -0.0, -np.inf, np.nan, -1e30, 0, 0, 0], np.float32))
    assert special[[0, 1, 2, 4]].tolist() == [1, 1, 0, 0]
    assert np.isnan(special[3])


def test_vector_math_has_no_calls(tmp_path: Path) -> None:
    """exp of a vector stays in registers; only pow and its like call libm."""
    from bessemer.backend.codegen import compile_module

    text = elementwise("%a = math.exp %x : {S}\n%b = math.erf %a : {S}\n%r = math.tanh %b : {S}")
    compiled = compile_module(text, Target.native(), "test", assembly=True)
    assert compiled.assembly is not None
    calls = [line for line in compiled.assembly.splitlines() if "\tcall" in line]
    assert all("f" in line and "expf" not in line and "erff" not in line for line in calls)
    assert len(calls) <= 1  # the C interface's own call of f, where it isn't inlined


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("kind", WIDTHS)
def test_f16_to_f32_all_patterns(kind: str, cpu: str, tmp_path: Path) -> None:
    body = "%r = arith.extf %x : {S} to {R}"
    library = load(elementwise(body, kind, "f16", "f32"), tmp_path, TARGETS[cpu])
    patterns = np.arange(65536, dtype=np.uint16).view(np.float16)
    got = apply(library, patterns)
    nan = np.isnan(patterns)
    assert np.array_equal(got[~nan], patterns[~nan].astype(np.float32))
    assert np.isnan(got[nan]).all()
    assert np.array_equal(np.signbit(got), np.signbit(patterns))


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("kind", WIDTHS)
def test_f32_to_f16(kind: str, cpu: str, tmp_path: Path) -> None:
    body = "%r = arith.truncf %x : {S} to {R}"
    library = load(elementwise(body, kind, "f32", "f16"), tmp_path, TARGETS[cpu])
    known = np.array([1e-5, 2.0**-24, 2.0**-25, 65520, np.nan, 65519, -0.0, -np.inf], np.float32)
    bits = apply(library, known, np.float16).view(np.uint16).tolist()
    assert bits[:4] == [0x00A8, 0x0001, 0x0000, 0x7C00]
    assert (bits[4] & 0x7FFF) > 0x7C00
    assert bits[5:] == [0x7BFF, 0x8000, 0xFC00]
    x = _halfway_points(np.float16)
    with np.errstate(over="ignore"):
        assert np.array_equal(
            apply(library, x, np.float16).view(np.uint16), x.astype(np.float16).view(np.uint16)
        )


def _halfway_points(dtype: Any) -> Array:
    """Every finite value, each value's midpoint to the next, and both neighbours of that."""
    values = np.arange(0x7C00, dtype=np.uint16).view(dtype).astype(np.float64)
    middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    near = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, 9e9)])
    both = np.concatenate([near, values.astype(np.float32)]).astype(np.float32)
    both = np.concatenate([both, -both])
    return np.resize(both, (both.size + 7) // 8 * 8)


@pytest.mark.parametrize("kind", WIDTHS)
def test_bf16_both_ways(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    widen = load(
        elementwise("%r = arith.extf %x : {S} to {R}", kind, "bf16", "f32"), tmp_path / "a"
    )
    narrow = load(elementwise("%r = arith.truncf %x : {S} to {R}", kind, "f32", "bf16"), tmp_path)
    patterns = np.arange(65536, dtype=np.uint16)
    wide = apply(widen, patterns).view(np.uint32)
    assert np.array_equal(wide, patterns.astype(np.uint32) << 16)
    back = apply(narrow, wide.view(np.float32), np.uint16)
    nan = np.isnan(wide.view(np.float32))
    assert np.array_equal(back[~nan], patterns[~nan])
    assert np.array_equal(back[nan], patterns[nan] | 0x40)
    # Ties go to even, a carry may reach infinity.
    x = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00008000, 0x00018000, 0, 0])
    got = apply(narrow, x.astype(np.uint32).view(np.float32), np.uint16)
    assert got[:6].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x0000, 0x0002]


def test_half_precision_chains_stay_in_f32(tmp_path: Path) -> None:
    """300 * 300 is beyond f16; between two operations nothing is rounded to it."""
    body = "%y = arith.mulf %x, %x : {S}\n%z = math.sqrt %y : {S}\n%r = arith.extf %z : {S} to {R}"
    library = load(elementwise(body, "vector", "f16", "f32"), tmp_path)
    x = np.array([1.5, 300, 181, 0, 2, 3, 4, 5], np.float16)
    assert np.array_equal(apply(library, x), x.astype(np.float32))
