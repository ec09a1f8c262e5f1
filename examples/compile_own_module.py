"""A module of one's own, compiled: token ids and positions in, logits out.

    python examples/compile_own_module.py [FOLDER]

Attention is a plain causal `scaled_dot_product_attention`. The compiled model has a KV cache for
it, which the module doesn't know of: the positions tell where the tokens belong.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import bessemer

VOCAB, WIDTH, HEADS, CONTEXT = 61, 48, 4, 64


class Block(torch.nn.Module):
    """Pre-norm attention and a GELU MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(-3, -2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class TinyGPT(torch.nn.Module):
    """Three blocks with learned positions; ids and positions are [1, T], logits [1, T, VOCAB]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, WIDTH)
        self.places = torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(folder: str | Path) -> None:
    torch.manual_seed(0)
    module = TinyGPT().eval()
    bessemer.compile(module, weights="f32", kv="f32", output=folder)

    # From here on neither torch nor the module is needed.
    model = bessemer.load(folder)
    print(f"{model.name}: context {model.context_length}, vocabulary {model.vocab_size}")
    session = model.session()
    ids = [3, 14, 15, 9, 26, 5]
    logits = session.prefill(ids)
    for _ in range(10):
        ids.append(int(logits.argmax()))
        logits = session.decode(ids[-1])
    print("greedy:", ids)

    with torch.no_grad():
        positions = torch.arange(len(ids))[None]
        expected = module(torch.tensor([ids]), positions)[0, -1].numpy()
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    print(f"relative L2 error of the last logits against PyTorch below 1e-5: {error < 1e-5}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name) / "tiny-gpt")
