"""A session in a file: its token history, and the state memory that stands for it.

magic (8) | bytes of the head (u64) | SHA-256 of the head | head, JSON | state parts
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from bessemer.artifact.manifest import MANIFEST_FILE, Manifest, canonical
from bessemer.errors import UsageError
from bessemer.runtime.state import Bytes, Held
from bessemer.whole_file import write_whole

MAGIC = b"BSMSES01"
FIXED = struct.Struct("<8sQ32s")
MAX_HEAD_BYTES = 64 << 20


@dataclass
class StoredSession:
    """An opened and checked session file; `take` reads the state parts in their order."""

    path: Path
    held: Held
    tokens: npt.NDArray[np.int64]
    nbytes: int
    _stream: BinaryIO

    def expect(self, nbytes: int) -> None:
        """Raise UsageError unless the state parts are `nbytes` long in all."""
        if nbytes != self.nbytes:
            raise _damaged(self.path)

    def take(self, part: Bytes) -> None:
        """Fill `part` with the next bytes."""
        data = self._stream.read(part.size)
        part[...] = np.frombuffer(data, np.uint8).reshape(part.shape)


def write_session(
    path: Path,
    manifest: Manifest,
    held: Held,
    tokens: npt.NDArray[np.int64],
    parts: Iterable[Bytes],
) -> None:
    """Write a session, whole or not at all (`write_whole`). UsageError when that fails."""
    pieces = [np.ascontiguousarray(part) for part in parts]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece.data)
    head = canonical(
        {
            "abi": manifest.abi_hash,
            "weights": manifest.weights_digest,
            "held": asdict(held),
            "tokens": tokens[: held.position].tolist(),
            "state_bytes": sum(piece.nbytes for piece in pieces),
            "state_sha256": digest.hexdigest(),
        }
    )
    fixed = FIXED.pack(MAGIC, len(head), hashlib.sha256(head).digest())
    try:
        write_whole(path, [fixed, head, *(piece.data for piece in pieces)])
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror or error}") from None


def check_no_model_file(path: Path, folder: Path, manifest: Manifest) -> None:
    """Raise UsageError when `path` is a file of the model in `folder`: the session would be all
    that is left of it.
    """
    for name in (MANIFEST_FILE, *manifest.files):
        with contextlib.suppress(OSError):
            if path.samefile(folder / name):
                raise UsageError(f"{path} is a file of the model; name another one")


@contextlib.contextmanager
def read_session(path: Path, manifest: Manifest) -> Iterator[StoredSession]:
    """Open and check a session file before anything of it is used.

    Raises UsageError when it can't be read, is damaged, or belongs to another model.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise UsageError(f"{path} is no file")
        stream = path.open("rb")
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}") from None
    with stream:
        head = _read_head(path, stream)
        if (head["abi"], head["weights"]) != (manifest.abi_hash, manifest.weights_digest):
            raise UsageError(f"{path} is a session of another model than {manifest.name}")
        start = stream.tell()
        _check_state(path, stream, head["state_bytes"], head["state_sha256"])
        stream.seek(start)
        try:
            held = Held(**head["held"])
            tokens = np.array(head["tokens"], np.int64).reshape(-1)
            _check_held(held, tokens, manifest)
        except (ValueError, TypeError, KeyError, OverflowError):
            raise _damaged(path) from None
        yield StoredSession(path, held, tokens, int(head["state_bytes"]), stream)


def _damaged(path: Path) -> UsageError:
    return UsageError(f"{path} is damaged: the session can't be restored")


def _check_held(held: Held, tokens: npt.NDArray[np.int64], manifest: Manifest) -> None:
    """ValueError unless a session can be in this state."""
    numbers = (held.position, held.valid, held.high_water, held.regime)
    if not all(type(n) is int for n in numbers):
        raise ValueError("a count is no whole number")
    if not 0 <= held.valid <= held.position <= manifest.context_length:
        raise ValueError("the counts don't fit together")
    if not held.valid <= held.high_water <= manifest.context_length:
        raise ValueError("the high water is wrong")
    if len(tokens) != held.position or np.any((tokens < 0) | (tokens >= manifest.vocab_size)):
        raise ValueError("the tokens are wrong")


def _read_head(path: Path, stream: BinaryIO) -> dict:
    fixed = stream.read(FIXED.size)
    if len(fixed) != FIXED.size or not fixed.startswith(MAGIC):
        raise UsageError(f"{path} is no saved session of this Bessemer")
    _, nbytes, digest = FIXED.unpack(fixed)
    text = stream.read(nbytes) if nbytes <= MAX_HEAD_BYTES else b""
    if len(text) != nbytes or hashlib.sha256(text).digest() != digest:
        raise _damaged(path)
    return json.loads(text)


def _check_state(path: Path, stream: BinaryIO, nbytes: int, expected: str) -> None:
    digest, left = hashlib.sha256(), nbytes
    while left:
        data = stream.read(min(left, 1 << 20))
        if not data:
            break
        digest.update(data)
        left -= len(data)
    if left or stream.read(1) or digest.hexdigest() != expected:
        raise _damaged(path)
