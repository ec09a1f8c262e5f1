"""PyTorch's own answer: logits in f32 with eager attention, on given weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from bessemer.graph import evaluate_value
from bessemer.importer import rope
from bessemer.importer.api import Imported, Source, import_model
from bessemer.importer.skeleton import from_config, read_config, without_weights

Read = Callable[[str], np.ndarray]
Logits = Callable[[Sequence[int]], np.ndarray]


def reference_logits(source: Imported | Source, weights: Read | None = None) -> Logits:
    """A function from token ids to PyTorch's logits float32[T, vocab] of a cold full forward.

    Args:
        source: what was imported, or anything that `import_model` takes.
        weights: gives each tensor that the graph's params name, float32 in checkpoint
            orientation (what an artifact stores, decoded); None for the checkpoint's own.

    Memory: the whole model in f32. Raises what `import_model` raises.
    """
    imported = source if isinstance(source, Imported) else import_model(source)
    read = weights or imported.checkpoint.read
    model = _skeleton(imported)
    _fill(model, imported, read)
    if isinstance(model, PreTrainedModel):
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
        return _causal_lm(model)
    return _plain(model)


def _skeleton(imported: Imported) -> torch.nn.Module:
    if imported.module is not None:
        return without_weights(imported.module)
    return from_config(read_config(imported.config))


def _fill(model: torch.nn.Module, imported: Imported, read: Read) -> None:
    """Replace every stand-in by its values, one tensor at a time; tied ones stay one."""
    done: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                full = prefix + name
                if tensor is None or full not in imported.parameters:
                    continue
                key = id(tensor)
                if key not in done:
                    array = evaluate_value(imported.parameters[full], read)
                    done[key] = torch.from_numpy(np.ascontiguousarray(array))
                value = done[key]
                table[name] = (
                    torch.nn.Parameter(value, requires_grad=False)
                    if isinstance(tensor, torch.nn.Parameter)
                    else value.reshape(tensor.shape)
                )


def _causal_lm(model: PreTrainedModel) -> Logits:
    def logits(ids: Sequence[int]) -> np.ndarray:
        rope.reset(model)
        with torch.no_grad():
            out = model(input_ids=torch.tensor([list(ids)]), use_cache=False)
        return out.logits[0].numpy()

    return logits


def _plain(model: torch.nn.Module) -> Logits:
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def logits(ids: Sequence[int]) -> np.ndarray:
        for name, buffer in model.named_buffers():
            buffer.copy_(start[name])
        tokens, positions = torch.tensor([list(ids)]), torch.arange(len(ids))[None]
        with torch.no_grad():
            out = model(tokens, positions)
        return out.reshape(len(ids), -1).numpy()

    return logits


__all__ = ["Path", "reference_logits"]
