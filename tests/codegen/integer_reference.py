"""What `integer_rows` computes, in NumPy."""

from __future__ import annotations

import numpy as np

DEPTH = 32


def integers(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(i16 [..., 32 * blocks], f32 scales [..., blocks]) of float32 [..., K]."""
    missing = -x.shape[-1] % DEPTH
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], missing), np.float32)], axis=-1)
    cut = padded.reshape(*x.shape[:-1], -1, DEPTH)
    top = np.maximum(np.abs(cut).max(-1), np.float32(2.0**-110))
    power = np.exp2(np.floor(np.log2(top.astype(np.float64)))).astype(np.float32)
    with np.errstate(invalid="ignore"):  # what is not finite has an infinite scale and any number
        scaled = cut * (np.float32(2.0**14) / power)[..., None]
        q = np.clip(np.rint(scaled), -32767, 32767).astype(np.int16)
    return q.reshape(padded.shape), power * np.float32(2.0**-14)


def grouped(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """`integers` as they lie in memory, in groups of rows; rows that fill up a group are junk."""
    q, scales = integers(x.reshape(-1, x.shape[-1]))
    missing = -len(q) % group
    q = np.concatenate([q, np.full((missing, q.shape[1]), -7, np.int16)])
    scales = np.concatenate([scales, np.full((missing, scales.shape[1]), np.nan, np.float32)])
    by_pair = q.reshape(-1, group, q.shape[1] // 2, 2).transpose(0, 2, 1, 3)
    by_block = scales.reshape(-1, group, scales.shape[1]).transpose(0, 2, 1)
    return (
        np.ascontiguousarray(by_pair).reshape(q.shape),
        np.ascontiguousarray(by_block).reshape(scales.shape),
    )
