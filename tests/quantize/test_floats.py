"""float32, f16 and bf16 conversions, against all patterns and an independent implementation."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.quantize import bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16

ALL_PATTERNS = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1e-5, 0x00A8),
        (2.0**-24, 0x0001),
        (2.0**-25, 0x0000),
        (np.nextafter(np.float32(2.0**-25), np.float32(1)), 0x0001),
        (65519.996, 0x7BFF),
        (65520.0, 0x7C00),
        (-65520.0, 0xFC00),
        (1.0 + 2.0**-11, 0x3C00),
        (1.0 + 3 * 2.0**-11, 0x3C02),
        (-0.0, 0x8000),
        (np.inf, 0x7C00),
        (-np.inf, 0xFC00),
    ],
)
def test_f16_of_known_values(value: float, bits: int) -> None:
    assert f32_to_f16(np.float32(value)) == bits


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (1.0 + 2.0**-8, 0x3F80),
        (1.0 + 3 * 2.0**-8, 0x3F82),
        (3.4e38, 0x7F80),
        (-0.0, 0x8000),
        (1e-40, 0x0001),
        (-np.inf, 0xFF80),
    ],
)
def test_bf16_of_known_values(value: float, bits: int) -> None:
    assert f32_to_bf16(np.float32(value)) == bits


@pytest.mark.parametrize(
    ("narrow", "widen", "exponent"),
    [(f32_to_f16, f16_to_f32, 0x7C00), (f32_to_bf16, bf16_to_f32, 0x7F80)],
    ids=["f16", "bf16"],
)
def test_every_pattern_round_trips(narrow, widen, exponent: int) -> None:
    wide = widen(ALL_PATTERNS)
    back = narrow(wide)
    is_nan = exponent < (ALL_PATTERNS & 0x7FFF)
    assert np.array_equal(np.isnan(wide), is_nan)
    assert np.array_equal(back[~is_nan], ALL_PATTERNS[~is_nan])
    assert ((back[is_nan] & 0x7FFF) > exponent).all()
    assert np.array_equal(back & 0x8000, ALL_PATTERNS & 0x8000)


def test_every_f16_pattern_has_the_value_that_python_gives_it() -> None:
    expected = np.array(
        [struct.unpack("<e", struct.pack("<H", bits))[0] for bits in range(1 << 16)], np.float32
    )
    assert np.array_equal(f16_to_f32(ALL_PATTERNS), expected, equal_nan=True)


@pytest.mark.parametrize("nan", [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_nan_stays_nan_with_its_sign(nan: int) -> None:
    value = np.array([nan], np.uint32).view(np.float32)
    for narrow, widen in ((f32_to_f16, f16_to_f32), (f32_to_bf16, bf16_to_f32)):
        back = widen(narrow(value))
        assert np.isnan(back).all()
        assert bool(np.signbit(back)[0]) == bool(nan >> 31)


def test_shapes_are_kept_and_strides_allowed() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    for narrow, widen in ((f32_to_f16, f16_to_f32), (f32_to_bf16, bf16_to_f32)):
        assert np.array_equal(widen(narrow(values)), values)
    assert f32_to_bf16(np.float32(1)).shape == ()
    assert f32_to_f16(np.zeros((0, 3), np.float32)).shape == (0, 3)


@given(st.integers(0, (1 << 32) - 1))
def test_rounding_is_to_nearest_even(bits: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    for narrow, widen in ((f32_to_f16, f16_to_f32), (f32_to_bf16, bf16_to_f32)):
        result = int(narrow(value)[0])
        if not np.isfinite(value[0]) or not np.isfinite(widen(np.uint16(result))):
            continue
        exact, held = float(value[0]), float(widen(np.uint16(result)))
        for other in (result - 1, result + 1):
            if other & 0x8000 != result & 0x8000 or not 0 <= other <= 0xFFFF:
                continue
            near = float(widen(np.uint16(other)))
            if not np.isfinite(near):
                continue
            assert abs(exact - held) <= abs(exact - near)
            if abs(exact - held) == abs(exact - near):
                assert result % 2 == 0
