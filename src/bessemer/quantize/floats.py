"""float32, IEEE binary16 (f16) and bfloat16, as bit patterns.

NumPy has no bfloat16: it is held as uint16 bit patterns throughout. Conversions round to nearest,
ties to even, overflow to infinity, and keep NaN a NaN with its sign.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bessemer.quantize.blocks import BlockFormat, F32Array

U16Array = npt.NDArray[np.uint16]

F16_SIGN = np.uint16(0x8000)
F16_QUIET_NAN = np.uint16(0x7E00)
BF16_QUIET_BIT = np.uint16(0x0040)
F32_ABS_MASK = np.uint32(0x7FFF_FFFF)
F32_INFINITY = np.uint32(0x7F80_0000)


def f32_to_f16(values: npt.ArrayLike) -> U16Array:
    """float32 of any shape to f16 bit patterns (uint16, same shape).

    65520 and above become infinity, below 2^-25 (inclusive) becomes zero, subnormals are exact.
    Every NaN becomes the quiet NaN with its sign: the payload of a float32 NaN may lie wholly in
    the bits that f16 lacks.
    """
    x = np.asarray(values, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        bits = x.astype(np.float16).view(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        sign = np.where(np.signbit(x), F16_SIGN, np.uint16(0))
        bits = np.where(nan, F16_QUIET_NAN | sign, bits)
    return np.asarray(bits, dtype=np.uint16)


def f16_to_f32(bits: npt.ArrayLike) -> F32Array:
    """f16 bit patterns (uint16, any shape) to float32, exactly."""
    halves = np.asarray(bits, dtype=np.uint16).view(np.float16)
    # A signalling NaN raises "invalid" when widened; it stays a NaN, which is all that matters.
    with np.errstate(invalid="ignore"):
        return halves.astype(np.float32)


def f32_to_bf16(values: npt.ArrayLike) -> U16Array:
    """float32 of any shape to bf16 bit patterns (uint16, same shape)."""
    x = np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values))
    u = x.view(np.uint32)
    # Adding 0x7FFF, plus one if the kept part is odd, carries into bit 16 exactly when the
    # dropped half is above one half, or equal to it with an odd result.
    rounded = u + (np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))
    bits = (rounded >> np.uint32(16)).astype(np.uint16)
    nan = (u & F32_ABS_MASK) > F32_INFINITY
    if nan.any():
        # The addition could carry a NaN's mantissa over into infinity or the sign.
        bits = np.where(nan, (u >> np.uint32(16)).astype(np.uint16) | BF16_QUIET_BIT, bits)
    return np.asarray(bits, dtype=np.uint16)


def bf16_to_f32(bits: npt.ArrayLike) -> F32Array:
    """bf16 bit patterns (uint16, any shape) to float32, exactly: bf16 is its upper half."""
    wide = np.asarray(bits, dtype=np.uint16).astype(np.uint32)
    return (wide << np.uint32(16)).view(np.float32)


def _decode_f32(blocks: np.ndarray) -> F32Array:
    return blocks.astype(np.float32).reshape(-1, 1)


def _decode_f16(blocks: np.ndarray) -> F32Array:
    return f16_to_f32(blocks).reshape(-1, 1)


def _decode_bf16(blocks: np.ndarray) -> F32Array:
    return bf16_to_f32(blocks).reshape(-1, 1)


F32 = BlockFormat("f32", 1, np.dtype("<f4"), _decode_f32)
F16 = BlockFormat("f16", 1, np.dtype("<u2"), _decode_f16)
BF16 = BlockFormat("bf16", 1, np.dtype("<u2"), _decode_bf16)
