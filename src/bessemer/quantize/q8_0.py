"""Q8_0: 32 signed bytes and one f16 scale. ``w = d * q``"""

from __future__ import annotations

import numpy as np

from bessemer.quantize.blocks import BlockFormat, F32Array

LAYOUT = np.dtype([("d", "<f2"), ("q", "i1", (32,))])


def _decode(blocks: np.ndarray) -> F32Array:
    d = blocks["d"].astype(np.float32)[:, None]
    return d * blocks["q"].astype(np.float32)


Q8_0 = BlockFormat("q8_0", 32, LAYOUT, _decode)
