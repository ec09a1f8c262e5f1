"""Makes a model folder of DeepSeek V4's architecture in a middle size, with random weights.

    python benchmarks/make_deepseek_v4.py FOLDER [--layers 8] [--experts 64] [--seed N]

All layer types and both ways of routing; by default 1.9 billion parameters, of which a token meets
a quarter, 4 GB of float16. Its answers mean nothing; its speed and memory are those of a model of
this shape. transformers builds and saves it, so it can be compiled and run by either.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from make_qwen15b import SPECIAL_TOKENS, write_json, write_tokenizer
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

SLIDING = "sliding_attention"
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
HASH_LAYERS = 2
"""The first layers choose experts by a table of token ids."""


def config(layers: int, experts: int) -> DeepseekV4Config:
    """The real model's proportions, about half as wide."""
    kinds = [SLIDING, *((SPARSE, HEAVY)[i % 2] for i in range(layers - 1))]
    sizes: dict[str, Any] = {
        "vocab_size": 32768,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "head_dim": 256,
        "q_lora_rank": 768,
        "partial_rotary_factor": 0.25,
        "n_routed_experts": experts,
        "num_experts_per_tok": 6,
        "o_groups": 8,
        "o_lora_rank": 512,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 256,
    }
    return DeepseekV4Config(
        **sizes,
        layer_types=kinds,
        mlp_layer_types=["hash_moe"] * HASH_LAYERS + ["moe"] * (layers - HASH_LAYERS),
        max_position_embeddings=65536,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        bos_token_id=1,
        eos_token_id=0,
    )


def make(folder: Path, layers: int, experts: int, seed: int) -> int:
    """Writes the model; returns its parameter count."""
    torch.manual_seed(seed)
    shape = config(layers, experts)
    model = DeepseekV4ForCausalLM._from_config(shape, dtype=torch.float16)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            choices = torch.rand(buffer.shape[0], experts).argsort(-1)
            buffer.copy_(choices[:, : buffer.shape[1]])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_tokenizer(folder, shape.max_position_embeddings)
    ends = {"bos_token_id": 1, "eos_token_id": SPECIAL_TOKENS.index("<｜end▁of▁sentence｜>")}
    write_json(folder / "generation_config.json", ends)
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    count = make(given.folder, given.layers, given.experts, given.seed)
    print(f"{given.folder}: {count:,} parameters")


if __name__ == "__main__":
    main()
