"""Matrix products and embedding look-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bessemer.graph.core import TensorType
from bessemer.graph.ops.elementwise import broadcast
from bessemer.graph.schema import GraphError, OpSchema, register


def _matmul_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    a, b = types
    if a.rank < 2 or b.rank < 2 or a.dtype != b.dtype:
        raise GraphError(f"matmul({a}, {b}) needs matrices of one type")
    k, n = b.shape[-2:] if not attrs["transpose_b"] else b.shape[:-3:-1]
    if a.shape[-1] != k:
        raise GraphError(f"matmul({a}, {b}): inner sizes {a.shape[-1]} and {k} differ")
    batch = broadcast(a.shape[:-2], b.shape[:-2]) if a.rank > 2 or b.rank > 2 else ()
    return TensorType(a.dtype, (*batch, a.shape[-2], n))


def _matmul(a: np.ndarray, b: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    return np.matmul(a, np.swapaxes(b, -1, -2) if attrs["transpose_b"] else b)


def _embedding_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    table, ids = types
    if table.rank != 2 or ids.dtype.is_float:
        raise GraphError(f"embedding({table}, {ids}) needs a matrix and integer ids")
    return TensorType(table.dtype, (*ids.shape, table.shape[1]))


register(
    OpSchema(
        "matmul",
        (2, 2),
        {"transpose_b": False},
        _matmul_type,
        _matmul,
        doc="a @ b, or a @ b.T; leading dimensions broadcast.",
    )
)
register(
    OpSchema(
        "embedding",
        (2, 2),
        {},
        _embedding_type,
        lambda table, ids, attrs: table[ids],
        doc="Rows of table[V, H] by ids[...].",
    )
)
