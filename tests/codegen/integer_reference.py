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
    scaled = cut * (np.float32(2.0**14) / power)[..., None]
    q = np.clip(np.rint(scaled), -32767, 32767).astype(np.int16)
    return q.reshape(padded.shape), power * np.float32(2.0**-14)
