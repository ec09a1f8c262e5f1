"""Reductions, softmax, scans and selections. Axes are counted from the end (-1 is the last)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bessemer.graph.core import TensorType
from bessemer.graph.dtypes import DType
from bessemer.graph.schema import REQUIRED, GraphError, OpSchema, register


def negative_axis(axis: int, rank: int) -> int:
    """`axis` counted from the end, so that leading dimensions may come and go. GraphError."""
    if not -rank <= axis < rank:
        raise GraphError(f"axis {axis} of a value of rank {rank}")
    return axis - rank if axis >= 0 else axis


def check_axis(axis: int, rank: int) -> None:
    if not -rank <= axis < 0:
        raise GraphError(f"axis {axis} must be in [-{rank}, -1]")


def _reduced(dtype: DType | None) -> Callable[..., TensorType]:
    def infer(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
        (x,) = types
        for axis in attrs["axes"]:
            check_axis(axis, x.rank)
        axes = {a + x.rank for a in attrs["axes"]}
        keep = attrs["keepdims"]
        shape = tuple(1 if i in axes else s for i, s in enumerate(x.shape) if keep or i not in axes)
        return TensorType(dtype or x.dtype, shape)

    return infer


def _reduce(fn: Callable[..., Any]) -> Callable[..., np.ndarray]:
    def reference(x: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
        result = fn(x, axis=tuple(attrs["axes"]), keepdims=attrs["keepdims"])
        return np.asarray(result, dtype=x.dtype)

    return reference


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reduce_sum": np.sum,
    "reduce_mean": np.mean,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_prod": np.prod,
}
for _name, _fn in _REDUCTIONS.items():
    register(
        OpSchema(_name, (1, 1), {"axes": REQUIRED, "keepdims": False}, _reduced(None), _reduce(_fn))
    )


def _one_axis(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    check_axis(attrs["axis"], types[0].rank)
    return types[0]


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """Softmax; a row that is all -inf gives zeros, not NaN."""
    top = np.max(x, axis=axis, keepdims=True)
    e = np.exp(x - np.where(np.isneginf(top), 0, top))
    total = np.sum(e, axis=axis, keepdims=True)
    return (e / np.where(total == 0, 1, total)).astype(x.dtype)


def topk(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k largest of the last axis, largest first; on ties the lower index comes first."""
    order = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(x, order, -1), order.astype(np.int64)


def _topk_types(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> list[TensorType]:
    (x,) = types
    size = x.shape[-1]
    if isinstance(size, int) and not 0 < attrs["k"] <= size:
        raise GraphError(f"topk of {attrs['k']} out of {size}")
    shape = (*x.shape[:-1], attrs["k"])
    return [TensorType(x.dtype, shape), TensorType(DType.I64, shape)]


register(
    OpSchema(
        "softmax",
        (1, 1),
        {"axis": -1},
        _one_axis,
        lambda x, attrs: softmax(x, attrs["axis"]),
    )
)
register(
    OpSchema(
        "cumsum",
        (1, 1),
        {"axis": -1},
        _one_axis,
        lambda x, attrs: np.cumsum(x, axis=attrs["axis"], dtype=x.dtype),
    )
)
register(
    OpSchema(
        "argmax",
        (1, 1),
        {"axes": REQUIRED, "keepdims": False},
        _reduced(DType.I64),
        lambda x, attrs: np.argmax(x, axis=attrs["axes"][0], keepdims=attrs["keepdims"]),
        doc="Index of the maximum over one axis; the lowest on ties.",
    )
)
register(
    OpSchema(
        "topk",
        (1, 1),
        {"k": REQUIRED},
        _topk_types,
        lambda x, attrs: topk(x, attrs["k"]),
        doc="Values and i64 indices of the k largest of the last axis, sorted.",
    )
)
