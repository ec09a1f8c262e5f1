"""Where transformers' models can be steered: the outputs of each layer's two modules."""

from __future__ import annotations

from typing import Any

import torch

from bessemer.errors import UnsupportedError
from bessemer.importer import definition_ops  # noqa: F401  (the op)
from bessemer.steering import ATTENTION_SITE, FFN_SITE

# What architectures call the feed-forward module of a layer.
_FFN = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "moe")


def make_steerable(model: torch.nn.Module, count: int) -> None:
    """Let the outputs of attention and feed-forward modules of a model (a copy of ours) be steered.

    Raises UnsupportedError where its `count` layers don't have these two modules.
    """
    name = type(model).__name__
    for layer, block in enumerate(_layers(model, count)):
        parts = dict(block.named_children())
        attention = [m for m in parts.values() if _attends(m)]
        ffn = [parts[n] for n in _FFN if n in parts]
        if len(attention) != 1 or len(ffn) != 1:
            raise UnsupportedError(
                f"--steering: layer {layer} of {name} has no single attention and feed-forward "
                f"module (it has {', '.join(parts)})"
            )
        for module, site in ((attention[0], ATTENTION_SITE), (ffn[0], FFN_SITE)):
            module.register_forward_hook(_Hook(layer, count, site))


def _layers(model: torch.nn.Module, count: int) -> torch.nn.ModuleList:
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedError(f"--steering: {type(model).__name__} keeps its layers in no list")


def _attends(module: torch.nn.Module) -> bool:
    """Whether the module is an attention: `masks.note_windows` marks those."""
    return any(hasattr(m, "bessemer_window") for m in module.modules())


class _Hook:
    """Steers a module's output, the first one where it gives several."""

    def __init__(self, layer: int, layers: int, site: int) -> None:
        self.numbers = (layer, layers, site)

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (torch.ops.bessemer.steer(output[0], *self.numbers), *output[1:])
        return torch.ops.bessemer.steer(output, *self.numbers)
