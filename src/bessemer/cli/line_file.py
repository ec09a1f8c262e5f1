"""A file of JSON lines that is whole at every moment, whatever ends the program."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from bessemer.errors import UsageError


class LineFile:
    """Each line is written at once; what was written of a line that fails is taken back."""

    def __init__(self, path: Path) -> None:
        """Open it for appending; `clear` empties it. Raises UsageError where it can't be.

        A file that is made here and never cleared was for nothing, and goes again.
        """
        self.path = path
        self._unused = not os.path.lexists(path)
        try:
            self._stream = path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"{path} can't be written: {error.strerror or error}") from None

    def clear(self) -> None:
        """Forget what an earlier run left."""
        self._unused = False
        with contextlib.suppress(OSError):  # a pipe or a terminal
            self._stream.truncate(0)

    def write(self, record: dict[str, Any]) -> None:
        """Append a line. Raises OSError, with the file's name, when it doesn't fit on the disk."""
        self._unused = False
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        line = memoryview(text.encode() + b"\n")
        handle = self._stream.fileno()
        before = os.fstat(handle).st_size
        try:
            while line:
                line = line[os.write(handle, line) :]
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, before)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self.path)) from None
            raise

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()
        if self._unused:
            with contextlib.suppress(OSError):
                self.path.unlink()
