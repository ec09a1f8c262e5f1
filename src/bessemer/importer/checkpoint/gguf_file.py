"""The GGUF container, versions 2 and 3: typed metadata, tensor descriptions, aligned data.

Everything a file claims is checked against the bytes that are left before memory is taken for it,
and every tensor's range before the file is mapped.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from bessemer.errors import CheckpointError
from bessemer.importer.checkpoint.files import CheckpointFile, damaged
from bessemer.quantize import storage_format

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT = 8
MAX_ALIGNMENT = 1 << 21
"""A huge page: nothing has a reason to align further."""

MAX_DIMS = 4
MAX_NAME_BYTES = 1 << 16
MAX_METADATA_BYTES = 256 << 20
"""The largest vocabularies (256k tokens with merges and scores) take under 20 MiB."""

MIN_KEY_BYTES = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
"""The least that a key-value pair and a tensor description take: bounds their counts."""

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: dict[int, np.dtype] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
"""Value types of metadata by id."""

TENSOR_TYPES = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    26: "i32",
    27: "i64",
    30: "bf16",
}
"""Tensor types that can be decoded, by id."""

UNREADABLE_TENSOR_TYPES = {
    9: "q8_1",
    15: "q8_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    20: "iq4_nl",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    24: "i8",
    25: "i16",
    28: "f64",
    29: "iq1_m",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
    40: "nvfp4",
}
"""Types that exist and are not read, for the error message."""


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: format name, shape with the row last (``(out, in)``), absolute byte range."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GGUFFile(CheckpointFile):
    """An opened GGUF file with checked metadata and tensor ranges.

    Attributes:
        version: 2 or 3.
        metadata: key to bool, int, float, str, list of str, or a 1-D array of numbers.
        tensors: by their name in the file, in the file's order.

    Raises:
        CheckpointError: names the file and the key or tensor that is wrong.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._position = 0
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        if self._take(4, "magic") != MAGIC:
            self._fail("not a GGUF file (it does not start with 'GGUF')")
        self.version = self._number("<I", "version")
        if self.version not in VERSIONS:
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
            reason = "big-endian" if swapped in VERSIONS else f"version {self.version}"
            self._fail(f"a GGUF file of {reason}; versions 2 and 3, little-endian, can be read")
        tensor_count = self._number("<Q", "tensor count")
        key_count = self._number("<Q", "key count")
        self._check_count(tensor_count, MIN_TENSOR_BYTES, "tensors")
        self._check_count(key_count, MIN_KEY_BYTES, "metadata keys")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            self._read_pair()
        described = [self._read_tensor() for _ in range(tensor_count)]
        alignment = self._alignment()
        data_start = -(-self._position // alignment) * alignment
        self.tensors = self._place(described, data_start, alignment)

    # The stream, never past the end and never more than is there.

    def _fail(self, what: str, tensor: str | None = None) -> NoReturn:
        raise damaged(self.path, what, tensor)

    def _take(self, count: int, what: str) -> bytes:
        if count > self.size - self._position:
            self._fail(
                f"{what} at byte {self._position} takes {count} bytes, but the file ends at "
                f"{self.size}: it is cut off or damaged"
            )
        data = self.stream.read(count)
        if len(data) < count:
            self._fail("the file became shorter while it was read")
        self._position += count
        return data

    def _number(self, code: str, what: str) -> int:
        value: int = struct.unpack(code, self._take(struct.calcsize(code), what))[0]
        return value

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        room = self.size - self._position
        if count * least_bytes > room:
            self._fail(f"claims {count} {what}, for which {room} bytes are not enough")

    def _string(self, what: str, limit: int = MAX_METADATA_BYTES) -> str:
        length = self._number("<Q", f"the length of {what}")
        if length > limit:
            self._fail(f"{what} is given as {length} bytes long; the limit is {limit}")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            self._fail(f"{what} is not UTF-8 ({error})")

    # Metadata.

    def _read_pair(self) -> None:
        key = self._string("a metadata key", MAX_NAME_BYTES)
        if key in self.metadata:
            self._fail(f"the key {key!r} occurs twice")
        kind = self._number("<I", f"the type of {key!r}")
        if kind == STRING:
            self.metadata[key] = self._string(f"the value of {key!r}")
        elif kind == ARRAY:
            self.metadata[key] = self._array(key)
        else:
            self.metadata[key] = self._numbers(key, kind, 1)[0].item()
        if self._position > MAX_METADATA_BYTES:
            self._fail(f"more than {MAX_METADATA_BYTES} bytes of metadata (at {key!r})")

    def _array(self, key: str) -> list[str] | np.ndarray:
        kind = self._number("<I", f"the item type of {key!r}")
        count = self._number("<Q", f"the item count of {key!r}")
        if kind == ARRAY:
            self._fail(f"{key!r} is an array of arrays, which no model file has")
        if kind == STRING:
            self._check_count(count, 8, f"strings in {key!r}")
            what = f"an item of {key!r}"
            return [self._string(what) for _ in range(count)]
        return self._numbers(key, kind, count)

    def _numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        dtype = SCALARS.get(kind)
        if dtype is None:
            self._fail(f"{key!r} has the unknown value type {kind}")
        self._check_count(count, dtype.itemsize, f"items in {key!r}")
        if count * dtype.itemsize > MAX_METADATA_BYTES:
            self._fail(f"{key!r} holds {count} items, more than any model has")
        values = np.frombuffer(self._take(count * dtype.itemsize, repr(key)), dtype=dtype)
        if kind == BOOL:
            if (values > 1).any():
                self._fail(f"{key!r} is a boolean that is neither 0 nor 1")
            return values.astype(np.bool_)
        return values

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        valid = type(value) is int and MIN_ALIGNMENT <= value <= MAX_ALIGNMENT
        if not valid or value & (value - 1):
            self._fail(
                f"general.alignment is {value!r}; it must be a power of two from {MIN_ALIGNMENT} "
                f"to {MAX_ALIGNMENT}"
            )
        return int(value)

    # Tensors.

    def _read_tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self._string("a tensor's name", MAX_NAME_BYTES)
        dims_count = self._number("<I", f"the dimension count of tensor '{name}'")
        if not 1 <= dims_count <= MAX_DIMS:
            self._fail(f"has {dims_count} dimensions; 1 to {MAX_DIMS} are possible", name)
        dims = struct.unpack(f"<{dims_count}Q", self._take(8 * dims_count, f"tensor '{name}'"))
        kind = self._number("<I", f"the type of tensor '{name}'")
        offset = self._number("<Q", f"the offset of tensor '{name}'")
        if 0 in dims:
            self._fail(f"has an empty dimension (dims {list(dims)})", name)
        dtype = TENSOR_TYPES.get(kind)
        if dtype is None:
            known = UNREADABLE_TENSOR_TYPES.get(kind)
            reason = (
                f"is stored as {known}, which can't be read" if known else "has an unknown type"
            )
            readable = ", ".join(TENSOR_TYPES.values())
            self._fail(f"{reason} (type id {kind}); readable are {readable}", name)
        # The file lists the fastest dimension first, NumPy and PyTorch last.
        return name, dtype, tuple(reversed(dims)), offset

    def _place(
        self,
        described: list[tuple[str, str, tuple[int, ...], int]],
        data_start: int,
        alignment: int,
    ) -> dict[str, GGUFTensor]:
        tensors: dict[str, GGUFTensor] = {}
        for name, dtype, shape, offset in described:
            if name in tensors:
                self._fail("occurs twice", name)
            fmt = storage_format(dtype)
            if shape[-1] % fmt.elements:
                self._fail(
                    f"rows of {shape[-1]} values are not whole {dtype} blocks of {fmt.elements}",
                    name,
                )
            nbytes = fmt.nbytes(math.prod(shape))
            if offset % alignment:
                self._fail(f"its data offset {offset} is not aligned to {alignment} bytes", name)
            start = data_start + offset
            if start + nbytes > self.size:
                self._fail(
                    f"dims {list(reversed(shape))} of {dtype} end at byte {start + nbytes}, but "
                    f"the file has {self.size} bytes: it is cut off or damaged; download it again",
                    name,
                )
            tensors[name] = GGUFTensor(name, dtype, shape, start, nbytes)
        end, last = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if tensor.start < end:
                self._fail(f"its data overlaps that of tensor '{last}'", tensor.name)
            end, last = tensor.start + tensor.nbytes, tensor.name
        return tensors


class GGUFMetadata:
    """Typed access to a file's metadata: a value of the wrong type is an error, not a surprise."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def _wrong(self, key: str, wanted: str) -> CheckpointError:
        held = self.values[key]
        kind = "array" if isinstance(held, list | np.ndarray) else type(held).__name__
        return damaged(self.path, f"metadata key {key!r} is of type {kind}, expected {wanted}")

    def has(self, key: str) -> bool:
        """Whether the file sets `key`."""
        return key in self.values

    def string(self, key: str, default: str | None = None) -> str | None:
        """A string."""
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool | None:
        """A boolean."""
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "a boolean")
        return value

    def integer(self, key: str, default: int | None = None) -> int | None:
        """A non-negative integer."""
        value = self.values.get(key, default)
        if value is not None and (type(value) is not int or value < 0):
            raise self._wrong(key, "a non-negative integer")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A finite number, as the shortest decimal that is the same float32: the file keeps
        1e-05 as 9.99999974e-06, config.json has 1e-05."""
        value = self.values.get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        short = float(str(np.float32(value)))
        if not math.isfinite(short):
            raise damaged(self.path, f"metadata key {key!r} is {value}")
        return short

    def strings(self, key: str) -> list[str] | None:
        """A list of strings."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, list):
            raise self._wrong(key, "a list of strings")
        return value

    def array(self, key: str) -> np.ndarray | None:
        """A 1-D array of numbers."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, np.ndarray):
            raise self._wrong(key, "a list of numbers")
        return value

    def uniform_integer(self, key: str) -> int | None:
        """An integer that some files give once and some for each layer; it must not vary."""
        value = self.values.get(key)
        if isinstance(value, np.ndarray):
            if not np.issubdtype(value.dtype, np.integer) or not len(value):
                raise self._wrong(key, "an integer or a list of integers")
            if (value != value[0]).any():
                raise damaged(
                    self.path,
                    f"{key!r} differs between layers ({sorted({int(v) for v in value})}), which "
                    "is not supported",
                )
            return int(value[0])
        return self.integer(key)
