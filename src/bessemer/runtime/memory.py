"""Memory that compiled code works on: page-aligned, zero at first, given back when collected."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt


def allocate(nbytes: int, *, huge: bool = False) -> npt.NDArray[np.uint8]:
    """`nbytes` zero bytes at a page boundary, uint8 [nbytes].

    Pages become real when they are first touched, so that a long context costs what it holds.
    huge: ask for huge pages, for memory that is read in full.
    """
    # Python's own choice is shared memory, which Linux gives huge pages only if told to.
    pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8, count=nbytes)
