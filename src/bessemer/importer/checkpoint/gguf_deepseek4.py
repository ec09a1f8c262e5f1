"""DeepSeek V4 in GGUF files, as the ds4 engine and llama.cpp read it: architecture ``deepseek4``.

The kind of a layer follows from its compression ratio: 0 attends to its window alone, 4 is sparse
with overlapping blocks and an indexer, another one (128 in the published models) is heavy.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.importer.checkpoint.gguf_rules import GLOBAL_RULES, NORMS, Architecture, TensorRule

if TYPE_CHECKING:
    from bessemer.importer.checkpoint.gguf_architectures import ArchitectureReader

log = logging.getLogger(__name__)

NAME = "deepseek4"
WINDOW_ONLY = "sliding_attention"
SPARSE = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"
SPARSE_RATIO = 4
DEFAULT_HEAVY_RATIO = 128
SQRT_SOFTPLUS = 4
"""The value of expert_gating_func for scores sqrt(softplus(x))."""

PUBLISHED_YARN = {
    "factor": 16.0,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
"""What files of the published models mean when they say nothing about the rotary scaling of
compressed layers; some writers leave it out."""


def _rule(source: str, target: str, *dims: str, required: bool = True) -> TensorRule:
    """Some writers end the names of all tensors in ``.weight``, some only those of layers."""
    plain = source.removesuffix(".weight")
    other = plain if source.endswith(".weight") else f"{plain}.weight"
    return TensorRule(source, target, dims, required, other_sources=(other,))


def _hyper_connection(source: str, target: str) -> tuple[TensorRule, ...]:
    return (
        _rule(f"{source}_fn.weight", f"{target}.fn", "mixes", "streams_hidden"),
        _rule(f"{source}_base.weight", f"{target}.base", "mixes"),
        _rule(f"{source}_scale.weight", f"{target}.scale", "three"),
    )


def _compressor(source: str, target: str, kind: str) -> tuple[TensorRule, ...]:
    """kind: names the dimensions of a stream, ``{kind}_width`` and ``{kind}_row``."""
    return (
        _rule(f"{source}_kv.weight", f"{target}.kv_proj.weight", f"{kind}_width", "hidden"),
        _rule(f"{source}_gate.weight", f"{target}.gate_proj.weight", f"{kind}_width", "hidden"),
        _rule(f"{source}_ape.weight", f"{target}.position_bias", f"{kind}_rate", f"{kind}_width"),
        _rule(f"{source}_norm.weight", f"{target}.kv_norm.weight", f"{kind}_row"),
    )


LAYER_RULES = (
    *NORMS,
    _rule("attn_sinks.weight", "self_attn.sinks", "heads"),
    _rule("attn_q_a.weight", "self_attn.q_a_proj.weight", "q_rank", "hidden"),
    _rule("attn_q_a_norm.weight", "self_attn.q_a_norm.weight", "q_rank"),
    _rule("attn_q_b.weight", "self_attn.q_b_proj.weight", "q", "q_rank"),
    _rule("attn_kv.weight", "self_attn.kv_proj.weight", "head", "hidden"),
    _rule("attn_kv_a_norm.weight", "self_attn.kv_norm.weight", "head"),
    _rule("attn_output_a.weight", "self_attn.o_a_proj.weight", "o_ranks", "group"),
    _rule("attn_output_b.weight", "self_attn.o_b_proj.weight", "hidden", "o_ranks"),
    *_hyper_connection("hc_attn", "attn_hc"),
    *_hyper_connection("hc_ffn", "ffn_hc"),
    _rule("ffn_gate_inp.weight", "mlp.gate.weight", "experts", "hidden"),
    _rule("ffn_gate_exps.weight", "mlp.experts.gate_proj", "experts", "ffn", "hidden"),
    _rule("ffn_up_exps.weight", "mlp.experts.up_proj", "experts", "ffn", "hidden"),
    _rule("ffn_down_exps.weight", "mlp.experts.down_proj", "experts", "hidden", "ffn"),
    _rule("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight", "ffn", "hidden"),
    _rule("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight", "ffn", "hidden"),
    _rule("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight", "hidden", "ffn"),
)
COMPRESSOR = "self_attn.compressor"
INDEXER = f"{COMPRESSOR}.indexer"
SPARSE_RULES = (
    *_compressor("attn_compressor", COMPRESSOR, "sparse"),
    *_compressor("indexer_compressor", INDEXER, "index"),
    _rule("indexer.attn_q_b.weight", f"{INDEXER}.q_b_proj.weight", "index_q", "q_rank"),
    _rule("indexer.proj.weight", f"{INDEXER}.scorer.weights_proj.weight", "index_heads", "hidden"),
)
HEAVY_RULES = _compressor("attn_compressor", COMPRESSOR, "heavy")
HASH_RULES = (_rule("ffn_gate_tid2eid.weight", "mlp.gate.tid2eid", "vocab", "chosen"),)
LEARNED_RULES = (
    TensorRule(
        "exp_probs_b.bias",
        "mlp.gate.e_score_correction_bias",
        ("experts",),
        other_sources=("exp_probs_b", "ffn_exp_probs_b.bias", "ffn_exp_probs_b"),
    ),
)


def _more_rules(config: dict[str, Any], layer: int) -> tuple[TensorRule, ...]:
    by_kind: dict[str, tuple[TensorRule, ...]] = {SPARSE: SPARSE_RULES, HEAVY: HEAVY_RULES}
    attention = by_kind.get(config["layer_types"][layer], ())
    hashed = config["mlp_layer_types"][layer] == "hash_moe"
    return (*attention, *(HASH_RULES if hashed else LEARNED_RULES))


def _more_dimensions(config: dict[str, Any]) -> dict[str, int]:
    head, index = config["head_dim"], config["index_head_dim"]
    streams, rates = config["hc_mult"], config["compress_rates"]
    heads, groups = config["num_attention_heads"], config["o_groups"]
    return {
        "ffn": config["moe_intermediate_size"],
        "heads": heads,
        "experts": config["n_routed_experts"],
        "chosen": config["num_experts_per_tok"],
        "q_rank": config["q_lora_rank"],
        "o_ranks": groups * config["o_lora_rank"],
        "group": heads * head // groups,
        "streams": streams,
        "streams_hidden": streams * config["hidden_size"],
        "mixes": (2 + streams) * streams,
        "one": 1,
        "three": 3,
        "index_heads": config["index_n_heads"],
        "index_q": config["index_n_heads"] * index,
        "index_row": index,
        "index_width": 2 * index,
        "index_rate": rates[SPARSE],
        "sparse_row": head,
        "sparse_width": 2 * head,
        "sparse_rate": rates[SPARSE],
        "heavy_row": head,
        "heavy_width": head,
        "heavy_rate": rates[HEAVY],
    }


# --- metadata ------------------------------------------------------------------------------------


def _expect(reader: ArchitectureReader, key: str, held: Any, wanted: Any) -> None:
    """Raises CheckpointError unless a key, where the file has it, agrees with the rest."""
    if held is not None and held != wanted:
        reader.fail(f"{NAME}.{key} is {held}, which contradicts the architecture: {wanted}")


def _number(reader: ArchitectureReader, key: str) -> float:
    value = reader.metadata.number(f"{NAME}.{key}")
    if value is None or value <= 0:
        reader.fail(f"the key {NAME}.{key} is missing or not positive")
    return value


def _ratios(reader: ArchitectureReader, layers: int) -> list[int]:
    """The compression ratio of each layer; files may list those of further layers too."""
    key = f"{NAME}.attention.compress_ratios"
    values = reader.metadata.array(key)
    if values is None:
        reader.fail(f"the key {key} is missing")
    if len(values) < layers or not np.issubdtype(values.dtype, np.integer):
        reader.fail(f"{key} has {len(values)} entries for {layers} layers")
    ratios = [int(v) for v in values[:layers]]
    heavy = sorted({r for r in ratios if r not in (0, SPARSE_RATIO)})
    if len(heavy) > 1 or any(r < 0 for r in ratios):
        reader.fail(
            f"{key} has the ratios {sorted(set(ratios))}; known are 0, {SPARSE_RATIO} and one other"
        )
    return ratios


def _swiglu_limit(reader: ArchitectureReader, layers: int) -> float:
    """The one limit of all layers, which files repeat for each, and for the shared expert."""
    found: set[float] = set()
    for key in (f"{NAME}.swiglu_clamp_exp", f"{NAME}.swiglu_clamp_shexp"):
        value = reader.metadata.values.get(key)
        if isinstance(value, np.ndarray):
            if len(value) < layers:
                reader.fail(f"{key} has {len(value)} entries for {layers} layers")
            found.update(float(v) for v in value[:layers])
        elif value is not None:
            found.add(_number(reader, key.removeprefix(f"{NAME}.")))
    if len(found) != 1 or not all(math.isfinite(v) and v > 0 for v in found):
        reader.fail(
            f"the key {NAME}.swiglu_clamp_exp must give one positive limit for all experts, "
            f"it gives {sorted(found) or 'none'}"
        )
    return float(str(np.float32(found.pop())))


def _hashed_layers(reader: ArchitectureReader, layers: int) -> int:
    """How many of the first layers route by a table; the tensors must say the same."""
    names = ("ffn_gate_tid2eid.weight", "ffn_gate_tid2eid")
    held = [any(f"blk.{i}.{n}" in reader.tensors for n in names) for i in range(layers)]
    stated = reader.metadata.integer(f"{NAME}.hash_layer_count", sum(held))
    assert stated is not None
    if stated > layers:
        reader.fail(f"{NAME}.hash_layer_count is {stated} of {layers} layers")
    if held != [i < stated for i in range(layers)]:
        wrong = next(i for i in range(layers) if held[i] != (i < stated))
        what = "is there" if held[wrong] else "is missing"
        reader.fail(f"{what}, while {NAME}.hash_layer_count is {stated}", f"blk.{wrong}.{names[0]}")
    return stated


def _rope_parameters(reader: ArchitectureReader, part: float) -> dict[str, Any]:
    """Plain frequencies for window layers; another base and YaRN for compressed ones."""
    metadata, prefix = reader.metadata, f"{NAME}.rope.scaling"
    main = {"rope_type": "default", "rope_theta": _number(reader, "rope.freq_base")}
    compress: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": _number(reader, "attention.compress_rope_freq_base"),
    }
    kind = metadata.string(f"{prefix}.type") or (
        "yarn" if metadata.has(f"{prefix}.factor") else None
    )
    if kind not in (None, "none", "yarn"):
        reader.fail(f"{prefix}.type is '{kind}', which is not supported")
    if kind != "none":
        yarn: dict[str, Any] = dict(PUBLISHED_YARN)
        if kind is None:
            log.warning("%s: no %s.type; taking the published model's YaRN", reader.path, prefix)
        else:
            original = metadata.integer(f"{prefix}.original_context_length")
            if not original:
                reader.fail(f"RoPE scaling without {prefix}.original_context_length")
            yarn["factor"] = _number(reader, "rope.scaling.factor")
            yarn["original_max_position_embeddings"] = original
            for name in ("beta_fast", "beta_slow"):
                value = metadata.number(f"{prefix}.yarn_{name}")
                yarn[name] = yarn[name] if value is None else value
        if yarn["factor"] > 1:
            compress.update(yarn, rope_type="yarn", attention_factor=1.0)
    return {
        "main": {**main, "partial_rotary_factor": part},
        "compress": {**compress, "partial_rotary_factor": part},
    }


def rotary_part(rotary: int, head: int) -> float:
    """The `partial_rotary_factor` of which transformers makes `rotary` again: it cuts the product
    with the head's width to a whole number."""
    part = rotary / head
    return part if int(head * part) == rotary else math.nextafter(part, 1.0)


