"""The K formats: super-blocks of 256 values, cut into sub-blocks with small integer scales.

Q4_K and Q5_K have 8 sub-blocks of 32 with 6-bit scales and minima, Q2_K, Q3_K and Q6_K have 16
sub-blocks of 16. With ``d`` and ``dmin`` the super-block's f16 scales and ``s``, ``m`` the
sub-block's integers: ``w = d*s*q - dmin*m`` (Q2_K, Q4_K, Q5_K), ``w = d*s*q`` (Q3_K, Q6_K).
The order of the multiplications is ggml's, so that the bits are the same.
"""

from __future__ import annotations

import numpy as np

from bessemer.quantize.blocks import BlockFormat, F32Array, U8Array

SUPER_BLOCK = 256

LAYOUT_2 = np.dtype([("scales", "u1", (16,)), ("q", "u1", (64,)), ("d", "<f2"), ("dmin", "<f2")])
LAYOUT_3 = np.dtype(
    [("high", "u1", (32,)), ("q", "u1", (64,)), ("scales", "u1", (12,)), ("d", "<f2")]
)
LAYOUT_4 = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", (12,)), ("q", "u1", (128,))])
LAYOUT_5 = np.dtype(
    [
        ("d", "<f2"),
        ("dmin", "<f2"),
        ("scales", "u1", (12,)),
        ("high", "u1", (32,)),
        ("q", "u1", (128,)),
    ]
)
LAYOUT_6 = np.dtype(
    [("q", "u1", (128,)), ("high", "u1", (64,)), ("scales", "i1", (16,)), ("d", "<f2")]
)


def _fields(packed: U8Array, group: int, bits: int) -> U8Array:
    """Splits bytes into `bits`-wide fields, low fields first, within groups of `group` bytes.

    ``[n, k]`` to ``[n, k * 8 / bits]``: the lowest fields of the first `group` bytes, then their
    next fields, and so on, then those of the next group.
    """
    n = len(packed)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[None, None, :, None]
    fields = packed.reshape(n, -1, 1, group) >> shifts
    return (fields & np.uint8((1 << bits) - 1)).reshape(n, -1)


def _scales_and_minima(packed: U8Array) -> tuple[U8Array, U8Array]:
    """Twelve bytes to eight 6-bit scales and eight 6-bit minima, each ``[n, 8]``.

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low six bits; bytes 8-11 hold the low
    four bits of scales (low half) and minima (high half) 4-7, whose top two bits sit in the top
    of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    six, four, top = np.uint8(0x3F), np.uint8(0x0F), np.uint8(0x30)
    late_scales = (third & four) | ((first >> np.uint8(2)) & top)
    late_minima = (third >> np.uint8(4)) | ((second >> np.uint8(2)) & top)
    scales = np.concatenate([first & six, late_scales], axis=1)
    minima = np.concatenate([second & six, late_minima], axis=1)
    return scales, minima


def _scale_shift(blocks: np.ndarray, scales: U8Array, minima: U8Array, values: U8Array) -> F32Array:
    """``(d*scale)*value - (dmin*minimum)`` for sub-blocks of ``256 / scales.shape[1]`` values."""
    n, parts = scales.shape
    d = blocks["d"].astype(np.float32)[:, None]
    dmin = blocks["dmin"].astype(np.float32)[:, None]
    step = (d * scales.astype(np.float32))[:, :, None]
    low = (dmin * minima.astype(np.float32))[:, :, None]
    return (step * values.reshape(n, parts, -1).astype(np.float32) - low).reshape(n, SUPER_BLOCK)


def _scale(blocks: np.ndarray, scales: np.ndarray, values: np.ndarray) -> F32Array:
    """``(d*scale)*value`` for sixteen sub-blocks of sixteen signed values."""
    n = len(blocks)
    d = blocks["d"].astype(np.float32)[:, None]
    step = (d * scales.astype(np.float32))[:, :, None]
    return (step * values.reshape(n, 16, 16).astype(np.float32)).reshape(n, SUPER_BLOCK)


def _decode_2(blocks: np.ndarray) -> F32Array:
    packed = blocks["scales"]
    values = _fields(blocks["q"], 32, 2)
    return _scale_shift(blocks, packed & np.uint8(0x0F), packed >> np.uint8(4), values)


def _decode_3(blocks: np.ndarray) -> F32Array:
    packed = blocks["scales"]
    low = _fields(packed[:, :8], 8, 4)
    high = _fields(packed[:, 8:], 4, 2)
    scales = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    # A set bit of the mask means that nothing is taken off: the values are -4..3.
    mask = _fields(blocks["high"], 32, 1)
    values = (_fields(blocks["q"], 32, 2) | (mask << np.uint8(2))).view(np.int8) - np.int8(4)
    return _scale(blocks, scales, values)


def _decode_4(blocks: np.ndarray) -> F32Array:
    scales, minima = _scales_and_minima(blocks["scales"])
    return _scale_shift(blocks, scales, minima, _fields(blocks["q"], 32, 4))


def _decode_5(blocks: np.ndarray) -> F32Array:
    scales, minima = _scales_and_minima(blocks["scales"])
    high = _fields(blocks["high"], 32, 1)
    values = _fields(blocks["q"], 32, 4) | (high << np.uint8(4))
    return _scale_shift(blocks, scales, minima, values)


def _decode_6(blocks: np.ndarray) -> F32Array:
    high = _fields(blocks["high"], 32, 2)
    values = (_fields(blocks["q"], 64, 4) | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    return _scale(blocks, blocks["scales"], values)


Q2_K = BlockFormat("q2_k", SUPER_BLOCK, LAYOUT_2, _decode_2)
Q3_K = BlockFormat("q3_k", SUPER_BLOCK, LAYOUT_3, _decode_3)
Q4_K = BlockFormat("q4_k", SUPER_BLOCK, LAYOUT_4, _decode_4)
Q5_K = BlockFormat("q5_k", SUPER_BLOCK, LAYOUT_5, _decode_5)
Q6_K = BlockFormat("q6_k", SUPER_BLOCK, LAYOUT_6, _decode_6)
