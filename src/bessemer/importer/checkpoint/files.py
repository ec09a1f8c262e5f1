"""Files of a checkpoint: opened once, measured, checked, and mapped only afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from bessemer.errors import CheckpointError
from bessemer.quantize import BlockFormat, decode_blocks

HASH_BUFFER_BYTES = 4 << 20
"""Read size for hashing: large enough that system calls don't show."""

MAX_JSON_BYTES = 256 << 20
"""No JSON file of a checkpoint is as large: the largest tokenizer.json are near 40 MB."""

LFS_POINTER_PREFIX = b"version https://git-lfs"

SETTLED_NS = 2_000_000_000
"""Age from which a modification time identifies a content: clocks of file systems tick coarsely
(up to 2 s), and a file may change twice within a tick."""

_hashes: dict[tuple[str, int, int, int, int], str] = {}


def damaged(path: Path, what: str, tensor: str | None = None) -> CheckpointError:
    """The error for a file that can't be used as it is; names the file and the tensor."""
    where = f"{path}: tensor '{tensor}'" if tensor is not None else str(path)
    return CheckpointError(f"{where}: {what}")


def is_lfs_pointer(head: bytes) -> bool:
    """Whether a file that starts with `head` is a Git LFS pointer instead of its content."""
    return head.startswith(LFS_POINTER_PREFIX)


def _open_regular(path: Path) -> BinaryIO:
    try:
        # A FIFO would block in open(): look before opening, and again at what was opened.
        if not stat.S_ISREG(path.stat().st_mode):
            raise damaged(path, "not a regular file")
        file = path.open("rb")
    except OSError as error:
        raise damaged(path, f"can't be read: {error.strerror or error}") from error
    return file


class CheckpointFile:
    """One weight file, open for reading.

    Args:
        path: the file.

    Raises:
        CheckpointError: it can't be opened, is not a regular file, or is a Git LFS pointer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stream = _open_regular(path)
        self.size = os.fstat(self.stream.fileno()).st_size
        self._map: mmap.mmap | None = None
        head = self.stream.read(len(LFS_POINTER_PREFIX))
        self.stream.seek(0)
        if is_lfs_pointer(head):
            self.close()
            raise damaged(
                path,
                "this is a Git LFS pointer, not the file itself; "
                "run 'git lfs pull' in its repository or download the file again",
            )

    def view(self, start: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A read-only view of the mapped bytes ``[start, start + nbytes)``, uint8 ``[nbytes]``.

        The range must have been checked against `size` before. The view must not outlive the
        file: copy what is to be kept.
        """
        if self.stream.closed:
            raise ValueError(f"{self.path} has been closed")
        if nbytes == 0:
            return np.empty(0, dtype=np.uint8)
        if self._map is None:
            self._map = mmap.mmap(self.stream.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._map, dtype=np.uint8, count=nbytes, offset=start)

    def drop_pages(self, start: int, nbytes: int) -> None:
        """Takes a range that has been read out of this process's memory (not out of the cache)."""
        if self._map is None or nbytes == 0 or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = start - start % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)

    def read(
        self, start: int, shape: tuple[int, ...], fmt: BlockFormat, rows: range | None
    ) -> npt.NDArray[np.float32]:
        """A tensor whose bytes begin at `start`, or rows of it, decoded to float32."""
        part = part_of(shape, fmt, rows)
        start += part.offset
        values = decode_blocks(fmt, self.view(start, part.nbytes), part.shape)
        self.drop_pages(start, part.nbytes)
        return values

    def read_stored(
        self, start: int, shape: tuple[int, ...], fmt: BlockFormat, rows: range | None
    ) -> npt.NDArray[Any]:
        """A tensor of plain numbers whose bytes begin at `start`, or rows of it, as stored."""
        part = part_of(shape, fmt, rows)
        start += part.offset
        # np.empty aligns; the file's bytes need not be aligned to their dtype.
        values = np.empty(part.shape, dtype=fmt.layout)
        values.reshape(-1).view(np.uint8)[:] = self.view(start, part.nbytes)
        self.drop_pages(start, part.nbytes)
        return values

    def close(self) -> None:
        """Unmaps and closes the file. Safe to call twice."""
        if self._map is not None:
            # If somebody still holds a view, the mapping goes when the view does.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None
        self.stream.close()


@dataclass(frozen=True)
class TensorPart:
    """Rows of a stored tensor: its shape, and where its bytes lie from the tensor's first one."""

    shape: tuple[int, ...]
    offset: int
    nbytes: int


def part_of(shape: tuple[int, ...], fmt: BlockFormat, rows: range | None) -> TensorPart:
    """Rows of the leading axis of a tensor that is stored in rows of whole blocks; None: all."""
    if rows is None:
        return TensorPart(shape, 0, fmt.nbytes(math.prod(shape)))
    if not 0 <= rows.start <= rows.stop <= shape[0] or rows.step != 1:
        raise ValueError(f"{rows} of a tensor of shape {list(shape)}")
    wanted = (len(rows), *shape[1:])
    before = (rows.start, *shape[1:])
    return TensorPart(wanted, fmt.nbytes(math.prod(before)), fmt.nbytes(math.prod(wanted)))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; CheckpointError if it is anything else."""
    with _open_regular(path) as stream:
        if os.fstat(stream.fileno()).st_size > MAX_JSON_BYTES:
            raise damaged(path, f"larger than {MAX_JSON_BYTES} bytes: not a JSON file of a model")
        data = stream.read()
    if is_lfs_pointer(data):
        raise damaged(path, "this is a Git LFS pointer, not the file itself; run 'git lfs pull'")
    try:
        value = json.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise damaged(path, f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged(path, f"holds {json.dumps(value)[:40]}, not an object {{...}}")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` readably and the same way every time."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def content_hash(path: Path) -> str:
    """SHA-256 of a whole file, hexadecimal.

    Remembered within this process as long as size, inode, and the times of the last modification
    and status change stay the same, unless the file changed just now. (The modification time alone
    can be set by anyone.)
    """
    with _open_regular(path) as stream:
        status = os.fstat(stream.fileno())
        times = (status.st_mtime_ns, status.st_ctime_ns)
        key = (str(path.resolve()), status.st_size, status.st_ino, *times)
        if key in _hashes:
            return _hashes[key]
        digest = hashlib.sha256()
        buffer = bytearray(HASH_BUFFER_BYTES)
        window = memoryview(buffer)
        while count := stream.readinto(buffer):  # type: ignore[attr-defined]
            digest.update(window[:count])
        if time.time_ns() - max(times) > SETTLED_NS:
            _hashes[key] = digest.hexdigest()
        return digest.hexdigest()
