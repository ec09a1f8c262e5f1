"""Tensors of a checkpoint that the model doesn't use: told, since they tell of a wrong config.

A checkpoint of three layers whose config says two compiles without a fault, to another model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from bessemer.errors import CheckpointError
from bessemer.graph import Value, topological
from bessemer.importer.checkpoint import Checkpoint
from bessemer.importer.checkpoint.base import some_names
from bessemer.importer.weights import Resolver, WeightReader

log = logging.getLogger(__name__)

# Names shown of those that are many.
_SHOWN = 3

# What follows from the config, or belongs to parts beside the language model.
_HARMLESS = (
    r"(?:^|\.)rotary_emb\.(?:inv_freq|cos_cached|sin_cached)$",
    r"(?:^|\.)rope_freqs(?:\.|$)",
    r"\.(?:attn|attention|self_attn)\.(?:bias|masked_bias|causal_mask)$",
    r"(?:^|\.)position_ids$",
    # prediction of further tokens
    r"(?:^|\.)mtp(?:_layers)?\.",
    # images and sound
    r"(?:^|\.)(?:vision|visual|audio)(?:_\w+)?\.",
    r"(?:^|\.)(?:multi_modal_projector|mm_projector|image_newline)(?:\.|$)",
)


def unused_tensors(
    checkpoint: WeightReader,
    resolver: Resolver,
    parameters: Mapping[str, Value],
    module: torch.nn.Module,
    prefix: str = "",
) -> list[str]:
    """The names of a checkpoint's tensors that have no part in the model, in order.

    parameters: those that the model's graph needs.  module: all that it has, their names after
    `prefix`; what the graph can do without is none the less of the model.
    """
    if not isinstance(checkpoint, Checkpoint) or checkpoint.kind == "config":
        return []
    of_model = {
        str(n.attrs["name"]) for n in topological(list(parameters.values())) if n.op == "param"
    }
    for name in {*parameters, *(n.removeprefix(prefix) for n in _all_names(module))}:
        of_model.update(resolver.names(name))
    ignored = _ignored(checkpoint.config)
    return [
        name
        for name in checkpoint.names()
        if name not in of_model and not any(p.search(name) for p in ignored)
    ]


def _all_names(module: torch.nn.Module) -> Iterable[str]:
    yield from (name for name, _ in module.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in module.named_buffers(remove_duplicate=False))


def _ignored(config: Mapping[str, Any]) -> list[re.Pattern[str]]:
    """Patterns of what is left out on purpose: by anyone, by transformers' class, and the layers
    after the last, which predict further tokens, where the config counts those apart.
    """
    found = [re.compile(p) for p in _HARMLESS]
    name = config.get("model_type")
    # Its get is that of a dict, which has nothing before it is asked by [].
    kind = CONFIG_MAPPING[name] if name in CONFIG_MAPPING else None  # noqa: SIM401
    of_kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None) if kind else None
    stated = getattr(of_kind, "_keys_to_ignore_on_load_unexpected", None) or ()
    found += [re.compile(p) for p in stated]
    further, layers = config.get("num_nextn_predict_layers"), config.get("num_hidden_layers")
    if isinstance(further, int) and isinstance(layers, int):
        numbers = "|".join(str(layers + i) for i in range(further))
        if numbers:
            found.append(re.compile(rf"(?:^|\.)layers\.(?:{numbers})\."))
    return found


def warn_of_unused(names: Sequence[str]) -> None:
    """Say that a model leaves out tensors of its checkpoint."""
    if names:
        log.warning("%s: is config.json of another model?", unused_text(names))


def unused_text(names: Sequence[str]) -> str:
    """How many tensors of a checkpoint have no part in the model, and the first of them."""
    shown = some_names(names, _SHOWN)
    return f"the model doesn't use {len(names)} tensor(s) of the checkpoint: {shown}"


def refuse_missing(checkpoint: WeightReader, missing: Sequence[str], unused: Sequence[str]) -> None:
    """Raises CheckpointError for tensors that are missing, and says what may be wrong: a checkpoint
    that has others in their place is whole, and is not to be downloaded again.
    """
    if not unused or not isinstance(checkpoint, Checkpoint):
        checkpoint.require(missing)
        return
    raise CheckpointError(
        f"{checkpoint.path}: {len(missing)} tensor(s) missing: {some_names(missing, _SHOWN)}; and "
        f"{unused_text(unused)}. The checkpoint names its tensors otherwise than transformers' "
        "model does, a renaming which is not supported, or it belongs to another configuration."
    )