def _check_agreement(reader: ArchitectureReader, head: int) -> None:
    """Keys that can only have one value here."""
    metadata = reader.metadata
    for key, wanted in (("attention.head_count_kv", 1), ("expert_shared_count", 1)):
        _expect(reader, key, metadata.uniform_integer(f"{NAME}.{key}"), wanted)
    for key, wanted in (
        ("attention.value_length", head),
        ("expert_gating_func", SQRT_SOFTPLUS),
        ("vocab_size", reader.vocab_size()),
    ):
        _expect(reader, key, metadata.integer(f"{NAME}.{key}"), wanted)
    _expect(reader, "expert_weights_norm", metadata.boolean(f"{NAME}.expert_weights_norm"), True)


def _configure(reader: ArchitectureReader) -> dict[str, Any]:
    layers, heads = reader.positive("block_count"), reader.positive("attention.head_count")
    head, rotary = reader.positive("attention.key_length"), reader.positive("rope.dimension_count")
    groups = reader.positive("attention.output_group_count")
    experts, chosen = reader.positive("expert_count"), reader.positive("expert_used_count")
    _check_agreement(reader, head)
    if rotary > head or rotary % 2:
        reader.fail(f"{NAME}.rope.dimension_count is {rotary}, but heads have {head} channels")
    if heads % groups:
        reader.fail(f"{heads} attention heads do not divide into {groups} output groups")
    if chosen > experts:
        reader.fail(f"{NAME}.expert_used_count is {chosen} of {experts} experts")
    ratios, hashed = _ratios(reader, layers), _hashed_layers(reader, layers)
    heavy = next((r for r in ratios if r not in (0, SPARSE_RATIO)), DEFAULT_HEAVY_RATIO)
    kinds = {0: WINDOW_ONLY, SPARSE_RATIO: SPARSE}
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": reader.vocab_size(),
        "hidden_size": reader.positive("embedding_length"),
        "moe_intermediate_size": reader.positive("expert_feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": head,
        "q_lora_rank": reader.positive("attention.q_lora_rank"),
        "o_groups": groups,
        "o_lora_rank": reader.positive("attention.output_lora_rank"),
        "n_routed_experts": experts,
        "num_experts_per_tok": chosen,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": _number(reader, "expert_weights_scale"),
        "swiglu_limit": _swiglu_limit(reader, layers),
        "hidden_act": "silu",
        "max_position_embeddings": reader.positive("context_length"),
        "rms_norm_eps": _number(reader, "attention.layer_norm_rms_epsilon"),
        "sliding_window": reader.positive("attention.sliding_window"),
        "layer_types": [kinds.get(ratio, HEAVY) for ratio in ratios],
        "compress_rates": {SPARSE: SPARSE_RATIO, HEAVY: heavy},
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (layers - hashed),
        "index_n_heads": reader.positive("attention.indexer.head_count"),
        "index_head_dim": reader.positive("attention.indexer.key_length"),
        "index_topk": reader.positive("attention.indexer.top_k"),
        "hc_mult": reader.positive("hyper_connection.count"),
        "hc_sinkhorn_iters": reader.positive("hyper_connection.sinkhorn_iterations"),
        "hc_eps": _number(reader, "hyper_connection.epsilon"),
        "partial_rotary_factor": rotary_part(rotary, head),
        "rope_theta": _number(reader, "rope.freq_base"),
        "compress_rope_theta": _number(reader, "attention.compress_rope_freq_base"),
        "rope_parameters": _rope_parameters(reader, rotary_part(rotary, head)),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **reader.token_ids(),
    }


DEEPSEEK4 = Architecture(
    NAME,
    "deepseek_v4",
    "DeepseekV4ForCausalLM",
    LAYER_RULES,
    configure=_configure,
    # Layers for speculative decoding may be announced; their tensors are refused.
    understood=frozenset({"expert_count", "nextn_predict_layers"}),
    more_rules=_more_rules,
    more_dimensions=_more_dimensions,
    global_rules=(
        *GLOBAL_RULES[:-1],
        _rule("output.weight", "lm_head.weight", "vocab", "hidden"),
        _rule("output_hc_fn.weight", "model.hc_head.hc_fn", "streams", "streams_hidden"),
        _rule("output_hc_base.weight", "model.hc_head.hc_base", "streams"),
        _rule("output_hc_scale.weight", "model.hc_head.hc_scale", "one"),
    ),
)
