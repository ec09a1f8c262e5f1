"""GGUF files of DeepSeek V4: ds4's names and metadata, and what contradicts itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.errors import CheckpointError
from bessemer.importer import import_model, reference_logits
from bessemer.importer.checkpoint import open_checkpoint
from bessemer.importer.checkpoint.gguf_deepseek4 import rotary_part
from tests.importer.cases import difference, eager, run, tokens
from tests.tiny_models import V4_KINDS, tiny

from .builders import tiny_gguf

# Widths of whole q8_0 blocks.
WIDTHS = {
    "hidden_size": 64,
    "q_lora_rank": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
}
# In the order of ds4: our name of a tensor of a layer, and the file's.
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_norm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_proj.weight": "attn_kv.weight",
    "self_attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.o_a_proj.weight": "attn_output_a.weight",
    "self_attn.o_b_proj.weight": "attn_output_b.weight",
    "self_attn.compressor.kv_proj.weight": "attn_compressor_kv.weight",
    "self_attn.compressor.gate_proj.weight": "attn_compressor_gate.weight",
    "self_attn.compressor.position_bias": "attn_compressor_ape.weight",
    "self_attn.compressor.kv_norm.weight": "attn_compressor_norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "indexer.attn_q_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.compressor.indexer.kv_proj.weight": "indexer_compressor_kv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "indexer_compressor_gate.weight",
    "self_attn.compressor.indexer.position_bias": "indexer_compressor_ape.weight",
    "self_attn.compressor.indexer.kv_norm.weight": "indexer_compressor_norm.weight",
    "attn_hc.fn": "hc_attn_fn.weight",
    "attn_hc.base": "hc_attn_base.weight",
    "attn_hc.scale": "hc_attn_scale.weight",
    "ffn_hc.fn": "hc_ffn_fn.weight",
    "ffn_hc.base": "hc_ffn_base.weight",
    "ffn_hc.scale": "hc_ffn_scale.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.hc_head.hc_fn": "output_hc_fn.weight",
    "model.hc_head.hc_base": "output_hc_base.weight",
    "model.hc_head.hc_scale": "output_hc_scale.weight",
}
METADATA: dict[str, Any] = {
    "block_count": 3,
    "context_length": 2048,
    "embedding_length": 64,
    "vocab_size": 97,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 32,
    "expert_weights_scale": 1.7,
    "expert_weights_norm": True,
    "expert_gating_func": 4,
    "hash_layer_count": 1,
    "swiglu_clamp_exp": [1.0, 1.0, 1.0],
    "swiglu_clamp_shexp": [1.0, 1.0, 1.0],
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.q_lora_rank": 32,
    "attention.output_group_count": 2,
    "attention.output_lora_rank": 16,
    "attention.sliding_window": 8,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.compress_ratios": [0, 4, 8, 4],  # of one layer more, as the published file
    "attention.compress_rope_freq_base": 160000.0,
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 16,
    "attention.indexer.top_k": 32,
    "hyper_connection.count": 3,
    "hyper_connection.sinkhorn_iterations": 4,
    "hyper_connection.epsilon": 1e-6,
    "rope.dimension_count": 8,
    "rope.freq_base": 10000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 512,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
Tensors = dict[str, tuple[np.ndarray, str]]


@cache
def model() -> Any:
    return tiny("deepseek_v4", **WIDTHS)[1]


def form_of(values: np.ndarray, name: str, quantised: str) -> str:
    """As in ds4's files: matrices quantised or f16, what is small in f32."""
    if values.ndim == 1 or "_ape" in name:
        return "f32"
    return quantised if "exps" in name or "attn_" in name else "f16"


