"""Manifold-constrained hyper-connections: a residual of several streams around every sublayer.

Before a sublayer the streams are collapsed into one; after it they are mixed among each other and
its output is added to each. The weights of all three come from the streams themselves; the mixing
matrix is brought near a doubly stochastic one by Sinkhorn's iteration. (Xie et al., 2026.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bessemer.importer import definition_ops  # noqa: F401  (the ops)


def rms_normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class HyperConnection(nn.Module):
    """Weights of one sublayer's connection, and the collapsed input of the sublayer.

    fn[(2 + N) * N, N * D]: rows for collapsing (N), expanding (N) and mixing (N * N).
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        n = self.streams = config.hc_mult
        self.iterations, self.eps = config.hc_sinkhorn_iters, config.hc_eps
        self.norm_eps = config.rms_norm_eps
        self.fn = nn.Parameter(torch.empty((2 + n) * n, n * config.hidden_size))
        self.base = nn.Parameter(torch.empty((2 + n) * n))
        self.scale = nn.Parameter(torch.empty(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x[B, T, N, D] -> post[B, T, N], comb[B, T, N, N], collapsed[B, T, D]."""
        n = self.streams
        scales = [self.scale[i : i + 1].expand(size) for i, size in enumerate((n, n, n * n))]
        weights = nn.functional.linear(rms_normalised(x.flatten(2), self.norm_eps), self.fn)
        weights = weights * torch.cat(scales) + self.base
        pre, post, comb = weights.split([n, n, n * n], -1)
        pre = pre.sigmoid() + self.eps
        post = post.sigmoid() * 2
        comb = comb.unflatten(-1, (n, n)).softmax(-1) + self.eps
        comb = torch.ops.bessemer.sinkhorn(comb, self.iterations, self.eps)
        return post, comb, torch.ops.bessemer.collapse_streams(x, pre)


def mixed(x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The streams after a sublayer with output y[B, T, D]: x[B, T, N, D] mixed by comb, plus y."""
    return torch.ops.bessemer.mix_streams(x, y, post, comb)


class HyperHead(nn.Module):
    """The last collapse of the streams, before the final norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        n = config.hc_mult
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        self.hc_fn = nn.Parameter(torch.empty(n, n * config.hidden_size))
        self.hc_base = nn.Parameter(torch.empty(n))
        self.hc_scale = nn.Parameter(torch.empty(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x[B, T, N, D] -> [B, T, D]."""
        weights = nn.functional.linear(rms_normalised(x.flatten(2), self.norm_eps), self.hc_fn)
        pre = (weights * self.hc_scale + self.hc_base).sigmoid() + self.eps
        return torch.ops.bessemer.collapse_streams(x, pre)
