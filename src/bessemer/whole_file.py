"""A file that is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write `pieces`, one after another, beside `path`, and give the file its name when it is whole
    and on the disk. A symbolic link stays, and the file that it leads to is written.

    Raises OSError; what was there stays then. So it does where `path` is a folder, a pipe, a device
    or anything else that is no regular file.
    """
    target = _regular(path)
    temporary = target.with_name(f".bessemer-{uuid.uuid4().hex[:12]}")
    try:
        with temporary.open("xb") as stream:
            for piece in pieces:
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _regular(path: Path) -> Path:
    """Where `path` leads to, when that is a regular file or nothing yet. Raises OSError."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return Path(os.path.realpath(path))
