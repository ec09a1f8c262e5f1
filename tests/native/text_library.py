"""The text part of the standalone runner as a library, by ctypes."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bessemer.backend.link import compile_c, link_shared
from bessemer.backend.target import Target
from bessemer.native import FOLDER

# The program's own files; the rest is the text part.
PROGRAM = ("answer", "files", "main", "options")
# Functions of hidden visibility can't be called from Python.
VISIBLE = ("-fvisibility=default",)


def text_sources() -> list[Path]:
    """What the tokenizer needs."""
    own = [path for path in sorted((FOLDER / "runner").glob("*.c")) if path.stem not in PROGRAM]
    return [*own, FOLDER / "errors.c"]


def build_library(sources: Iterable[Path]) -> ctypes.CDLL:
    """The sources as one library with all of their functions."""
    folder, target = Path(tempfile.mkdtemp(prefix="bessemer-text-")), Target.native()
    objects = []
    for source in sources:
        out = folder / f"{source.stem}.o"
        compile_c(source, out, target, VISIBLE)
        objects.append(out)
    link_shared(objects, folder / "library.so", target)
    return ctypes.CDLL(str(folder / "library.so"))


@functools.cache
def text_library() -> ctypes.CDLL:
    return build_library(text_sources())


class Ids(ctypes.Structure):
    """bsm_ids"""

    _fields_ = (
        ("data", ctypes.POINTER(ctypes.c_int32)),
        ("count", ctypes.c_int64),
        ("room", ctypes.c_int64),
        ("failed", ctypes.c_int),
    )


class Buffer(ctypes.Structure):
    """bsm_buffer"""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("room", ctypes.c_size_t),
        ("failed", ctypes.c_int),
    )

    def take(self) -> str:
        """The text; the buffer is empty afterwards."""
        data = ctypes.string_at(self.data, self.size) if self.data else b""
        text_library().bsm_buffer_free(ctypes.byref(self))
        return data.decode()


class Error(ctypes.Structure):
    """bsm_error"""

    _fields_ = (("status", ctypes.c_int32), ("message", ctypes.c_char * 500))


class Stream(ctypes.Structure):
    """bsm_stream"""

    _fields_ = (
        ("tokenizer", ctypes.c_void_p),
        ("pending", ctypes.c_uint8 * 4),
        ("pending_size", ctypes.c_uint32),
        ("begun", ctypes.c_int32),
        ("stripped", ctypes.c_uint32),
    )


class Stops(ctypes.Structure):
    """bsm_stops"""

    _fields_ = (
        ("stops", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("held", Buffer),
        ("stopped", ctypes.c_int),
    )


class NativeError(Exception):
    """A function of the library failed."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message.decode())
        self.status = error.status


class NativeTokenizer:
    """A tokenizer file, used through the C functions."""

    def __init__(self, content: bytes, *, identity: int = 0, vocab_size: int = 0) -> None:
        self._library = text_library()
        # Words, so that the memory is aligned.
        self._memory = (ctypes.c_uint64 * (len(content) // 8 + 1))()
        ctypes.memmove(self._memory, content, len(content))
        self._handle, error = ctypes.c_void_p(), Error()
        self._check(
            self._library.bsm_tokenizer_view(
                self._memory,
                ctypes.c_size_t(len(content)),
                b"tokenizer.bin",
                ctypes.c_uint32(identity),
                ctypes.c_int64(vocab_size),
                ctypes.byref(self._handle),
                ctypes.byref(error),
            ),
            error,
        )

    @staticmethod
    def _check(status: int, error: Error) -> None:
        if status != 0:
            assert status == error.status
            raise NativeError(error)

    def encode(self, text: str | bytes, add_special: bool = True) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        ids, error = Ids(), Error()
        status = self._library.bsm_tokenizer_encode(
            self._handle,
            data,
            ctypes.c_size_t(len(data)),
            int(add_special),
            ctypes.byref(ids),
            ctypes.byref(error),
        )
        found = ids.data[: ids.count]
        self._library.bsm_ids_free(ctypes.byref(ids))
        self._check(status, error)
        return found

    def stream(self, ids: Iterable[int]) -> list[str]:
        """What each token completes, and what is left at the end."""
        stream, pieces = Stream(tokenizer=self._handle.value), []
        for token in ids:
            text = Buffer()
            self._library.bsm_stream_push(
                ctypes.byref(stream), ctypes.c_int32(token), ctypes.byref(text)
            )
            pieces.append(text.take())
        text = Buffer()
        self._library.bsm_stream_finish(ctypes.byref(stream), ctypes.byref(text))
        return [*pieces, text.take()]

    def chat(self, user: str, system: str | None = None) -> str:
        prompt, error = Buffer(), Error()
        said, told = user.encode(), None if system is None else system.encode()
        status = self._library.bsm_tokenizer_chat(
            self._handle,
            told,
            ctypes.c_size_t(len(told or b"")),
            said,
            ctypes.c_size_t(len(said)),
            ctypes.byref(prompt),
            ctypes.byref(error),
        )
        text = prompt.take()
        self._check(status, error)
        return text

    def special_id(self, text: str) -> int:
        data = text.encode()
        size = ctypes.c_size_t(len(data))
        return int(self._library.bsm_tokenizer_special_id(self._handle, data, size))
