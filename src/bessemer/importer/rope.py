"""Rotary embeddings whose frequencies depend on the length, in a form that exports.

Default, linear, llama3 and yarn frequencies are tables that transformers computes from the config.
Dynamic and longrope pick theirs by the length of the whole sequence; transformers does so by
changing a buffer. Here the length is an op, `bessemer::sequence_length`, which becomes the graph
input of that name.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

log = logging.getLogger(__name__)

LENGTH_DEPENDENT = ("dynamic", "longrope")
# Where config.json may give the rotary base, beside an entry of the same names one level down.
BASE_KEYS = (
    "rope_theta",
    "rotary_emb_base",
    "global_rope_theta",
    "local_rope_theta",
    "rope_local_base_freq",
)


@torch.library.custom_op("bessemer::sequence_length", mutates_args=())
def sequence_length(positions: torch.Tensor) -> torch.Tensor:
    """Tokens of the whole sequence, i64[]: those before the call's and the call's own."""
    return positions.max() + 1


@sequence_length.register_fake
def _(positions: torch.Tensor) -> torch.Tensor:
    return positions.new_empty(())


class _With:
    """A module with some of its attributes replaced."""

    def __init__(self, module: torch.nn.Module, **replaced: Any) -> None:
        self.module = module
        for name, value in replaced.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class AtLength(torch.nn.Module):
    """A rotary module that takes its frequencies by the sequence length, without mutation."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary
        self.plain = inspect.unwrap(type(rotary).forward)
        self.kinds = _kinds(rotary)
        for layer_type, kind in self.kinds.items():
            if kind == "longrope":
                longer = _parameters(rotary, layer_type)["original_max_position_embeddings"] + 1
                table, _ = ROPE_INIT_FUNCTIONS[kind](
                    rotary.config, None, seq_len=longer, layer_type=layer_type
                )
                self.register_buffer(f"{_prefix(layer_type)}long", table, persistent=False)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> Any:
        more = {} if layer_type is None else {"layer_type": layer_type}
        kind = self.kinds.get(layer_type, "default")
        if kind not in LENGTH_DEPENDENT:
            return self.plain(self.rotary, x, position_ids, **more)
        name = f"{_prefix(layer_type)}inv_freq"
        length = torch.ops.bessemer.sequence_length(position_ids)
        table = self.frequencies(length, layer_type, kind)
        return self.plain(_With(self.rotary, **{name: table}), x, position_ids, **more)

    def frequencies(self, length: torch.Tensor, layer_type: str | None, kind: str) -> torch.Tensor:
        """Inverse frequencies f32[rotary / 2] for a sequence of that length, i64[]."""
        short = getattr(self.rotary, f"{_prefix(layer_type)}original_inv_freq")
        if kind == "longrope":
            long = getattr(self, f"{_prefix(layer_type)}long")
            return torch.where(length > _threshold(self.rotary, layer_type), long, short)
        return self.dynamic(length, short, layer_type)

    def dynamic(
        self, length: torch.Tensor, short: torch.Tensor, layer_type: str | None
    ) -> torch.Tensor:
        """NTK scaling: base * (factor * L / max - (factor - 1)) ^ (dim / (dim - 2))."""
        values = _parameters(self.rotary, layer_type)
        limit = _threshold(self.rotary, layer_type)
        width = 2 * short.shape[0]
        factor = float(values["factor"])
        longest = torch.clamp(length, min=limit).to(torch.float32)
        stretch = longest * factor / limit - (factor - 1)
        base = stretch ** (width / (width - 2)) * float(values["rope_theta"])
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        return torch.where(length > limit, 1.0 / base**exponents, short)


def _prefix(layer_type: str | None) -> str:
    return "" if layer_type is None else f"{layer_type}_"


def _kinds(rotary: Any) -> dict[str | None, str]:
    """Kind of rope for each layer type; one under None where layers do not differ."""
    kind = getattr(rotary, "rope_type", None)
    if isinstance(kind, dict):
        return dict(kind)
    return {None: kind} if isinstance(kind, str) else {}


def _parameters(rotary: Any, layer_type: str | None) -> dict[str, Any]:
    values = rotary.config.rope_parameters
    return values if layer_type is None else values[layer_type]


def _threshold(rotary: Any, layer_type: str | None) -> int:
    """The longest sequence with the short frequencies."""
    values = _parameters(rotary, layer_type)
    if _kinds(rotary)[layer_type] == "longrope":
        return int(values["original_max_position_embeddings"])
    return int(rotary.config.max_position_embeddings)


def log_default_base(stated: Mapping[str, Any], config: Any) -> None:
    """Say which rotary base is taken when a config.json (`stated`) names none: that of `config`,
    which transformers made of it.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters or _names_base(stated):
        return
    by_layer_type = [p for p in parameters.values() if isinstance(p, Mapping)]
    bases = [p["rope_theta"] for p in by_layer_type or [parameters] if "rope_theta" in p]
    taken = ", ".join(f"{base:g}" for base in bases)
    log.warning("config.json: no rope_theta; taking %s's default, %s", config.model_type, taken)


def _names_base(stated: Mapping[str, Any]) -> bool:
    if any(stated.get(key) is not None for key in BASE_KEYS):
        return True
    return any(_names_base(part) for part in stated.values() if isinstance(part, Mapping))


def context_limit(config: Any) -> int | None:
    """The longest sequence that a model is made for, if its config says so.

    Dynamic scaling begins past max_position_embeddings, and is meant for `factor` times as much.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [p for p in parameters.values() if isinstance(p, Mapping)]
    factors = [
        float(p["factor"]) for p in by_layer_type or [parameters] if p.get("rope_type") == "dynamic"
    ]
    return int(limit * max(1.0, min(factors, default=1.0)))


def make_exportable(model: torch.nn.Module) -> dict[str, Any] | None:
    """Replace the length-dependent rotary modules of a model (a copy of ours).

    Returns {"kind": "dynamic" | "longrope", "threshold": tokens}, or None without any.
    """
    found: dict[str, Any] | None = None
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            kinds = _kinds(child)
            changing = [(t, k) for t, k in kinds.items() if k in LENGTH_DEPENDENT]
            if not changing or isinstance(parent, AtLength):
                continue
            setattr(parent, name, AtLength(child))
            for layer_type, kind in changing:
                threshold = _threshold(child, layer_type)
                if found is None or threshold < found["threshold"]:
                    found = {"kind": kind, "threshold": threshold}
    return found


def reset(model: torch.nn.Module) -> None:
    """Forget the lengths that rotary modules have seen, so that the next forward is a cold one."""
    for module in model.modules():
        for layer_type, kind in _kinds(module).items():
            name = f"{_prefix(layer_type)}original_inv_freq"
            if kind in LENGTH_DEPENDENT and hasattr(module, name):
                table = getattr(module, name).clone()
                module.register_buffer(f"{_prefix(layer_type)}inv_freq", table, persistent=False)
                limit = module.original_max_seq_len
                setattr(module, f"{_prefix(layer_type)}max_seq_len_cached", limit)
