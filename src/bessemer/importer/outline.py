"""A model of which there is only a config: what its checkpoint would hold, and what of it has to be
captured to know the rest.

A model of eighty layers has few kinds of them. What one layer of each kind needs, all need; so the
first layers, up to two of each kind, are captured in place of all. Two, since the last layer of a
model computes less than the others, and what layers of a kind share is kept until the last of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from bessemer.errors import BessemerError, CheckpointError, UnsupportedError
from bessemer.importer.architectures import check_config
from bessemer.importer.checkpoint import Checkpoint, TensorInfo
from bessemer.importer.checkpoint.files import read_json
from bessemer.importer.refusals import in_file, why_refused
from bessemer.importer.skeleton import read_config
from bessemer.models import DEFINED, check_definition

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
        self._tensors: dict[str, TensorInfo] | None = None

    @classmethod
    def of_file(cls, path: Path) -> ConfigCheckpoint:
        """That of a config.json, or of the one in a folder. Raises CheckpointError."""
        return cls(path, read_json(path / "config.json" if path.is_dir() else path))

    def _held(self) -> dict[str, TensorInfo]:
        if self._tensors is None:
            with in_file(self.config_file):
                check_config(self.config)
                self._tensors = tensors_of(bare_model(read_config(self.config)))
        return self._tensors

    def names(self) -> list[str]:
        return sorted(self._held())

    def info(self, name: str) -> TensorInfo:
        held = self._held()
        if name not in held:
            raise CheckpointError(f"{self.path}: a model of this config has no tensor {name!r}")
        return held[name]

    def read(self, name: str, rows: range | None = None) -> np.ndarray:
        raise CheckpointError(f"{self.path} is a config without weights: there is no {name!r}")

    def read_stored(self, name: str, rows: range | None = None) -> np.ndarray:
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


def bare_model(config: PreTrainedConfig) -> torch.nn.Module:
    """transformers' causal language model of a config, on the meta device: shapes alone.

    Raises UnsupportedError where there is none, CheckpointError where it refuses the config.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedError(f"model_type {config.model_type!r} has no causal language model")
    if config.model_type in DEFINED:
        check_definition(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # values that no check looks at fail in the model's own code
        raise CheckpointError(
            f"config.json: no {config.model_type} model can be made of it: "
            f"{why_refused(error, config.to_dict())}"
        ) from error


def tensors_of(model: torch.nn.Module) -> dict[str, TensorInfo]:
    """What a checkpoint of the model holds, by name; of tied tensors the first."""
    found: dict[str, TensorInfo] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            dtype = "f32" if tensor.is_floating_point() else "i64"
            found[name] = TensorInfo(name, tuple(tensor.shape), dtype)
    return found


@dataclass(frozen=True)
class Outline:
    """A config's model, told by its first layers.

    checkpoint: of the model cut to these layers; there are two of each kind among them, or one and
    a layer after it.
    prefix: of the layers' tensors, up to the layer's number, as "model.layers.".
    like: for each layer of the whole model, the captured layer that it is like.
    parameters: numbers of the whole model, shared ones once; integer tables don't count.
    config: of the whole model.
    """

    checkpoint: ConfigCheckpoint
    prefix: str
    like: tuple[int, ...]
    parameters: int
    config: PreTrainedConfig


def outline(checkpoint: ConfigCheckpoint) -> Outline:
    """Raises UnsupportedError or CheckpointError for a config that can't be compiled."""
    with in_file(checkpoint.config_file):
        check_config(checkpoint.config)
        config = read_config(checkpoint.config)
        model = bare_model(config)
    tensors = tensors_of(model)
    parameters = sum(math.prod(t.shape) for t in tensors.values() if t.dtype == "f32")
    prefix, count = layers_of(model, config)
    keys = by_layer(config.to_dict(), count)
    kinds = layer_kinds(tensors, config, prefix, keys, count)
    needed = 1 + max((_second(kinds, kind) for kind in set(kinds)), default=count)
    cut = _cut(checkpoint, count, prefix, keys, kinds[:needed]) if needed < count else None
    if cut is None:
        return Outline(checkpoint, prefix, tuple(range(count)), parameters, config)
    like = tuple(kinds.index(kind) for kind in kinds)
    return Outline(cut, prefix, like, parameters, config)


def _second(kinds: Sequence[tuple[Any, ...]], kind: tuple[Any, ...]) -> int:
    """Where the second layer of a kind is; the layer after it, where there is but one."""
    first, *more = [i for i, other in enumerate(kinds) if other == kind]
    return more[0] if more else first + 1


def layers_of(model: torch.nn.Module, config: PreTrainedConfig) -> tuple[str, int]:
    """What the names of the layers' tensors begin with, and how many layers there are."""
    count = int(config.num_hidden_layers)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return f"{name}.", count
    raise UnsupportedError(f"{type(model).__name__} keeps its {count} layers in no list")


def by_layer(config: Mapping[str, Any], count: int) -> list[str]:
    """The lists of a config that have an entry for each layer, by name."""
    return [k for k, v in config.items() if isinstance(v, (list, tuple)) and len(v) == count]


def layer_kinds(
    tensors: Mapping[str, TensorInfo],
    config: PreTrainedConfig,
    prefix: str,
    keys: Sequence[str],
    count: int,
) -> list[tuple[Any, ...]]:
    """For each layer all that tells its kind: its tensors, and its entry (kind of attention, kind
    of MLP, ...) of the config's lists `keys`.
    """
    parts: list[list[Any]] = [[] for _ in range(count)]
    for name, info in tensors.items():
        number, dot, rest = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and dot and number.isdigit():
            parts[int(number)].append((rest, info.shape, info.dtype))
    stated = config.to_dict()
    for key in keys:
        for part, value in zip(parts, stated[key], strict=True):
            part.append((key, repr(value)))
    return [tuple(part) for part in parts]


def _cut(
    checkpoint: ConfigCheckpoint,
    count: int,
    prefix: str,
    keys: Sequence[str],
    kinds: list[tuple[Any, ...]],
) -> ConfigCheckpoint | None:
    """The model's first layers, of these kinds; None where cutting the config changes them."""
    stated = dict(checkpoint.config)
    stated.update({key: stated[key][: len(kinds)] for key in by_layer(stated, count)})
    stated["num_hidden_layers"] = len(kinds)
    cut = ConfigCheckpoint(checkpoint.path, stated)
    try:
        small = read_config(stated)
        tensors = tensors_of(bare_model(small))
        same = layer_kinds(tensors, small, prefix, keys, len(kinds)) == kinds
    except (BessemerError, KeyError, ValueError):
        return None
    return cut if same else None
