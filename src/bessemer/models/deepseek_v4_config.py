"""What a config of DeepSeek V4 must say for its definition to mean something.

Errors name the field and its value: torch and the compiler would fail on the same numbers later, in
words of their own, or compute something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bessemer.graph.ops.compressed import ROUNDINGS
from bessemer.importer.config_numbers import number, refuse, whole

WINDOW_ONLY = "sliding_attention"
SPARSE = "compressed_sparse_attention"

# The published model has 4 streams, and (2 + n) * n * n * hidden numbers mix n of them.
MOST_STREAMS = 64
# The published model has 20; Sinkhorn's iteration has converged long before.
MOST_ITERATIONS = 1000
# Published rates are 4 and 128. A layer keeps projected rows in f32 for one or two blocks.
MOST_RATE = 1 << 16

_SIZES = (
    "sliding_window",
    "o_groups",
    "o_lora_rank",
    "index_n_heads",
    "index_head_dim",
    "n_routed_experts",
)


def check_sizes(config: Any) -> None:
    """Raises CheckpointError for numbers of a transformers config that can't be right; what is
    common to all architectures is `config_numbers`'s.
    """
    refuse(list(_wrong_sizes(config.to_dict())))


def _wrong_sizes(values: Mapping[str, Any]) -> Iterator[str]:
    yield from whole(values, "hc_mult", most=MOST_STREAMS)
    yield from whole(values, "hc_sinkhorn_iters", most=MOST_ITERATIONS)
    for key in (*_SIZES, "index_topk"):
        yield from whole(values, key)
    heads, groups = values["num_attention_heads"], values["o_groups"]
    if isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups:
        yield f"num_attention_heads is {heads}, no multiple of o_groups, {groups}"
    yield from number(values, "hc_eps", zero=True)
    for key in ("swiglu_limit", "routed_scaling_factor"):
        yield from number(values, key)
    kinds = set(values["layer_types"])
    yield from _wrong_rates(values["compress_rates"], sorted(kinds - {WINDOW_ONLY}))
    rotary = values["qk_rope_head_dim"]
    for key in ("head_dim", *(["index_head_dim"] if SPARSE in kinds else [])):
        width = values[key]
        if isinstance(width, int) and (rotary % 2 or not 2 <= rotary <= width):
            yield (
                f"qk_rope_head_dim (head_dim * partial_rotary_factor) is {rotary}, and must be an "
                f"even number from 2 to {key}, {width}"
            )


def _wrong_rates(rates: Mapping[str, Any], kinds: list[str]) -> Iterator[str]:
    for kind in kinds:
        if rates.get(kind) is None:
            yield f"compress_rates has none for {kind}"
        for wrong in whole(rates, kind, most=MOST_RATE):
            yield f"compress_rates: {wrong}"


def low_precision_refusals(config: Any) -> list[str]:
    """Why a model can't be rounded as in DeepSeek's training, if it can't."""
    rotary, width, index = config.qk_rope_head_dim, config.head_dim, config.index_head_dim
    plain, block, index_block = width - rotary, ROUNDINGS["e4m3"], ROUNDINGS["e2m1"]
    found = []
    if plain % block:
        found.append(
            f"head_dim {width} less {rotary} rotary elements leaves {plain}, which are rounded in "
            f"blocks of {block}: it must be a multiple of {block}"
        )
    if index % index_block or index & (index - 1):
        found.append(
            f"index heads of {index} elements are turned by a Hadamard matrix and rounded in "
            f"blocks of {index_block}: index_head_dim must be a power of two from {index_block}"
        )
    return found
