"""Q8_0: 32 signed bytes and one f16 scale. ``w = d * q``"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bessemer.quantize.blocks import BlockFormat, F32Array

LAYOUT = np.dtype([("d", "<f2"), ("q", "i1", (32,))])


def _decode(blocks: np.ndarray) -> F32Array:
    d = blocks["d"].astype(np.float32)[:, None]
    return d * blocks["q"].astype(np.float32)


# The largest magnitude of an encoded weight; -128 is left out, so that negation is exact.
LARGEST = 127


def encode(values: F32Array) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int8]]:
    """Quantise float32 [..., blocks, 32]: scales f16 [..., blocks] and weights int8 of its shape.

    scale = max |w| / 127 rounded to f16, q = round(w / scale). A block that already is `f16 scale
    times integers` keeps its very numbers, whichever its largest integer: values decoded from
    Q8_0 are taken over without a second rounding. Values beyond what f16 scales reach give inf.
    """
    top = np.max(np.abs(values), axis=-1)
    with np.errstate(over="ignore"):
        scales = (top / np.float32(LARGEST)).astype(np.float16)
    quantised = _round(values, scales)
    inexact = ~_is_exact(values, scales, quantised)
    for largest in range(LARGEST - 1, 0, -1):
        if not inexact.any():
            break
        # Only a block whose largest weight is this multiple of an f16 scale is a candidate.
        with np.errstate(over="ignore"):
            trial = (top / np.float32(largest)).astype(np.float16)
        fits = inexact & (trial.astype(np.float32) * np.float32(largest) == top)
        if not fits.any():
            continue
        q = _round(values[fits], trial[fits])
        exact = _is_exact(values[fits], trial[fits], q)
        chosen = np.nonzero(fits)
        chosen = tuple(axis[exact] for axis in chosen)
        scales[chosen], quantised[chosen] = trial[chosen], q[exact]
        inexact[chosen] = False
    return scales, quantised


def _round(values: F32Array, scales: npt.NDArray[np.float16]) -> npt.NDArray[np.int8]:
    wide = scales.astype(np.float32)[..., None]
    safe = np.where((wide == 0) | ~np.isfinite(wide), np.float32(1), wide)
    steps = np.where(wide == 0, np.float32(0), values / safe)
    return np.clip(np.rint(steps), -LARGEST, LARGEST).astype(np.int8)


def _is_exact(
    values: F32Array, scales: npt.NDArray[np.float16], quantised: npt.NDArray[np.int8]
) -> npt.NDArray[np.bool_]:
    decoded = scales.astype(np.float32)[..., None] * quantised.astype(np.float32)
    return np.all(decoded == values, axis=-1)


Q8_0 = BlockFormat("q8_0", 32, LAYOUT, _decode)
