"""A GGUF file as a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.importer.checkpoint import gguf_tokenizer
from bessemer.importer.checkpoint.base import Checkpoint, TensorInfo
from bessemer.importer.checkpoint.files import damaged
from bessemer.importer.checkpoint.gguf_architectures import ArchitectureReader, MappedTensor
from bessemer.importer.checkpoint.gguf_file import GGUFFile, GGUFMetadata, GGUFTensor
from bessemer.quantize import FLOAT_FORMATS, INTEGER_FORMATS, storage_format

SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


def unpermute(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Undoes the row order that llama GGUFs store q and k in.

    There, within each head, row 2i is followed by the row it is rotated with; transformers keeps
    the first halves of all pairs before the second halves.

    Args:
        values: ``[heads * head_dim, ...]``.
        heads: the head count of this tensor: q's or k's own.

    Returns:
        A new array of the same shape and dtype.
    """
    rows = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(values.shape)


def _in_order(
    mapped: MappedTensor,
    rows: range | None,
    read: Callable[[range | None], npt.NDArray[Any]],
) -> npt.NDArray[Any]:
    """Rows of a tensor, whose rows a file may have in another order within each head."""
    heads = mapped.permuted_heads
    if not heads:
        return read(rows)
    if rows is None:
        return unpermute(read(None), heads)
    width = mapped.tensor.shape[0] // heads
    first, last = rows.start // width, -(-rows.stop // width)
    values = unpermute(read(range(first * width, last * width)), last - first)
    return values[rows.start - first * width : rows.stop - first * width]


class GGUFCheckpoint(Checkpoint):
    """A GGUF file, or all the parts of a split one.

    Args:
        path: the file; of a split one, its first part.

    Raises:
        CheckpointError: damaged, incomplete, or of an architecture or format that is not
            supported; the message names file, key or tensor.
    """

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[GGUFFile] = []
        self._home: dict[str, GGUFFile] = {}
        try:
            tensors = self._open_parts(path)
            self._metadata = GGUFMetadata(path, self._files[0].metadata)
            reader = ArchitectureReader(path, self._metadata, tensors, self._read_factors)
            self.config = reader.config()
            self._tensors: dict[str, MappedTensor] = reader.map_tensors(self.config)
            self.generation_config = gguf_tokenizer.generation_config(self._metadata)
            gguf_tokenizer.check_sizes(self._metadata, self.config["vocab_size"])
        except BaseException:
            self.close()
            raise

    def _open_parts(self, path: Path) -> dict[str, GGUFTensor]:
        tensors: dict[str, GGUFTensor] = {}
        for part in self._part_paths(path):
            file = GGUFFile(part)
            self._files.append(file)
            for name, tensor in file.tensors.items():
                if name in tensors:
                    raise damaged(part, f"also in {self._home[name].path.name}", name)
                tensors[name] = tensor
                self._home[name] = file
        counted = GGUFMetadata(path, self._files[0].metadata).integer("split.tensors.count")
        if counted is not None and counted != len(tensors):
            raise damaged(path, f"its parts hold {len(tensors)} tensors, it gives {counted}")
        return tensors

    @staticmethod
    def _part_paths(path: Path) -> list[Path]:
        match = SPLIT_NAME.fullmatch(path.name)
        if match is None:
            return [path]
        if int(match["part"]) != 1:
            raise damaged(path, f"part {int(match['part'])} of a split file; name the first part")
        count = int(match["parts"])
        paths = [
            path.with_name(f"{match['stem']}-{part:05d}-of-{count:05d}.gguf")
            for part in range(1, count + 1)
        ]
        absent = [part.name for part in paths if not part.exists()]
        if absent:
            raise damaged(path, f"{len(absent)} part(s) missing: {', '.join(absent[:6])}")
        return paths

    def _read_factors(self, name: str) -> list[float]:
        return [float(value) for value in self._decode(self._home[name], name)]

    def _decode(
        self, file: GGUFFile, name: str, rows: range | None = None
    ) -> npt.NDArray[np.float32]:
        tensor = file.tensors[name]
        return file.read(tensor.start, tensor.shape, storage_format(tensor.dtype), rows)

    def _mapped(self, name: str) -> MappedTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise self._no_such_tensor(name) from None

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def info(self, name: str) -> TensorInfo:
        tensor = self._mapped(name).tensor
        return TensorInfo(name, tensor.shape, tensor.dtype)

    def read(self, name: str, rows: range | None = None) -> npt.NDArray[np.float32]:
        mapped = self._mapped(name)
        file, tensor = self._home[mapped.tensor.name], mapped.tensor
        return _in_order(mapped, rows, lambda part: self._decode(file, tensor.name, part))

    def read_stored(self, name: str, rows: range | None = None) -> npt.NDArray[Any]:
        mapped = self._mapped(name)
        tensor = mapped.tensor
        if tensor.dtype not in FLOAT_FORMATS:
            return self.read(name, rows)
        file, fmt = self._home[tensor.name], storage_format(tensor.dtype)
        return _in_order(
            mapped, rows, lambda part: file.read_stored(tensor.start, tensor.shape, fmt, part)
        )

    @property
    def is_quantised(self) -> bool:
        plain = FLOAT_FORMATS | INTEGER_FORMATS.keys()
        return any(mapped.tensor.dtype not in plain for mapped in self._tensors.values())

    def has_tokenizer(self) -> bool:
        return gguf_tokenizer.has_tokenizer(self._metadata)

    def write_tokenizer(self, folder: Path) -> None:
        gguf_tokenizer.write_tokenizer(self._metadata, self.config, self.generation_config, folder)

    def weight_files(self) -> list[Path]:
        return [file.path for file in self._files]

    def content_files(self) -> list[tuple[str, Path]]:
        return [(f"part {number:05d}", file.path) for number, file in enumerate(self._files)]

    def close(self) -> None:
        for file in self._files:
            file.close()
