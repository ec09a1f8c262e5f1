"""The safetensors container: a JSON header with names, dtypes, shapes and ranges, then the bytes.

The header is checked completely before the file is mapped: an error here is an error message,
while a wrong offset in a mapping would be garbage or a crash.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.importer.checkpoint.files import CheckpointFile, damaged

LENGTH_BYTES = 8
"""The file starts with the header's length, a little-endian uint64."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

MAX_DIMS = 16
MAX_DIM = 1 << 48
"""Far beyond any tensor, so that a product of a few stays a small Python integer."""

ELEMENT_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""The dtypes of the format. That one is known here says nothing on whether it can be decoded."""


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor: `dtype` as in the header, absolute byte range in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile(CheckpointFile):
    """An opened safetensors file with a checked header.

    Attributes:
        entries: every tensor by name, in the order of their bytes.
        metadata: the header's ``__metadata__``.

    Raises:
        CheckpointError: the file is cut off or damaged; names the file and the tensor.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            header, data_start = self._read_header()
            self.metadata = self._metadata(header)
            self.entries = self._entries(header, data_start)
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> tuple[dict[str, Any], int]:
        prefix = self.stream.read(LENGTH_BYTES)
        if len(prefix) < LENGTH_BYTES:
            raise damaged(self.path, f"only {self.size} bytes: not a safetensors file")
        length = int.from_bytes(prefix, "little")
        room = self.size - LENGTH_BYTES
        if length > min(room, MAX_HEADER_BYTES):
            limit = f"the limit is {MAX_HEADER_BYTES}" if length <= room else f"{room} bytes follow"
            raise damaged(
                self.path,
                f"the header's length is given as {length} bytes, but {limit}; "
                "the file is cut off or not a safetensors file",
            )
        text = self.stream.read(length)
        if len(text) < length:
            raise damaged(self.path, "the file became shorter while it was read")
        try:
            header = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise damaged(self.path, f"the header is not valid JSON ({error})") from error
        if not isinstance(header, dict):
            raise damaged(self.path, "the header is not a JSON object")
        return header, LENGTH_BYTES + length

    def _metadata(self, header: dict[str, Any]) -> dict[str, str]:
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise damaged(self.path, "the header's __metadata__ is not a JSON object")
        return {str(key): str(value) for key, value in metadata.items()}

    def _entries(self, header: dict[str, Any], data_start: int) -> dict[str, SafetensorsEntry]:
        entries = [self._entry(name, spec, data_start) for name, spec in header.items()]
        entries.sort(key=lambda entry: (entry.start, entry.nbytes))
        end = data_start
        for entry in entries:
            # The format allows neither holes nor overlaps.
            if entry.start != end:
                kind = "overlaps the tensor before it" if entry.start < end else "follows a gap"
                raise damaged(
                    self.path, f"its data starts at byte {entry.start}, which {kind}", entry.name
                )
            end = entry.start + entry.nbytes
            if end > self.size:
                raise damaged(
                    self.path,
                    f"its data ends at byte {end}, but the file has {self.size} bytes: it is cut "
                    "off; download it again",
                    entry.name,
                )
        if end != self.size:
            raise damaged(self.path, f"{self.size - end} bytes follow after the last tensor")
        return {entry.name: entry for entry in entries}

    def _entry(self, name: str, spec: Any, data_start: int) -> SafetensorsEntry:
        if not isinstance(spec, dict) or not {"dtype", "shape", "data_offsets"} <= spec.keys():
            raise damaged(self.path, "the header gives no dtype, shape and data_offsets", name)
        dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
        if dtype not in ELEMENT_BITS:
            raise damaged(self.path, f"unknown dtype {dtype!r}", name)
        if not _naturals(shape) or len(shape) > MAX_DIMS or any(dim > MAX_DIM for dim in shape):
            raise damaged(self.path, "its shape is not a list of sensible dimensions", name)
        if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise damaged(self.path, "its data_offsets are not two ascending numbers", name)
        start, end = offsets
        bits = math.prod(shape) * ELEMENT_BITS[dtype]
        if bits != 8 * (end - start):
            raise damaged(
                self.path,
                f"{dtype} of shape {shape} takes {-(-bits // 8)} bytes, "
                f"its data_offsets give {end - start}",
                name,
            )
        return SafetensorsEntry(name, dtype, tuple(shape), data_start + start, end - start)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:200]!r} occurs twice")
            seen.add(key)
    return result