def tensors(quantised: str = "f32") -> Tensors:
    """The tiny model as ds4 stores it; everything in f32, or as `form_of` says."""
    found: dict[str, np.ndarray] = {}
    for name, value in model().state_dict().items():
        values = value.numpy()
        if name in WHOLE:
            found[WHOLE[name]] = values
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        if rest == "mlp.experts.gate_up_proj":
            gate, up = np.split(values, 2, axis=1)
            found[f"blk.{layer}.ffn_gate_exps.weight"] = gate
            found[f"blk.{layer}.ffn_up_exps.weight"] = up
        else:
            found[f"blk.{layer}.{LAYER[rest]}"] = values
    result: Tensors = {}
    for name, values in found.items():
        if "tid2eid" in name:
            result[name] = (values.astype(np.int32), "i32")
        else:
            form = "f32" if quantised == "f32" else form_of(values, name, quantised)
            result[name] = (np.ascontiguousarray(values), form)
    return result


def write(path: Path, held: Tensors, **metadata: Any) -> Path:
    merged = {**METADATA, **metadata}
    kept = {key: value for key, value in merged.items() if value is not None}
    return tiny_gguf(path / "v4.gguf", held, kept, architecture="deepseek4")


def test_the_model_of_the_file(tmp_path: Path) -> None:
    """In f32 the file is the model that it was made of."""
    held = {
        name.removesuffix(".weight") if "hc_" in name else name: v for name, v in tensors().items()
    }
    with open_checkpoint(write(tmp_path, held)) as checkpoint:
        want = model().config
        for key in ("layer_types", "mlp_layer_types", "compress_rates", "swiglu_limit", "hc_mult"):
            assert checkpoint.config[key] == getattr(want, key), key
        assert checkpoint.config["rope_parameters"]["compress"]["factor"] == 4.0
        assert not checkpoint.is_quantised
        assert checkpoint.info("model.layers.0.mlp.gate.tid2eid").dtype == "i32"
        found = import_model(checkpoint)
        ids = tokens(37)
        assert difference(run(found, ids), eager(model(), ids)) < 1e-5


def test_quantised_tensors(tmp_path: Path) -> None:
    """The graph and transformers on the same decoded weights."""
    with open_checkpoint(write(tmp_path, tensors("q8_0"))) as checkpoint:
        assert checkpoint.is_quantised
        assert checkpoint.info("model.layers.1.mlp.experts.gate_proj").dtype == "q8_0"
        assert checkpoint.info("model.layers.1.mlp.gate.weight").dtype == "f16"
        found = import_model(checkpoint)
        ids = tokens(21)
        got = run(found, ids)
        assert difference(got, reference_logits(found)(ids)) < 1e-5
        assert 1e-4 < difference(got, eager(model(), ids)) < 0.2  # near the model, not it


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.head_count_kv": 2}, "head_count_kv is 2, which contradicts"),
        ({"attention.value_length": 16}, "value_length is 16, which contradicts"),
        ({"expert_gating_func": 2}, "expert_gating_func is 2, which contradicts"),
        ({"expert_weights_norm": False}, "expert_weights_norm is False"),
        ({"expert_shared_count": 2}, "expert_shared_count is 2"),
        ({"vocab_size": 96}, "vocab_size is 96, which contradicts"),
        ({"expert_used_count": 9}, "expert_used_count is 9 of 8 experts"),
        ({"attention.output_group_count": 3}, "4 attention heads do not divide into 3"),
        ({"rope.dimension_count": 34}, "dimension_count is 34, but heads have 32"),
        ({"attention.compress_ratios": [0, 4]}, "has 2 entries for 3 layers"),
        ({"attention.compress_ratios": [0, 8, 16]}, r"the ratios \[0, 8, 16\]"),
        ({"attention.compress_ratios": None}, "compress_ratios is missing"),
        ({"attention.compress_ratios": [8, 4, 8]}, r"blk\.0\.attn_compressor_kv.*missing"),
        ({"attention.compress_ratios": [0, 8, 8]}, r"blk\.1\.attn_compressor_kv.*shape"),
        ({"attention.compress_ratios": [0, 4, 0]}, "holds tensors .* does not have"),
        ({"hash_layer_count": 2}, r"blk\.1\.ffn_gate_tid2eid.*hash_layer_count is 2"),
        ({"hash_layer_count": 0}, r"blk\.0\.ffn_gate_tid2eid.*is there.*hash_layer_count is 0"),
        ({"hash_layer_count": 4}, "hash_layer_count is 4 of 3"),
        ({"swiglu_clamp_exp": [1.0, 2.0, 1.0]}, "must give one positive limit"),
        ({"swiglu_clamp_shexp": [2.0, 2.0, 2.0]}, "must give one positive limit"),
        ({"swiglu_clamp_exp": None, "swiglu_clamp_shexp": None}, "it gives none"),
        ({"rope.scaling.type": "linear"}, "scaling.type is 'linear'"),
        ({"rope.scaling.original_context_length": None}, "original_context_length"),
        ({"attention.compress_rope_freq_base": None}, "compress_rope_freq_base is missing"),
        ({"hyper_connection.count": 4}, r"output_hc_fn.*has the shape \[3, 192\]"),
        ({"attention.sliding_window": None}, "sliding_window is missing"),
        ({"embedding_length": 32}, r"token_embd.*has the shape \[97, 64\]"),
    ],
    ids=str,
)
def test_metadata_that_contradicts(tmp_path: Path, metadata: dict, message: str) -> None:
    path = write(tmp_path, tensors(), **metadata)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "name",
    [
        "blk.1.attn_compressor_kv.weight",
        "blk.2.attn_compressor_ape.weight",
        "blk.1.indexer_compressor_norm.weight",
        "blk.1.indexer.proj.weight",
        "blk.0.ffn_gate_tid2eid.weight",
        "blk.2.exp_probs_b.bias",
        "blk.0.ffn_up_exps.weight",
        "blk.2.hc_ffn_scale.weight",
        "output_hc_base.weight",
        "output.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    held = tensors()
    del held[name]
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + ".*missing"):
        open_checkpoint(write(tmp_path, held))


