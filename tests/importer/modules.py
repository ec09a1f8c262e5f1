"""Small modules from elsewhere: token ids and positions in, logits out."""

from __future__ import annotations

import torch
from torch.nn import functional as F

VOCAB, HIDDEN, HEADS, WIDTH, CONTEXT = 29, 24, 3, 8, 16


class Block(torch.nn.Module):
    """Attention by a plain causal SDPA, then a small MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, HIDDEN)
        self.up = torch.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = torch.nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (HEADS, WIDTH)).transpose(-3, -2) for p in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(-3, -2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Plain(torch.nn.Module):
    """Learned positions; works on [1, T] and on [T]."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, HIDDEN)
        self.places = torch.nn.Embedding(CONTEXT, HIDDEN)
        self.model = torch.nn.ModuleList(Block() for _ in range(layers))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(positions)
        for block in self.model:
            x = block(x)
        return F.linear(x, self.tokens.weight)


class RankOne(Plain):
    """Takes [T] only."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        (length,) = ids.shape
        return super().forward(ids, positions).view(length, VOCAB)


class OwnCache(torch.nn.Module):
    """Keeps keys and values in buffers of its own, masks by position, writes as `style` says."""

    def __init__(self, style: str = "index") -> None:
        super().__init__()
        self.style = style
        self.tokens = torch.nn.Embedding(VOCAB, HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.places = torch.nn.Embedding(CONTEXT, HIDDEN)
        layers = (2,) if style == "stacked" else ()
        shape = (*layers, 1, HEADS, CONTEXT, WIDTH)
        self.register_buffer("k", torch.zeros(shape), persistent=False)
        self.register_buffer("v", torch.zeros(shape))
        self.register_buffer("seen", torch.zeros(CONTEXT, dtype=torch.long))

    def store(self, cache: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        if self.style == "index":
            cache[:, :, at] = rows
            return cache
        if self.style == "copy":
            return cache.index_copy_(2, at, rows)
        cache[1, 0, :, at] = rows[0]
        return cache[1]

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(positions)
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for p in parts)
        at = positions[0]
        keys, values = self.store(self.k, k, at), self.store(self.v, v, at)
        self.seen[at] = ids[0] + 1
        hidden = (torch.arange(CONTEXT) > at[:, None]) | (self.seen == 0)
        scores = q @ keys.transpose(-1, -2) * WIDTH**-0.5
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        x = x + (weights @ values).transpose(1, 2).flatten(-2)
        return F.linear(x, self.tokens.weight)


def seeded(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """The module with random parameters of a useful size, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            width = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * width * 2)
    return module.eval().requires_grad_(False)
