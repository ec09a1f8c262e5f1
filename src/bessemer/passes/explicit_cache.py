"""attention(q, k, v) with its cache as named states and its steps as plain ops:

    keys' = put(keys, positions, k), values' = put(values, positions, v)
    softmax(mask(softcap(scale * q @ keys'.T))) @ values'

The cache of a layer is two states `cache.<layer>.keys[Hkv, C, D]` and `.values[Hkv, C, Dv]` of a
fixed capacity C, which any compiler of plain tensors can do with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from bessemer.graph import DType, Graph, GraphError, Node, Size, Value, constant, emit
from bessemer.passes.attributes import float_of, int_of
from bessemer.passes.base import Pass

_ATTENTION = ("attention", "flash_attention", "gqa_decode_attention")


@dataclass(frozen=True)
class ExplicitCache(Pass):
    """attention = put, matmul, mask, softmax, matmul.  capacity: tokens that a cache holds.  dtype:
    of its elements.
    """

    capacity: int = 1024
    dtype: DType = DType.F32

    name: ClassVar[str] = "explicit_cache"

    def apply(self, graph: Graph) -> Graph:
        attention = _Rewriter(self)
        rewritten = graph.rewrite(attention.rule)
        return replace(rewritten, updates={**rewritten.updates, **attention.updates})


@dataclass
class _Rewriter:
    """updates: the caches after the call, by the name of their state."""

    options: ExplicitCache
    updates: dict[str, Value] = field(default_factory=dict)

    def rule(self, node: Node) -> Value | None:
        if node.op not in _ATTENTION:
            return None
        q, k, v, positions, *sinks = node.inputs
        rows, heads, width = q.shape
        kv_heads = k.shape[-2]
        if not (isinstance(heads, int) and isinstance(kv_heads, int)):
            raise GraphError(f"attention of a symbolic number of heads ({q.type}, {k.type})")
        group = heads // kv_heads
        layer = int_of(node, "layer")
        keys = self._cache(f"cache.{layer}.keys", k, positions)
        values = self._cache(f"cache.{layer}.values", v, positions)
        # The query heads of a KV head are neighbours: [Hkv, group, T, D] against [Hkv, 1, C, D].
        queries = emit("reshape", q, shape=(rows, kv_heads, group, width))
        queries = emit("permute", queries, perm=(1, 2, 0, 3))
        scores = emit("matmul", queries, keys, transpose_b=True)
        scores = emit("mul", scores, constant(float_of(node, "scale")))
        scores = self._masked(_capped(scores, node), positions, int_of(node, "window"))
        p = _softmax(scores, sinks[0] if sinks else None, kv_heads, group, rows)
        mixed = emit("permute", emit("matmul", p, values), perm=(2, 0, 1, 3))
        return emit("reshape", mixed, shape=(rows, heads, v.shape[-1]))

    def _cache(self, name: str, new: Value, positions: Value) -> Value:
        """The cache with the rows `new`[T, Hkv, D] put in, as f32[Hkv, 1, C, D]."""
        options = self.options
        _, heads, width = new.shape
        shape = (heads, options.capacity, width)
        state = emit("state", name=name, dtype=options.dtype, shape=shape)
        rows = emit("cast", emit("permute", new, perm=(1, 0, 2)), dtype=options.dtype)
        held = self.updates[name] = emit("put", state, positions, rows, axis=-2)
        held = emit("cast", held, dtype=new.dtype)
        return emit("reshape", held, shape=(heads, 1, options.capacity, width))

    def _masked(self, scores: Value, positions: Value, window: int) -> Value:
        """-inf where a key is after its row, or before its window."""
        at = emit("reshape", positions, shape=(*positions.shape, 1))
        key = emit("iota", size=self.options.capacity, dtype=positions.dtype)
        seen = emit("le", key, at)
        if window:
            first = emit("sub", at, constant(np.int64(window)))
            seen = emit("logical_and", seen, emit("gt", key, first))
        return emit("where", seen, scores, constant(-math.inf))


def _capped(scores: Value, node: Node) -> Value:
    softcap = float_of(node, "softcap")
    if not softcap:
        return scores
    cap = constant(softcap)
    return emit("mul", emit("tanh", emit("div", scores, cap)), cap)


def _softmax(scores: Value, sinks: Value | None, kv_heads: int, group: int, rows: Size) -> Value:
    """Over the keys; a sink is one more score of its head, without a value."""
    if sinks is None:
        return emit("softmax", scores, axis=-1)
    capacity = scores.shape[-1]
    sink = emit("reshape", sinks, shape=(kv_heads, group, 1, 1))
    sink = emit("expand", sink, shape=(kv_heads, group, rows, 1))
    p = emit("softmax", emit("concat", scores, sink, axis=-1), axis=-1)
    return emit("slice", p, axis=-1, start=0, stop=capacity)
