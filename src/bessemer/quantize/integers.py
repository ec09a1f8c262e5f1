"""Whole numbers in checkpoints: tables of ids. They become float32, exactly up to 2^24."""

from __future__ import annotations

import numpy as np

from bessemer.quantize.blocks import BlockFormat, F32Array


def _decode(blocks: np.ndarray) -> F32Array:
    return blocks.astype(np.float32).reshape(-1, 1)


I32 = BlockFormat("i32", 1, np.dtype("<i4"), _decode)
I64 = BlockFormat("i64", 1, np.dtype("<i8"), _decode)
