"""Names of DeepSeek V4's tensors in files: those of the published checkpoints.

transformers renames them when it loads a folder, and nearly back when it saves one.
"""

from __future__ import annotations

import re

_WHOLE = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
# In this order: a later pattern sees what the earlier ones left.
_PARTS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^model\.hc_head\.hc_", "hc_head_"),
        (r"^model\.layers\.", "layers."),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.gate.bias"),
        (r"\.mlp\.", ".ffn."),
        (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.position_bias$", ".ape"),
        (r"\.sinks$", ".attn_sink"),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.gate_proj\.", ".wgate."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.self_attn\.", ".attn."),
    )
)


def file_names(name: str) -> list[str]:
    """What a parameter (or the start of its name) may be called in files: as published, and as
    transformers saves it, which keeps the prefix and gives the norm of k = v a shorter name.
    """
    published = _WHOLE.get(name)
    if published is None:
        published = name
        for pattern, new in _PARTS:
            published = pattern.sub(new, published)
    saved = published.replace(".attn.kv_norm.", ".attn.norm.")
    return [published, f"model.{saved}"]
