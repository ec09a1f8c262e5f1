"""The compiled library, by ctypes: its entry points, its thread pool, and the structs they take.

The structs mirror `native/bessemer.h` and MLIR's memref descriptors; `artifact.manifest.ABI` says
the same in words.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.artifact.manifest import Manifest
from bessemer.errors import ArtifactError
from bessemer.runtime.cpu import host_features

WORD_BYTES = 8  # of an id, a position or a row: all are int64
STATUS_OK = 0
STATUS_CANCELLED = 1


class Context(ctypes.Structure):
    """`bsm_context`: what a session hands to every call."""

    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("sequence_length", ctypes.c_int64),
        ("hidden", ctypes.c_void_p),
        ("cancel", ctypes.c_int32),
        ("status", ctypes.c_int32),
        ("reserved", ctypes.c_uint64 * 8),
    )


class Memref1(ctypes.Structure):
    """A memref of rank 1; offset, size and stride in elements."""

    _fields_ = (
        ("allocated", ctypes.c_void_p),
        ("aligned", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64 * 1),
        ("stride", ctypes.c_int64 * 1),
    )

    @classmethod
    def at(cls, address: int, size: int) -> Memref1:
        """`size` contiguous elements at `address`."""
        return cls(address, address, 0, (size,), (1,))

    def show(self, start: int, size: int) -> None:
        """Let compiled code see `size` words from element `start` of what the memref is made for.

        The offset stays 0, since compiled code takes memrefs to begin at `aligned`.
        """
        self.aligned = self.allocated + WORD_BYTES * start
        self.size[0] = size


class Memref2(ctypes.Structure):
    """A memref of rank 2; offset, sizes and strides in elements."""

    _fields_ = (
        ("allocated", ctypes.c_void_p),
        ("aligned", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64 * 2),
        ("stride", ctypes.c_int64 * 2),
    )

    @classmethod
    def over(cls, rows: np.ndarray) -> Memref2:
        """A C-contiguous array of two dimensions."""
        if rows.ndim != 2 or not rows.flags.c_contiguous:
            raise ValueError("a C-contiguous matrix is needed")
        address, (height, width) = rows.ctypes.data, rows.shape
        return cls(address, address, 0, (height, width), (width, 1))


# ctypes maps a path that the dynamic loader knows to what it loaded then, even when the file has
# been replaced since. Which file each path stood for is kept here.
_loaded: dict[str, tuple[int, int]] = {}
_loaded_lock = threading.Lock()


def _load(path: Path) -> ctypes.CDLL:
    """dlopen the file that is at `path` now."""
    name = str(path.resolve())
    with _loaded_lock:
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(handle)
        identity = (status.st_dev, status.st_ino)
        if _loaded.setdefault(name, identity) == identity or not sys.platform.startswith("linux"):
            os.close(handle)
            return ctypes.CDLL(name)
        # The descriptor stays open, so that its name is never another library's.
        return ctypes.CDLL(f"/proc/self/fd/{handle}")


class Library:
    """A loaded model.so."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Load `path`. Raises ArtifactError when it can't be loaded or lacks a symbol."""
        try:
            self._dll = _load(path)
        except OSError as error:
            raise ArtifactError(f"{path} can't be loaded: {error}") from None
        self.path = path
        prefix = manifest.prefix
        pointers: list[Any] = [ctypes.c_void_p] * 9
        names = manifest.entry_points_for(host_features())
        self.prefill = self._symbol(path, names["forward_prefill"], None, pointers)
        self.decode = self._symbol(path, names["forward_decode"], None, pointers)
        pool = ctypes.c_void_p
        self._pool_create = self._symbol(path, f"{prefix}bsm_pool_create", pool, [ctypes.c_int64])
        self._pool_destroy = self._symbol(path, f"{prefix}bsm_pool_destroy", None, [pool])
        self._pool_size = self._symbol(path, f"{prefix}bsm_pool_size", ctypes.c_int64, [pool])

    def _symbol(
        self, path: Path, name: str, result: Any, arguments: list[Any]
    ) -> ctypes._NamedFuncPointer:
        try:
            function = getattr(self._dll, name)
        except AttributeError:
            raise ArtifactError(
                f"{path} has no symbol {name}: it is no library of this model; compile it again"
            ) from None
        function.restype = result
        function.argtypes = arguments
        return function

    def create_pool(self, threads: int) -> Pool:
        """A pool of `threads` workers, the caller of a job being one of them."""
        return Pool(self, threads)


class Pool:
    """A thread pool of the library; its threads end when it is collected."""

    def __init__(self, library: Library, threads: int) -> None:
        self.handle = library._pool_create(threads)
        if self.handle is None:
            raise ArtifactError(f"no memory for a pool of {threads} threads")
        # Smaller than asked for where the system refuses threads.
        self.size = int(library._pool_size(self.handle))
        ender = weakref.finalize(
            self, _destroy_pool, library._pool_destroy, self.handle, os.getpid()
        )
        # At the end of the process a call may still be running in a daemon thread.
        ender.atexit = False


def _destroy_pool(destroy: Callable[[int], None], handle: int, owner: int) -> None:
    # A forked child has the pool's memory but not its threads.
    if os.getpid() == owner:
        destroy(handle)
