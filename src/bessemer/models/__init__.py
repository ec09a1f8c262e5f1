"""Definitions of architectures that transformers' own models can't be exported from.

A definition is a torch module `(ids, positions) -> logits`, both inputs i64[1, T], with the names
of transformers' parameters. What keeps state is an op of `bessemer.importer.definition_ops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

# The model types that are imported through a definition.
DEFINED = ("deepseek_v4",)


@dataclass(frozen=True)
class DefinitionOptions:
    """What is added to a model when it is imported.

    low_precision: caches and index keys are rounded as in the model's training; for architectures
    that have such steps.  steering: sessions may steer the output of every attention and
    feed-forward module, see `bessemer.steering`.
    """

    low_precision: bool = False
    steering: bool = False


def define(config: Any, options: DefinitionOptions) -> torch.nn.Module:
    """The definition of a transformers config, its parameters on the current torch device.

    Raises UnsupportedError for values that the definition doesn't know.
    """
    from bessemer.models.deepseek_v4 import DeepseekV4

    return {"deepseek_v4": DeepseekV4}[config.model_type](config, options)


def check_definition(config: Any) -> None:
    """Raises CheckpointError where the numbers of a transformers config, whose model type is among
    `DEFINED`, can't be right: what `define` would raise, before anything is built.
    """
    from bessemer.models import deepseek_v4_config

    {"deepseek_v4": deepseek_v4_config.check_sizes}[config.model_type](config)


def file_names(model_type: str) -> Callable[[str], list[str]]:
    """Gives the names that a parameter (or the start of its name) may have in checkpoints."""
    from bessemer.models import deepseek_v4_files

    return {"deepseek_v4": deepseek_v4_files.file_names}[model_type]
