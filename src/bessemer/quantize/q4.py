"""Q4_0 and Q4_1: 32 four-bit values and one f16 scale, Q4_1 with an f16 minimum.

``w = d * (q - 8)`` and ``w = d * q + m``. Byte i holds value i in its low half and value i + 16
in its high half.
"""

from __future__ import annotations

import numpy as np

from bessemer.quantize.blocks import BlockFormat, F32Array, U8Array

LAYOUT_0 = np.dtype([("d", "<f2"), ("q", "u1", (16,))])
LAYOUT_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", (16,))])
Q4_0_OFFSET = np.int8(8)


def unpack_nibbles(packed: U8Array) -> U8Array:
    """``[n, k]`` bytes to ``[n, 2k]`` values 0..15: all the low halves, then all the high ones."""
    return np.concatenate([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=1)


def _decode_0(blocks: np.ndarray) -> F32Array:
    d = blocks["d"].astype(np.float32)[:, None]
    return d * (unpack_nibbles(blocks["q"]).view(np.int8) - Q4_0_OFFSET).astype(np.float32)


def _decode_1(blocks: np.ndarray) -> F32Array:
    d = blocks["d"].astype(np.float32)[:, None]
    m = blocks["m"].astype(np.float32)[:, None]
    return d * unpack_nibbles(blocks["q"]).astype(np.float32) + m


Q4_0 = BlockFormat("q4_0", 32, LAYOUT_0, _decode_0)
Q4_1 = BlockFormat("q4_1", 32, LAYOUT_1, _decode_1)
