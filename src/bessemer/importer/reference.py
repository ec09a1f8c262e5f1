"""PyTorch's own answer: logits in f32 with eager attention, on given weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from bessemer.graph import Value, evaluate_value
from bessemer.importer import rope
from bessemer.importer.api import Imported, Source, import_model
from bessemer.importer.skeleton import (
    from_config,
    from_definition,
    read_config,
    without_weights,
)
from bessemer.importer.weights import tied_names

Read = Callable[[str], np.ndarray]
Logits = Callable[[Sequence[int]], np.ndarray]


def reference_logits(source: Imported | Source, weights: Read | None = None) -> Logits:
    """A function from token ids to PyTorch's logits float32[T, vocab] of a cold full forward.

    A model with low-precision steps is our own definition of it, called by itself. Of equal
    scores the lowest index is chosen (`LowestFirst`).

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
    if imported.options.low_precision:
        return _plain(model, imported.token_rank)
    if isinstance(model, PreTrainedModel):
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
        return _causal_lm(model)
    return _plain(model, imported.token_rank)


def _skeleton(imported: Imported) -> torch.nn.Module:
    if imported.options.low_precision:  # transformers' class has no such steps
        return from_definition(read_config(imported.config), imported.options)
    if imported.module is not None:
        model = without_weights(imported.module)
        for module in model.modules():  # buffers are still the module's own
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.clone()
        for state in imported.graph.updates:
            model.get_buffer(state).zero_()
        return model
    return from_config(read_config(imported.config))


def _fill(model: torch.nn.Module, imported: Imported, read: Read) -> None:
    """Replace every stand-in by its values, one tensor at a time; tied ones stay one."""
    aliases = tied_names(model)
    done: dict[Value, torch.Tensor] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                names = [prefix + name, *aliases.get(prefix + name, [])]
                found = [n for n in names if n in imported.parameters]
                if tensor is None or not found:
                    continue
                source = imported.parameters[found[0]]
                if source not in done:
                    done[source] = torch.from_numpy(np.array(evaluate_value(source, read)))
                value = done[source]
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                table[name] = torch.nn.Parameter(value, False) if is_parameter else value


class LowestFirst(TorchFunctionMode):
    """Among equal values `topk` takes the lowest index, which PyTorch leaves open, and which it
    does differently for different shapes. Compiled code has this rule, too: scores of an index
    are often exactly zero.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        plain = not kwargs.keys() - {"input", "k", "dim", "sorted"}
        if func not in (torch.topk, torch.Tensor.topk) or not plain or len(args) > 3:
            return func(*args, **kwargs)
        named = {**dict(zip(("input", "k", "dim"), args, strict=False)), **kwargs}
        x, k, dim = named["input"], named["k"], named.get("dim", -1)
        values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def _causal_lm(model: PreTrainedModel) -> Logits:
    def logits(ids: Sequence[int]) -> np.ndarray:
        rope.reset(model)
        with torch.no_grad(), LowestFirst():
            out = model(input_ids=torch.tensor([list(ids)]), use_cache=False)
        return out.logits[0].numpy()

    return logits


def _plain(model: torch.nn.Module, rank: int) -> Logits:
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def logits(ids: Sequence[int]) -> np.ndarray:
        for name, buffer in model.named_buffers():
            buffer.copy_(start[name])
        shape = (1, len(ids)) if rank == 2 else (len(ids),)
        tokens, positions = torch.tensor(list(ids)), torch.arange(len(ids))
        with torch.no_grad(), LowestFirst():
            out = model(tokens.reshape(shape), positions.reshape(shape))
        return out.reshape(len(ids), -1).numpy()

    return logits
