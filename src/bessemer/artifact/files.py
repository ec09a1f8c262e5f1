"""Hashes of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

# Large enough that system calls don't show, small enough to stay in the cache.
HASH_BUFFER_BYTES = 1 << 20


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    buffer = bytearray(HASH_BUFFER_BYTES)
    window = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(window[:count])
    return digest.hexdigest()
