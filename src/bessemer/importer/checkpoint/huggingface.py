"""Hugging Face folders: config.json, one or many safetensors shards, tokenizer files."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.importer.checkpoint import hf_tokenizer
from bessemer.importer.checkpoint.base import Checkpoint, TensorInfo
from bessemer.importer.checkpoint.files import damaged, read_json
from bessemer.importer.checkpoint.safetensors_file import SafetensorsEntry, SafetensorsFile
from bessemer.quantize import FLOAT_FORMATS, INTEGER_FORMATS, storage_format

INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"
PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt")


class HuggingFaceCheckpoint(Checkpoint):
    """A folder as ``save_pretrained`` writes it. All shards are opened and checked at once.

    Args:
        folder: holds config.json.

    Raises:
        CheckpointError: no readable weights, a missing or damaged shard, a quantised model.
    """

    kind = "hf"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = read_json(folder / "config.json")
        self._refuse_quantised()
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if generation.exists() else {}
        self._shards: dict[str, SafetensorsFile] = {}
        self._entries: dict[str, tuple[SafetensorsFile, SafetensorsEntry]] = {}
        try:
            self._open_shards()
        except BaseException:
            self.close()
            raise

    def _refuse_quantised(self) -> None:
        quantisation = self.config.get("quantization_config")
        if quantisation:
            stated = quantisation if isinstance(quantisation, dict) else {}
            method = stated.get("quant_method", "unknown method")
            raise damaged(
                self.path / "config.json",
                f"the model is quantised ({method}), which can't be read from a Hugging Face "
                "folder; use the unquantised model or a GGUF of it",
            )

    def _open_shards(self) -> None:
        # A whole file wins over an index, as in transformers.
        single = self.path / WEIGHTS_NAME
        index = self.path / INDEX_NAME
        if not single.exists():
            if index.exists():
                self._open_indexed(index)
                return
            single = self._only_safetensors()
        shard = self._shards[single.name] = SafetensorsFile(single)
        self._entries = {name: (shard, entry) for name, entry in shard.entries.items()}

    def _only_safetensors(self) -> Path:
        found = sorted(self.path.glob("*.safetensors"))
        if len(found) == 1 and not found[0].name.startswith("adapter_"):
            return found[0]
        if found:
            listed = ", ".join(file.name for file in found[:6])
            raise damaged(self.path, f"no {WEIGHTS_NAME} and no {INDEX_NAME}, only {listed}")
        pickles = sorted(file for pattern in PICKLE_PATTERNS for file in self.path.glob(pattern))
        if pickles:
            raise damaged(
                pickles[0],
                "a pickle, which runs code when it is loaded, and is not read. Convert the model: "
                "load it with transformers where you trust it, then save_pretrained(), which "
                "writes safetensors",
            )
        raise damaged(self.path, f"no weights: neither {WEIGHTS_NAME} nor {INDEX_NAME}")

    def _open_indexed(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise damaged(index, "has no weight_map")
        self._check_shards_exist(index, weight_map)
        for name, file in sorted(weight_map.items()):
            shard = self._shards.get(file)
            if shard is None:
                shard = self._shards[file] = SafetensorsFile(self.path / file)
            entry = shard.entries.get(name)
            if entry is None:
                raise damaged(shard.path, f"not in this shard, though {INDEX_NAME} says so", name)
            self._entries[name] = (shard, entry)

    def _check_shards_exist(self, index: Path, weight_map: dict[str, Any]) -> None:
        absent: dict[str, str] = {}
        for name, file in sorted(weight_map.items()):
            parts = PurePosixPath(file).parts if isinstance(file, str) else ()
            if not parts or ".." in parts or PurePosixPath(file).is_absolute():
                raise damaged(index, f"its shard {file!r} is not a file of this folder", name)
            if file not in absent and not (self.path / file).exists():
                absent[file] = name
        if absent:
            listed = "; ".join(f"{file} (tensor '{name}')" for file, name in absent.items())
            raise damaged(self.path, f"{INDEX_NAME} names {len(absent)} missing shard(s): {listed}")

    def names(self) -> list[str]:
        return sorted(self._entries)

    def _entry(self, name: str) -> tuple[SafetensorsFile, SafetensorsEntry]:
        try:
            return self._entries[name]
        except KeyError:
            raise self._no_such_tensor(name) from None

    def info(self, name: str) -> TensorInfo:
        _, entry = self._entry(name)
        return TensorInfo(name, entry.shape, entry.dtype.lower())

    def read(self, name: str, rows: range | None = None) -> npt.NDArray[np.float32]:
        shard, entry = self._entry(name)
        fmt = storage_format(self._readable_format(name))
        return shard.read(entry.start, entry.shape, fmt, rows)

    def read_stored(self, name: str, rows: range | None = None) -> npt.NDArray[Any]:
        shard, entry = self._entry(name)
        if entry.dtype.lower() in INTEGER_FORMATS:
            return self.read(name, rows)
        fmt = storage_format(self._readable_format(name))
        return shard.read_stored(entry.start, entry.shape, fmt, rows)

    def _readable_format(self, name: str) -> str:
        shard, entry = self._entry(name)
        dtype = entry.dtype.lower()
        if dtype not in FLOAT_FORMATS and dtype not in INTEGER_FORMATS:
            raise damaged(
                shard.path,
                f"stored as {entry.dtype}; weights are read from F32, F16 and BF16, tables from "
                "I32 and I64",
                name,
            )
        return dtype

    @property
    def is_quantised(self) -> bool:
        return False

    def has_tokenizer(self) -> bool:
        return hf_tokenizer.has_tokenizer(self.path)

    def write_tokenizer(self, folder: Path) -> None:
        hf_tokenizer.write_tokenizer(self.path, self.generation_config, folder)

    def weight_files(self) -> list[Path]:
        return [shard.path for shard in self._shards.values()]

    def content_files(self) -> list[tuple[str, Path]]:
        names = ["config.json", "generation_config.json", INDEX_NAME, *hf_tokenizer.FILES]
        files = [(name, self.path / name) for name in names if (self.path / name).exists()]
        templates = sorted((self.path / hf_tokenizer.TEMPLATE_FOLDER).glob("*.jinja"))
        files += [(f"{hf_tokenizer.TEMPLATE_FOLDER}/{file.name}", file) for file in templates]
        return files + [(name, shard.path) for name, shard in self._shards.items()]

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()
