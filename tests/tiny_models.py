"""Tiny random models of every supported architecture, with configs that bite.

Leaving out any attribute (window, soft cap, sink, q/k norm, scaling, bias, router bias) changes
their logits: q and k are large, so attention is peaked; soft caps are near the scores; norm
weights are far from one; no bias is zero; windows are shorter than the prompts of the tests.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from tests.sharing import share_captures

share_captures()

VOCAB = 97
WINDOW = 5  # tests use prompts longer than this

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]
_HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_DEEPSEEK: dict[str, Any] = {
    "head_dim": 8,  # of the rotary part: transformers' rope table reads it
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.7 * i for i in range(8)],
    "original_max_position_embeddings": 10,
}

V4_KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
DEEPSEEK_V4: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "intermediate_size": 24,  # of the experts: the config knows this name too
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "swiglu_limit": 1.0,
    "sliding_window": 8,
    "layer_types": V4_KINDS,
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {V4_KINDS[1]: 4, V4_KINDS[2]: 8},
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 32,  # all rows of the tests: equal scores change nothing
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}

# model type -> what differs from the base
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _LOCAL_GLOBAL},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "sliding_window": WINDOW,
        "layer_types": _LOCAL_GLOBAL,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 1.0,
        "query_pre_attn_scalar": 23,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": _LOCAL_GLOBAL,
        "query_pre_attn_scalar": 23,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "phi": {
        "rope_parameters": _HALF,
        "hidden_size": 64,  # the head width is hidden / heads
        "qk_layernorm": True,
    },
    "phi3": {
        "rope_parameters": {**_HALF, "partial_rotary_factor": 1.0},
        "hidden_size": 64,  # its config check takes hidden / heads for the head width
        "sliding_window": WINDOW,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.11,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "olmo2": {},
    "starcoder2": {"use_bias": True, "sliding_window": WINDOW, "tie_word_embeddings": True},
    "gpt_neox": {
        "rope_parameters": {**_HALF, "partial_rotary_factor": 0.25},
        "hidden_size": 64,
    },
    "cohere2": {
        "sliding_window": WINDOW,
        "layer_types": _LOCAL_GLOBAL,
        "logit_scale": 0.4,
        "tie_word_embeddings": True,
    },
    "stablelm": {
        "rope_parameters": {**_HALF, "partial_rotary_factor": 0.25},
        "hidden_size": 64,
        "use_qkv_bias": True,
        "qk_layernorm": True,
    },
    "smollm3": {
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": _LOCAL_GLOBAL,
        "tie_word_embeddings": True,
    },
    "glm4": {"rope_parameters": _HALF, "attention_bias": True},
    "mixtral": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
    },
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "deepseek_v3": {
        **_DEEPSEEK,
        "norm_topk_prob": True,
        "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "deepseek_v4": DEEPSEEK_V4,
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": _LOCAL_GLOBAL,
        "rope_parameters": {**YARN_ROPE, "truncate": False},
    },
}
ARCHITECTURES = list(CONFIGS)


def tiny_config(model_type: str, **over: Any) -> PreTrainedConfig:
    """The tiny config of an architecture; `over` replaces entries."""
    return AutoConfig.for_model(model_type, **{**_BASE, **CONFIGS[model_type], **over})


def _spread(name: str, tensor: torch.Tensor, plus_one: bool) -> torch.Tensor:
    """Random values of a size that suits the parameter's part in the model."""
    draw = torch.randn(tensor.shape)
    if name.endswith("tid2eid"):  # numbers of experts, by token id
        return torch.randint(0, DEEPSEEK_V4["n_routed_experts"], tensor.shape)
    if "norm" in name and name.endswith("weight"):
        return draw * 0.4 + (0.0 if plus_one else 1.0)
    if tensor.dim() == 1 or name.endswith("bias"):
        return draw * 0.3
    scale = tensor.shape[-1] ** -0.5
    if any(
        part in name for part in ("q_proj", "k_proj", "q_b_proj", "qkv_proj", "query_key_value")
    ):
        return draw * scale * 2.5
    if "router" in name or name.endswith("gate.weight"):
        return draw * scale * 3
    if "embed" in name:
        return draw
    return draw * scale


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill every parameter and persistent buffer from a seed."""
    config = getattr(model, "config", None)
    plus_one = getattr(config, "model_type", "").startswith("gemma")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, tensor in model.state_dict().items():
            tensor.copy_(_spread(name, tensor, plus_one))


def tiny(
    model_type: str, *, seed: int = 0, **over: Any
) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """A tiny random model in eval mode, float32, eager attention: `(config, model)`."""
    config = tiny_config(model_type, **over)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(torch.float32).eval().requires_grad_(False)
    randomise(model, seed)
    return config, model
