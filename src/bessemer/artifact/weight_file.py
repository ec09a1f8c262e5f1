"""`weights.bin`: tensors at their places, then the table that names them.

The end of the file is a table of the tensors as JSON (name, shape, dtype, layout, place, SHA-256)
and a fixed footer that finds and protects it. So the file says by itself what it holds, and a
manifest of another model is told apart without reading gigabytes.

    [tensors] [zeros up to a page] [table, JSON] [footer: magic, table bytes, SHA-256 of the table]
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from bessemer.artifact.layout import PAGE, StoredWeight, align
from bessemer.artifact.manifest import canonical, weight_table
from bessemer.errors import ArtifactError

MAGIC = b"BSMWTS01"
FOOTER = struct.Struct("<8sQ32s")
# No table is as large: a tensor's entry takes about 250 bytes.
MAX_TABLE_BYTES = 256 << 20
# Blocks that may wait for the thread that hashes and writes; bounds the memory they take.
QUEUED_BLOCKS = 4

Blocks = Iterable[npt.NDArray[np.uint8]]


def data_end(weights: Sequence[StoredWeight]) -> int:
    """Where the table begins: the end of the tensors, rounded up to a page."""
    return align(max((w.offset + w.nbytes for w in weights), default=0), PAGE)


def write_weights(
    stream: BinaryIO,
    weights: Sequence[StoredWeight],
    blocks_of: Callable[[StoredWeight], Blocks],
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, str]:
    """Write all weights and the table; returns the SHA-256 of each tensor by name.

    blocks_of: the bytes of a weight in pieces (`packing.pack`); called once for each, in the order
    of their places. Hashing and writing run beside it in another thread. progress: called with the
    bytes done and the bytes in all.
    """
    hashes: dict[str, str] = {}
    total = sum(w.nbytes for w in weights)
    done = 0
    with ThreadPoolExecutor(1, thread_name_prefix="bessemer-write") as pool:
        for weight in sorted(weights, key=lambda w: w.offset):
            digest = hashlib.sha256()
            stream.write(bytes(weight.offset - stream.tell()))
            written = 0
            waiting: list[Future[None]] = []
            for block in blocks_of(weight):
                waiting.append(pool.submit(_append, stream, digest, block))
                written += block.nbytes
                if len(waiting) >= QUEUED_BLOCKS:
                    waiting.pop(0).result()
                if progress is not None:
                    progress(done + written, total)
            for future in waiting:
                future.result()
            if written != weight.nbytes:
                raise ValueError(f"{weight.name}: {written} bytes for {weight.nbytes}")
            hashes[weight.name] = digest.hexdigest()
            done += written
    stream.write(bytes(data_end(weights) - stream.tell()))
    table = canonical(weight_table(weights, hashes))
    stream.write(table)
    stream.write(FOOTER.pack(MAGIC, len(table), hashlib.sha256(table).digest()))
    return hashes


def _append(stream: BinaryIO, digest: hashlib._Hash, block: npt.NDArray[np.uint8]) -> None:
    digest.update(block.data)
    stream.write(block.data)


def read_table(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The table at the end of a weight file, and its SHA-256.

    Raises ArtifactError when the file has no sound table.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, size - FOOTER.size))
            footer = stream.read(FOOTER.size)
            if len(footer) != FOOTER.size or not footer.startswith(MAGIC):
                raise ArtifactError(
                    f"{path} is no weight file of this Bessemer, or its end is cut off: compile "
                    "the model again"
                )
            _, nbytes, digest = FOOTER.unpack(footer)
            start = size - FOOTER.size - nbytes
            if nbytes > MAX_TABLE_BYTES or start < 0 or start % PAGE:
                raise ArtifactError(f"{path} is damaged at its end: compile the model again")
            stream.seek(start)
            text = stream.read(nbytes)
    except OSError as error:
        raise ArtifactError(f"{path} can't be read: {error.strerror or error}") from None
    if hashlib.sha256(text).digest() != digest:
        raise ArtifactError(f"{path}: the table of tensors is damaged: compile the model again")
    return json.loads(text), digest.hex()


def describe_mismatch(
    expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> str:
    """The first difference of two tensor tables, in words: count, name, dtype, shape or hash."""
    if len(expected) != len(found):
        return f"the manifest lists {len(expected)} tensors and the weight file {len(found)}"
    for want, have in zip(expected, found, strict=True):
        for key, word in (
            ("name", "name"),
            ("dtype", "dtype"),
            ("shape", "shape"),
            ("layout", "layout"),
            ("offset", "offset"),
            ("nbytes", "size"),
            ("sha256", "hash"),
        ):
            if want.get(key) != have.get(key):
                return (
                    f"tensor {want.get('name')!r}: the manifest has {word} {want.get(key)}, the "
                    f"weight file {have.get(key)}"
                )
    return "the tables differ"
