"""Hyper-connections: a residual of several streams, collapsed before a sublayer and mixed after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bessemer.graph.core import TensorType
from bessemer.graph.schema import REQUIRED, GraphError, OpSchema, register


def sinkhorn(x: np.ndarray, iterations: int, eps: float) -> np.ndarray:
    """Columns, then alternately rows and columns divided by their sums (plus eps)."""
    small = np.float32(eps)
    x = x / (x.sum(-2, keepdims=True) + small)
    for _ in range(iterations - 1):
        x = x / (x.sum(-1, keepdims=True) + small)
        x = x / (x.sum(-2, keepdims=True) + small)
    return x


def _sinkhorn_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    if x.rank < 2 or x.shape[-1] != x.shape[-2] or attrs["iterations"] < 1:
        raise GraphError(f"sinkhorn({x}) needs square matrices and at least one iteration")
    return x


def _collapse_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    x, pre = types
    if x.rank < 2 or pre.shape != x.shape[:-1] or pre.dtype != x.dtype:
        raise GraphError(f"collapse_streams({x}, {pre}): x[..., N, D] with weights [..., N]")
    return TensorType(x.dtype, (*x.shape[:-2], x.shape[-1]))


def _mix_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    x, y, post, comb = types
    if x.rank < 2 or y.shape != (*x.shape[:-2], x.shape[-1]) or post.shape != x.shape[:-1]:
        raise GraphError(f"mix_streams({x}, {y}, {post}, {comb}): x[..., N, D], y[..., D]")
    if comb.shape != (*post.shape, post.shape[-1]):
        raise GraphError(f"mix_streams({x}, {y}, {post}, {comb}): comb is [..., N, N]")
    return x


def _mix(
    x: np.ndarray, y: np.ndarray, post: np.ndarray, comb: np.ndarray, attrs: Mapping[str, Any]
) -> np.ndarray:
    return post[..., None] * y[..., None, :] + np.matmul(np.swapaxes(comb, -1, -2), x)


register(
    OpSchema(
        "sinkhorn",
        (1, 1),
        {"iterations": REQUIRED, "eps": REQUIRED},
        _sinkhorn_type,
        lambda x, attrs: sinkhorn(x, attrs["iterations"], attrs["eps"]),
        doc="x[..., N, N] of positive numbers, brought near a doubly stochastic matrix: x / "
        "(column sums + eps), then iterations - 1 times rows and columns.",
    )
)
register(
    OpSchema(
        "collapse_streams",
        (2, 2),
        {},
        _collapse_type,
        lambda x, pre, attrs: np.sum(pre[..., None] * x, axis=-2, dtype=x.dtype),
        doc="sum over n of pre[..., n] * x[..., n, :]; x[..., N, D], pre[..., N] -> [..., D].",
    )
)
register(
    OpSchema(
        "mix_streams",
        (4, 4),
        {},
        _mix_type,
        _mix,
        doc="out[..., n, :] = post[..., n] * y + sum over j of comb[..., j, n] * x[..., j, :]; "
        "x[..., N, D], y[..., D], post[..., N], comb[..., N, N].",
    )
)
