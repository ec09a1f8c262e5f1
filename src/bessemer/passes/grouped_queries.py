"""attention(q, repeat(k), repeat(v)) = attention(q, k, v): each group of query heads reads its own
KV head, which is not repeated for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Node, Value
from bessemer.graph.schema import build_from
from bessemer.passes import views
from bessemer.passes.base import RulePass, Uses


@dataclass(frozen=True)
class GroupedQueries(RulePass):
    """attention(q, repeat(k), repeat(v)) = attention(q, k, v)."""

    name: ClassVar[str] = "grouped_queries"

    def rule(self, node: Node, uses: Uses) -> Value | None:
        if node.op != "attention":
            return None
        q, k, v, *rest = node.inputs
        one_k, one_v = _unrepeated(k), _unrepeated(v)
        if one_k is None or one_v is None or one_k.shape[-2] != one_v.shape[-2]:
            return None
        return build_from("attention", (q, one_k, one_v, *rest), node.attrs, node.loc).out


def _unrepeated(x: Value) -> Value | None:
    """y[T, H, D] of x = y[:, :, None, :].expand(T, H, g, D).reshape(T, H * g, D)."""
    if x.op != "reshape" or x.node.inputs[0].op != "expand":
        return None
    wide = x.node.inputs[0]
    y = wide.node.inputs[0]
    if len(wide.shape) != len(x.shape) + 1 or y.shape != (*wide.shape[:-2], 1, wide.shape[-1]):
        return None
    return views.reshape(y, (*y.shape[:-2], y.shape[-1]))
