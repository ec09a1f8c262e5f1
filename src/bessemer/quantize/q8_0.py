"""Q8_0: 32 signed bytes and one f16 scale. ``w = d * q``"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bessemer.quantize.blocks import BlockFormat, F32Array

LAYOUT = np.dtype([("d", "<f2"), ("q", "i1", (32,))])


def _decode(blocks: np.ndarray) -> F32Array:
    d = blocks["d"].astype(np.float32)[:, None]
    return d * blocks["q"].astype(np.float32)


# The largest magnitude of an encoded weight; -128 is left out, so that negation is exact.
LARGEST = 127
# Blocks that are encoded together: their temporaries, 256 KiB each, stay in the second-level cache.
BLOCKS_AT_ONCE = 2048
# Columns whose common measure is looked for, before it is tried on whole blocks: few at first, as
# these rule out almost all blocks that have none, and nearly always settle it for the others.
COLUMNS = (range(0, 2), range(2, 8), range(8, 32))


def encode(values: F32Array) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int8]]:
    """Quantise float32 [..., blocks, 32]: scales f16 [..., blocks] and weights int8 of its shape.

    scale = max |w| / 127 rounded to f16, q = round(w / scale). A block that already is `f16 scale
    times integers` keeps its very numbers, whichever its largest integer: values decoded from
    Q8_0, Q4_0 or Q5_0 are taken over without a second rounding. Values beyond what f16 scales
    reach give inf.
    """
    blocks = values.reshape(-1, values.shape[-1])
    scales = np.empty(len(blocks), np.float16)
    quantised = np.empty(blocks.shape, np.int8)
    for start in range(0, len(blocks), BLOCKS_AT_ONCE):
        part = slice(start, start + BLOCKS_AT_ONCE)
        _encode(blocks[part], scales[part], quantised[part])
    return scales.reshape(values.shape[:-1]), quantised.reshape(values.shape)


def _encode(
    blocks: F32Array, scales: npt.NDArray[np.float16], quantised: npt.NDArray[np.int8]
) -> None:
    """Blocks [n, 32] into `scales` [n] and `quantised` [n, 32]."""
    sizes = np.abs(blocks)
    top = sizes.max(axis=-1)
    with np.errstate(over="ignore"):
        scales[:] = top / np.float32(LARGEST)
    quantised[:], exact = _quantise(blocks, scales)
    left = np.nonzero(~exact & (top > 0) & np.isfinite(top))[0]
    if not left.size:
        return
    sizes = sizes[left]
    search = _Search.of(sizes, top[left])
    for columns in COLUMNS:
        search.measure(sizes, columns)
        if not search.rows.size:
            return
        rows, trial = search.candidates()
        q, exact = _quantise(blocks[left[rows]], trial)
        better = left[rows[exact]]
        scales[better], quantised[better] = trial[exact], q[exact]
        search.drop(rows[exact])


@dataclass
class _Search:
    """For the blocks `rows` of |w| [n, 32], the greatest common measure of some of their weights.

    If a block is a scale times integers of at most 127, then so is the greatest common measure of
    its weights. Euclid's algorithm finds that weight by weight, beginning with the least one,
    which mostly is the measure already. Nearly every block that is none of these fails at the next
    weights, since nothing as large as top / 127 (`least`) measures them.

    A scale made of the measure of some weights and found to be exact is the one that all weights
    give: the measure of some is a multiple m of that of all, and only a candidate's factor that
    is itself a multiple of m makes a scale that measures all.
    """

    rows: npt.NDArray[np.int64]
    common: F32Array
    least: F32Array

    @staticmethod
    def of(sizes: F32Array, top: F32Array) -> _Search:
        common = np.min(sizes, axis=-1, where=sizes > 0, initial=np.inf)
        least = top * np.float32((1 - 2**-12) / LARGEST)
        search = _Search(np.arange(len(sizes)), common, least)
        search._keep(common >= least)
        return search

    def measure(self, sizes: F32Array, columns: range) -> None:
        """Let `common` measure these columns too; blocks in which nothing does are left out."""
        for column in columns:
            if not self.rows.size:
                return
            self.common = _common_measure(self.common, sizes[self.rows, column], self.least)
            self._keep(self.common > 0)

    def candidates(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float16]]:
        """Rows and a scale for each: their measure by the least odd factor that gives an f16. The
        measure itself may have too many bits for f16, where the integers have a common factor.
        """
        scales = np.zeros(len(self.rows), np.float16)
        undecided = np.arange(len(self.rows))
        for factor in range(1, LARGEST + 1, 2):
            undecided = undecided[self.common[undecided] >= self.least[undecided] * factor]
            if not undecided.size:
                break
            common = self.common[undecided]
            with np.errstate(over="ignore", under="ignore"):
                trial = (common / np.float32(factor)).astype(np.float16)
            exact = trial.astype(np.float32) * np.float32(factor) == common
            scales[undecided[exact]] = trial[exact]
            undecided = undecided[~exact]
        found = scales > 0
        return self.rows[found], scales[found]

    def drop(self, rows: npt.NDArray[np.int64]) -> None:
        """Leave out rows that are done. Both are ascending."""
        self._keep(~np.isin(self.rows, rows, assume_unique=True))

    def _keep(self, which: npt.NDArray[np.bool_]) -> None:
        self.rows, self.common, self.least = self.rows[which], self.common[which], self.least[which]


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


def _quantise(
    blocks: F32Array, scales: npt.NDArray[np.float16]
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.bool_]]:
    """Blocks [n, 32] by scales [n]: the integers, and which blocks these give back exactly."""
    wide = scales.astype(np.float32)[:, None]
    steps = blocks / np.where((wide == 0) | ~np.isfinite(wide), np.float32(1), wide)
    np.rint(steps, out=steps)
    np.clip(steps, -LARGEST, LARGEST, out=steps)
    with np.errstate(invalid="ignore"):
        quantised = steps.astype(np.int8)
        steps *= wide
    return quantised, np.all(steps == blocks, axis=-1)


Q8_0 = BlockFormat("q8_0", 32, LAYOUT, _decode)
