"""Matrix products with weights are linear layers: x @ w.T + b = linear(x, w, b) (addmm)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Graph, Node, Value, emit
from bessemer.graph.schema import build_from
from bessemer.passes import views
from bessemer.passes.base import Pass, Uses, rewrite
from bessemer.passes.params import ParamExpressions


@dataclass(frozen=True)
class ClassicFusion(Pass):
    """x @ w.T + b = linear(x, w, b)."""

    name: ClassVar[str] = "classic_fusion"

    def apply(self, graph: Graph) -> Graph:
        is_weight = ParamExpressions()

        def rule(node: Node, uses: Uses) -> Value | None:
            if node.op == "matmul":
                return _linear(node, is_weight)
            if node.op == "add":
                return _bias(node, uses, is_weight)
            return None

        return rewrite(graph, rule)


def _linear(node: Node, is_weight: ParamExpressions) -> Value | None:
    """x @ w.T = linear(x, w) for a weight w[N, K]."""
    x, w = node.inputs
    if not node.attrs["transpose_b"] or len(w.shape) != 2 or not is_weight(w) or is_weight(x):
        return None
    return emit("linear", x, w)


def _bias(node: Node, uses: Uses, is_weight: ParamExpressions) -> Value | None:
    """linear(x, w) + b = linear(x, w, b)."""
    for y, b in (node.inputs, node.inputs[::-1]):
        if y.op != "linear" or len(y.node.inputs) != 2 or not uses.once(y) or not is_weight(b):
            continue
        plain = y.node.attrs["activation"] == "none" and y.node.attrs["scale"] == 1.0
        width = y.shape[-1]
        if plain and y.type == node.types[0] and views.without_units(b.shape) == (width,):
            attrs = {**y.node.attrs, "has_bias": True}
            operands = (*y.node.inputs, views.reshape(b, (width,)))
            return build_from("linear", operands, attrs, y.node.loc).out
    return None