def test_the_rotary_part_survives_transformers() -> None:
    pairs = [(rotary, head) for head in range(2, 300) for rotary in range(2, head + 1, 2)]
    assert all(int(head * rotary_part(rotary, head)) == rotary for rotary, head in pairs)
    assert rotary_part(64, 512) == 0.125


def test_layers_for_speculation_are_refused(tmp_path: Path) -> None:
    extra = {"blk.3.nextn.enorm.weight": (np.ones(64, np.float32), "f32")}
    with pytest.raises(CheckpointError, match="nextn"):
        open_checkpoint(write(tmp_path, {**tensors(), **extra}, nextn_predict_layers=1))


def test_a_file_without_scaling_is_the_published_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent = dict.fromkeys((k for k in METADATA if k.startswith("rope.scaling")), None)
    with open_checkpoint(write(tmp_path, tensors(), **silent)) as checkpoint:
        compress = checkpoint.config["rope_parameters"]["compress"]
    assert (compress["rope_type"], compress["factor"]) == ("yarn", 16.0)
    assert compress["original_max_position_embeddings"] == 65536
    assert "published model's YaRN" in caplog.text
    plain = {**silent, "rope.scaling.type": "none"}
    with open_checkpoint(write(tmp_path, tensors(), **plain)) as checkpoint:
        assert checkpoint.config["rope_parameters"]["compress"]["rope_type"] == "default"


def test_a_table_that_names_no_expert_is_refused(tmp_path: Path) -> None:
    held = tensors()
    table = held["blk.0.ffn_gate_tid2eid.weight"][0].copy()
    table[3, 1] = 8
    held["blk.0.ffn_gate_tid2eid.weight"] = (table, "i32")
    one = {"block_count": 1, "attention.compress_ratios": [0, 4, 8]}
    first = {k: v for k, v in held.items() if not k.startswith(("blk.1.", "blk.2."))}
    assert V4_KINDS[0] == "sliding_attention"
    with (
        open_checkpoint(write(tmp_path, first, **one)) as checkpoint,
        pytest.raises(CheckpointError, match="tid2eid holds 1 numbers"),
    ):
        import_model(checkpoint)
