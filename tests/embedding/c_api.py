"""The C API of a model.so by ctypes, as another language would bind it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

OK, CANCELLED, ARGUMENT, CONTEXT, MEMORY, FILE, WEIGHTS, CPU, BUSY, NUMERIC, HEADER = range(11)
TOKENIZER, SESSION = 11, 12
AUTO, MAP, HUGE = range(3)

_ids = ctypes.POINTER(ctypes.c_int32)
_rows = ctypes.POINTER(ctypes.c_int64)
_floats = ctypes.POINTER(ctypes.c_float)
_handle = ctypes.c_void_p


class Error(ctypes.Structure):
    _fields_ = (("status", ctypes.c_int32), ("message", ctypes.c_char * 500))


class Options(ctypes.Structure):
    _fields_ = (
        ("threads", ctypes.c_int64),
        ("weights_mode", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("abi_hash", ctypes.c_char_p),
    )


class Info(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("target", ctypes.c_char_p),
        ("abi_hash", ctypes.c_char_p),
        ("weights_hash", ctypes.c_char_p),
        ("vocab_size", ctypes.c_int64),
        ("hidden_size", ctypes.c_int64),
        ("context_length", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("weights_file_bytes", ctypes.c_int64),
        ("state_bytes", ctypes.c_int64),
        ("scratch_shared_bytes", ctypes.c_int64),
        ("scratch_thread_bytes", ctypes.c_int64),
        ("steering_layers", ctypes.c_int64),
        ("steering_width", ctypes.c_int64),
    )


_error = ctypes.POINTER(Error)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "describe": (ctypes.POINTER(Info), []),
    "open": (ctypes.c_int32, [ctypes.c_char_p, ctypes.POINTER(Options), _handle, _error]),
    "close": (None, [_handle]),
    "threads": (ctypes.c_int64, [_handle]),
    "status_text": (ctypes.c_char_p, [ctypes.c_int32]),
    "session_create": (ctypes.c_int32, [_handle, _handle, _error]),
    "session_destroy": (None, [_handle]),
    "position": (ctypes.c_int64, [_handle]),
    "tokens": (_ids, [_handle]),
    "prefill": (ctypes.c_int32, [_handle, _ids, ctypes.c_int64, _error]),
    "prefill_rows": (
        ctypes.c_int32,
        [_handle, _ids, ctypes.c_int64, _rows, ctypes.c_int64, _floats, _error],
    ),
    "decode": (ctypes.c_int32, [_handle, ctypes.c_int32, _error]),
    "logits": (_floats, [_handle]),
    "sample": (ctypes.c_int32, [_handle, _handle, ctypes.POINTER(ctypes.c_int32), _error]),
    "rewind": (ctypes.c_int32, [_handle, ctypes.c_int64, _error]),
    "cancel": (None, [_handle]),
    "session_copy": (ctypes.c_int32, [_handle, _handle, _error]),
    "session_save": (ctypes.c_int32, [_handle, ctypes.c_char_p, _error]),
    "session_load": (ctypes.c_int32, [_handle, ctypes.c_char_p, _error]),
    "steer": (ctypes.c_int32, [_handle, _floats, ctypes.c_double, ctypes.c_double, _error]),
}


class CError(Exception):
    """A call that failed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """The functions of a library; `bsm_open` is `open`, and so on."""

    def __init__(self, library: Path, prefix: str = "") -> None:
        self._dll = ctypes.CDLL(str(library))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._dll, f"{prefix}bsm_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    @property
    def info(self) -> Info:
        return self.describe().contents


def check(status: int, error: Error) -> None:
    if status != OK:
        assert error.status == status
        raise CError(status, error.message.decode())


class CModel:
    def __init__(self, api: Api, path: Path, **options: Any) -> None:
        self.api, self.handle, error = api, _handle(), Error()
        chosen = Options(**options)
        status = api.open(bytes(path), chosen, ctypes.byref(self.handle), error)
        if status != OK:
            assert not self.handle
        check(status, error)

    def session(self) -> CSession:
        return CSession(self)

    def close(self) -> None:
        self.api.close(self.handle)
        self.handle = None


class CSession:
    """Mirrors `bessemer.runtime.session.Session`."""

    def __init__(self, model: CModel) -> None:
        self.api, self.handle, error = model.api, _handle(), Error()
        check(model.api.session_create(model.handle, ctypes.byref(self.handle), error), error)

    @property
    def vocab(self) -> int:
        return int(self.api.info.vocab_size)

    @property
    def position(self) -> int:
        return int(self.api.position(self.handle))

    @property
    def tokens(self) -> list[int]:
        return self.api.tokens(self.handle)[: self.position]

    @property
    def logits(self) -> np.ndarray | None:
        found = self.api.logits(self.handle)
        return np.ctypeslib.as_array(found, (self.vocab,)).copy() if found else None

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        error = Error()
        check(self.api.prefill(self.handle, _array(ids), len(ids), error), error)
        return self._after()

    def prefill_rows(self, ids: Sequence[int], rows: Sequence[int] | int) -> np.ndarray:
        """rows: indices, or how many of the last."""
        count = rows if isinstance(rows, int) else len(rows)
        chosen = None if isinstance(rows, int) else (ctypes.c_int64 * count)(*rows)
        out, error = np.full((max(count, 0), self.vocab), np.nan, np.float32), Error()
        status = self.api.prefill_rows(
            self.handle, _array(ids), len(ids), chosen, count, out.ctypes.data_as(_floats), error
        )
        check(status, error)
        return out

    def decode(self, token: int) -> np.ndarray:
        error = Error()
        check(self.api.decode(self.handle, token, error), error)
        return self._after()

    def _after(self) -> np.ndarray:
        found = self.logits
        assert found is not None
        return found

    def sample(self, sampler: Any = None) -> int:
        token, error = ctypes.c_int32(-7), Error()
        status = self.api.sample(self.handle, sampler, ctypes.byref(token), error)
        check(status, error)
        return token.value

    def rewind(self, n: int) -> None:
        error = Error()
        check(self.api.rewind(self.handle, n, error), error)

    def cancel(self) -> None:
        self.api.cancel(self.handle)

    def fork(self) -> CSession:
        made, error = CSession.__new__(CSession), Error()
        made.api, made.handle = self.api, _handle()
        check(self.api.session_copy(self.handle, ctypes.byref(made.handle), error), error)
        return made

    def save(self, path: Path) -> None:
        error = Error()
        check(self.api.session_save(self.handle, bytes(path), error), error)

    def load(self, path: Path) -> None:
        error = Error()
        check(self.api.session_load(self.handle, bytes(path), error), error)

    def steer(
        self, directions: np.ndarray | None, *, attention: float = 0.0, ffn: float = 0.0
    ) -> None:
        error = Error()
        values = None if directions is None else directions.astype(np.float32).ravel()
        data = None if values is None else values.ctypes.data_as(_floats)
        check(self.api.steer(self.handle, data, attention, ffn, error), error)

    def destroy(self) -> None:
        self.api.session_destroy(self.handle)
        self.handle = None


def _array(ids: Sequence[int]) -> Any:
    return (ctypes.c_int32 * max(len(ids), 1))(*ids)
