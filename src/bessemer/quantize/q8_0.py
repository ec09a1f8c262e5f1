"""Q8_0: 32 signed bytes and one f16 scale. ``w = d * q``"""

from __future__ import annotations

from collections.abc import Iterator

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
    Q8_0, Q4_0 or Q5_0 are taken over without a second rounding. Values beyond what f16 scales
    reach give inf.
    """
    top = np.max(np.abs(values), axis=-1)
    with np.errstate(over="ignore"):
        scales = (top / np.float32(LARGEST)).astype(np.float16)
    quantised = _round(values, scales)
    inexact = np.nonzero(~_is_exact(values, scales, quantised))
    for kept, trial in _common_scales(values[inexact], top[inexact]):
        chosen = tuple(axis[kept] for axis in inexact)
        q = _round(values[chosen], trial)
        exact = _is_exact(values[chosen], trial, q)
        better = tuple(axis[exact] for axis in chosen)
        scales[better], quantised[better] = trial[exact], q[exact]
    return scales, quantised


def _common_scales(
    blocks: F32Array, top: F32Array
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float16]]]:
    """Candidates for the scales of float32 [n, 32]: (rows, their f16 scales), several times over.

    If a block is a scale times integers of at most 127, then so is the greatest common measure of
    its weights. Euclid's algorithm finds that weight by weight; nearly every other block fails at
    the first ones, since nothing as large as top / 127 measures them.
    """
    least = top * np.float32((1 - 2**-12) / LARGEST)
    rows = np.nonzero((top > 0) & np.isfinite(top))[0]
    common = top[rows]
    for column in range(blocks.shape[-1]):
        if not rows.size:
            return
        common = _common_measure(common, np.abs(blocks[rows, column]), least[rows])
        alive = common > 0
        rows, common = rows[alive], common[alive]
    # The measure itself may have too many bits for f16, where the integers have a common factor.
    for factor in range(1, LARGEST + 1, 2):
        fits = common >= least[rows] * factor
        rows, common = rows[fits], common[fits]
        if not rows.size:
            return
        with np.errstate(over="ignore", under="ignore"):
            scales = (common / np.float32(factor)).astype(np.float16)
        exact = scales.astype(np.float32) * np.float32(factor) == common
        yield rows[exact], scales[exact]
        rows, common = rows[~exact], common[~exact]


def _common_measure(a: F32Array, b: F32Array, least: F32Array) -> F32Array:
    """The greatest common measure of positive a and b >= 0, or 0 where it is below `least`.

    Remainders of floats are exact. Where the measure is at least a 127th of both, Euclid's
    algorithm ends within ten steps, as for integers up to 127.
    """
    a, b = a.copy(), b.copy()
    going = np.nonzero(b >= least)[0]
    while going.size:
        high, low = a[going], b[going]
        a[going], b[going] = low, np.fmod(high, low)
        going = going[b[going] >= least[going]]
    return np.where(b == 0, a, np.float32(0))


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
