"""A model of which there is only a config: what its checkpoint would hold, and what of it has to be
captured to know the rest.

A model of eighty layers has few kinds of them. What one layer of each kind needs, all need; so the
first layers, up to one of each kind, are captured in place of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig

from bessemer.errors import BessemerError, CheckpointError
from bessemer.importer.architectures import check_config
from bessemer.importer.checkpoint import Checkpoint, TensorInfo
from bessemer.importer.checkpoint.files import read_json
from bessemer.importer.skeleton import read_config

# What a config says of the published weights' storage, and nothing of the model.
_STORAGE = ("quantization_config", "expert_dtype", "torch_dtype", "dtype")


class ConfigCheckpoint(Checkpoint):
    """The checkpoint that belongs to a config: every tensor's name and shape, and no numbers.

    A model can be imported from it, lowered, and made to code, as long as nothing reads a weight.
    """

    kind = "config"

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """path: where the config comes from, for messages."""
        self.path = path
        self.config = {k: v for k, v in config.items() if k not in _STORAGE}
        self.generation_config: dict[str, Any] = {}
        self._tensors: dict[str, tuple[int, ...]] | None = None

    @classmethod
    def read(cls, path: Path) -> ConfigCheckpoint:  # type: ignore[override]
        """That of a config.json, or of the one in a folder. Raises CheckpointError."""
        return cls(path, read_json(path / "config.json" if path.is_dir() else path))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        if self._tensors is None:
            check_config(self.config)
            self._tensors = tensor_shapes(bare_model(read_config(self.config)))
        return self._tensors

    def names(self) -> list[str]:
        return sorted(self._shapes())

    def info(self, name: str) -> TensorInfo:
        shapes = self._shapes()
        if name not in shapes:
            raise CheckpointError(f"{self.path}: a model of this config has no tensor {name!r}")
        return TensorInfo(name, shapes[name], "f32")

    def read(self, name: str) -> np.ndarray:  # type: ignore[override]  # noqa: F811
        raise CheckpointError(f"{self.path} is a config without weights: there is no {name!r}")

    def read_stored(self, name: str) -> np.ndarray:
        return self.read(name)

    @property
    def is_quantised(self) -> bool:
        return False

    def has_tokenizer(self) -> bool:
        return False

    def write_tokenizer(self, folder: Path) -> None:
        raise CheckpointError(f"{self.path} is a config without a tokenizer")

    def content_files(self) -> list[tuple[str, Path]]:
        return []

    def weight_files(self) -> list[Path]:
        return []

    def require(self, names: Iterable[str]) -> None:
        for name in names:
            self.info(name)

    def close(self) -> None:
        """Nothing is open."""
