"""Q5_0 and Q5_1: Q4 with a fifth bit for each value, kept in one 32-bit word a block.

``w = d * (q - 16)`` and ``w = d * q + m``. Bit i of the word is the top bit of value i.
"""

from __future__ import annotations

import numpy as np

from bessemer.quantize.blocks import BlockFormat, F32Array, U8Array
from bessemer.quantize.q4 import unpack_nibbles

LAYOUT_0 = np.dtype([("d", "<f2"), ("high", "u1", (4,)), ("q", "u1", (16,))])
LAYOUT_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("high", "u1", (4,)), ("q", "u1", (16,))])
Q5_0_OFFSET = np.int8(16)


def _values(blocks: np.ndarray) -> U8Array:
    """The 32 values 0..31 of each block, ``[n, 32]``."""
    high = np.unpackbits(blocks["high"], axis=1, bitorder="little")
    return unpack_nibbles(blocks["q"]) | (high << np.uint8(4))


def _decode_0(blocks: np.ndarray) -> F32Array:
    d = blocks["d"].astype(np.float32)[:, None]
    return d * (_values(blocks).view(np.int8) - Q5_0_OFFSET).astype(np.float32)


def _decode_1(blocks: np.ndarray) -> F32Array:
    d = blocks["d"].astype(np.float32)[:, None]
    m = blocks["m"].astype(np.float32)[:, None]
    return d * _values(blocks).astype(np.float32) + m


Q5_0 = BlockFormat("q5_0", 32, LAYOUT_0, _decode_0)
Q5_1 = BlockFormat("q5_1", 32, LAYOUT_1, _decode_1)
