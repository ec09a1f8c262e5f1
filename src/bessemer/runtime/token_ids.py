"""Token ids from outside, checked."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np
import numpy.typing as npt

from bessemer.arguments import shown
from bessemer.errors import UsageError


def checked_ids(
    ids: Sequence[int] | np.ndarray, vocab_size: int | None = None
) -> npt.NDArray[np.int64]:
    """`ids` as int64 [count].

    vocab_size: ids must lie below it; None leaves that to whoever is fed.
    Raises UsageError, which names the first wrong one, unless they are at least one whole number
    of the vocabulary each.
    """
    try:
        new = np.asarray(ids)
    except (ValueError, TypeError, OverflowError):  # rows of several lengths
        new = np.zeros((0, 0))
    if new.ndim != 1 or isinstance(ids, (bytes, bytearray)):
        raise UsageError(f"token ids are {shown(ids)}; they must be a sequence of whole numbers")
    if not new.size:
        raise UsageError("there are no token ids; at least one is needed")
    if new.dtype.kind not in "iu":
        values = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        for at, value in enumerate(values):
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise UsageError(f"token id {at} is {shown(value)}; it must be a whole number")
        new = np.array([int(value) for value in values], object)  # beyond 64 bits
    low, high = int(new.min()), int(new.max())
    if low < 0 or high >= (vocab_size or 1 << 63):
        wrong = low if low < 0 else high
        last = "" if vocab_size is None else f": they go from 0 to {vocab_size - 1}"
        raise UsageError(f"token id {wrong} is none of this model{last}")
    return new.astype(np.int64, copy=False)
