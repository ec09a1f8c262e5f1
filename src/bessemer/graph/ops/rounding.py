"""Low-precision steps in f32: round trips through E4M3 and E2M1, and the Hadamard rotation.

A round trip leaves f32 values that the narrow format can hold: each block of the last axis is
divided by a scale that is a power of two, rounded to the format (nearest, ties to even) and
multiplied by the scale again. The scale of a block is the least power of two for which its largest
magnitude fits the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bessemer.graph.core import TensorType
from bessemer.graph.schema import REQUIRED, GraphError, OpSchema, register


@dataclass(frozen=True)
class NarrowFormat:
    """A float format without infinities, by what rounding to it needs.

    mantissa: stored mantissa bits.  least_exponent: of the smallest normal number; below it the
    steps stay as wide.  largest: the largest finite number.  floor: magnitudes of a block below it
    do not shrink the scale further.
    """

    mantissa: int
    least_exponent: int
    largest: float
    floor: float


# The floors are those of DeepSeek's published kernels: 1e-4 for E4M3, and for E2M1 what keeps the
# scale a normal number.
NARROW: dict[str, NarrowFormat] = {
    "e4m3": NarrowFormat(3, -6, 448.0, 1e-4),
    "e2m1": NarrowFormat(1, 0, 6.0, 6.0 * 2.0**-126),
}


def power_of_two_scale(amax: np.ndarray, narrow: NarrowFormat) -> np.ndarray:
    """The least power of two s with amax / s <= largest, f32."""
    ratio = np.maximum(amax, np.float32(narrow.floor)) / np.float32(narrow.largest)
    fraction, exponent = np.frexp(ratio)
    return np.ldexp(np.float32(1), np.where(fraction == 0.5, exponent - 1, exponent))


def round_to(x: np.ndarray, narrow: NarrowFormat) -> np.ndarray:
    """x rounded to the format, ties to even, magnitudes clamped to its largest; f32."""
    clamped = np.clip(x, np.float32(-narrow.largest), np.float32(narrow.largest))
    exponent = np.maximum(np.frexp(clamped)[1] - 1, narrow.least_exponent)
    step = np.ldexp(np.float32(1), exponent - narrow.mantissa)
    return (np.rint(clamped / step) * step).astype(np.float32)


def round_trip(x: np.ndarray, format: str, block: int) -> np.ndarray:
    """Blocks of the last axis through a narrow format and back; f32."""
    narrow = NARROW[format]
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    scale = power_of_two_scale(np.abs(blocks).max(-1, keepdims=True), narrow)
    return (round_to(blocks / scale, narrow) * scale).reshape(x.shape).astype(x.dtype)


def hadamard(x: np.ndarray) -> np.ndarray:
    """x @ H / sqrt(n) over the last axis, H the Hadamard matrix in Sylvester's order."""
    shape, half = x.shape, 1
    while half < shape[-1]:
        pairs = x.reshape(*shape[:-1], shape[-1] // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(shape)
        half *= 2
    return (x * np.float32(shape[-1] ** -0.5)).astype(x.dtype)


def check_blocks(size: Any, format: str, block: int) -> None:
    """Raises GraphError unless `size` elements are whole blocks of a known format."""
    if format not in NARROW:
        raise GraphError(f"unknown narrow format {format!r}; known are {', '.join(NARROW)}")
    if not isinstance(size, int) or block < 1 or size % block:
        raise GraphError(f"{size} elements are not whole blocks of {block}")


def check_power_of_two(size: Any) -> None:
    if not isinstance(size, int) or size < 1 or size & (size - 1):
        raise GraphError(f"the Hadamard rotation of {size} elements, not a power of two")


def _round_trip_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    begin, end, width = attrs["begin"], attrs["end"], x.shape[-1]
    if not isinstance(width, int) or not 0 <= begin <= end <= width:
        raise GraphError(f"round_trip of elements {begin} to {end} of {x}")
    check_blocks(end - begin, attrs["format"], attrs["block"])
    return x


def _round_trip(x: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    begin, end = attrs["begin"], attrs["end"]
    result = x.copy()
    if end > begin:
        result[..., begin:end] = round_trip(x[..., begin:end], attrs["format"], attrs["block"])
    return result


def _hadamard_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    check_power_of_two(types[0].shape[-1])
    return types[0]


register(
    OpSchema(
        "round_trip",
        (1, 1),
        {"format": REQUIRED, "block": REQUIRED, "begin": 0, "end": REQUIRED},
        _round_trip_type,
        _round_trip,
        doc="x[..., D] with elements begin..end of the last axis rounded to `format` (e4m3, e2m1) "
        "in blocks with power-of-two scales, and widened to f32 again.",
    )
)
register(
    OpSchema(
        "hadamard",
        (1, 1),
        {},
        _hadamard_type,
        lambda x, attrs: hadamard(x),
        doc="x[..., D] @ H[D, D] / sqrt(D) with the Hadamard matrix in Sylvester's order; D a "
        "power of two.",
    )
)
