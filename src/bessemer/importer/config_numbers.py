"""The numbers of a config, looked at before a model is made of them.

A size of zero, more chosen experts than there are, or a million layers would fail late and in the
words of whoever divides by them first; some would not fail at all. What any architecture means by
a name is checked here; what is one definition's own, beside the definition.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from bessemer.arguments import shown
from bessemer.errors import CheckpointError

# No size of a model is beyond it, and the product of two still fits in 64 bits.
LARGEST = 2**31 - 1
# Published models have up to 130 layers; modules and tensors of each are made one by one.
MOST_LAYERS = 512

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("original_max_position_embeddings", "q_lora_rank", "kv_lora_rank"),
    *("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
)
# 0 says that there is none.
_COUNTS = ("sliding_window", "num_experts", "num_local_experts", "n_routed_experts")
_POSITIVE = (
    *("rope_theta", "rope_local_base_freq", "rotary_emb_base", "compress_rope_theta"),
    *("query_pre_attn_scalar", "logits_scaling", "factor"),
)
_NOT_NEGATIVE = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"),
    *("norm_eps", "norm_epsilon"),
)
_SHARES = ("partial_rotary_factor", "rotary_pct")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token")
_ROPE = ("rope_parameters", "rope_scaling")


def check_numbers(config: Mapping[str, Any]) -> None:
    """Raises CheckpointError that names each field whose number can't be right, with its value.

    config: as a config.json holds it. What it leaves out, or sets to null, has a default.
    """
    refuse(list(_general(config)))


def refuse(found: list[str]) -> None:
    """Raises CheckpointError for what is wrong with a config, if anything is."""
    if found:
        raise CheckpointError(f"config.json can't be right: {'; '.join(found)}")


def whole(
    config: Mapping[str, Any], key: str, least: int = 1, most: int = LARGEST
) -> Iterator[str]:
    """What is wrong unless a field, or each number of a list in it, is a whole one in a range."""
    value = config.get(key)
    for one in value if isinstance(value, (list, tuple)) else [value]:
        right = isinstance(one, int) and not isinstance(one, bool) and least <= one <= most
        if one is not None and not right:
            yield f"{key} is {shown(one)}, and must be a whole number from {least} to {most}"
            return


def number(
    config: Mapping[str, Any], key: str, *, zero: bool = False, most: float = sys.float_info.max
) -> Iterator[str]:
    """What is wrong unless a field is a finite number above 0. zero: 0 is right, too."""
    value = config.get(key)
    right = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most
    if value is not None and not (right and (zero or value > 0)):
        limit = "" if most == sys.float_info.max else f" and at most {most:g}"
        least = "from 0" if zero else "above 0"
        yield f"{key} is {shown(value)}, and must be a finite number {least}{limit}"


def _general(config: Mapping[str, Any]) -> Iterator[str]:
    yield from whole(config, "num_hidden_layers", most=MOST_LAYERS)
    for key in _SIZES:
        yield from whole(config, key)
    for key in _COUNTS:
        yield from whole(config, key, least=0)
    yield from _reals(config)
    for key in (*_ROPE, "text_config"):
        if config.get(key) and not isinstance(config[key], Mapping):
            yield f"{key} is {shown(config[key])}, and must be an object"
    for key in _ROPE:
        table = config.get(key)
        for part in [table, *table.values()] if isinstance(table, Mapping) else []:
            if isinstance(part, Mapping):
                yield from whole(part, "original_max_position_embeddings")
                yield from _reals(part)
    yield from _heads(config)
    yield from _experts(config)
    text = config.get("text_config")
    if isinstance(text, Mapping):
        yield from _general(text)


def _reals(config: Mapping[str, Any]) -> Iterator[str]:
    for key in _POSITIVE:
        yield from number(config, key)
    for key in _NOT_NEGATIVE:
        yield from number(config, key, zero=True)
    for key in _SHARES:
        yield from number(config, key, most=1)


def _heads(config: Mapping[str, Any]) -> Iterator[str]:
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if _counts(heads) and _counts(shared) and heads % shared:
        yield f"num_attention_heads is {heads}, no multiple of num_key_value_heads, {shared}"


def _experts(config: Mapping[str, Any]) -> Iterator[str]:
    for name in _CHOSEN:
        yield from whole(config, name, least=0)
        chosen = config.get(name)
        for all_ in _EXPERTS:
            count = config.get(all_)
            if _counts(count) and isinstance(chosen, int) and not 1 <= chosen <= count:
                yield f"{name} is {chosen}, of {count} experts ({all_})"
    groups, experts = config.get("n_group"), config.get("n_routed_experts")
    yield from whole(config, "n_group")
    yield from whole(config, "topk_group")
    if _counts(groups) and _counts(experts) and experts % groups:
        yield f"n_routed_experts is {experts}, no multiple of n_group, {groups}"
    chosen = config.get("topk_group")
    if _counts(groups) and _counts(chosen) and chosen > groups:
        yield f"topk_group is {chosen}, of {groups} groups (n_group)"


def _counts(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number above 0, as far as it is one at all."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
