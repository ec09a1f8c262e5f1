"""Linear layers of one input are one: [x q.T, x k.T, x v.T] = x [q; k; v].T.

The parts are slices of the last axis, which are views of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Graph, Node, Value, constant, emit
from bessemer.passes import views
from bessemer.passes.attributes import fixed
from bessemer.passes.base import Pass, substitute
from bessemer.passes.params import ParamExpressions, stack_rows


@dataclass(frozen=True)
class MergeQkv(Pass):
    """[x q.T, x k.T, x v.T] = x [q; k; v].T for plain linear layers of the same x."""

    name: ClassVar[str] = "merge_qkv"

    def apply(self, graph: Graph) -> Graph:
        is_weight = ParamExpressions()
        siblings: dict[Value, list[Node]] = {}
        for node in graph.nodes():
            if is_plain_linear(node, is_weight):
                siblings.setdefault(node.inputs[0], []).append(node)
        replacements: dict[Value, Value] = {}
        for nodes in siblings.values():
            if len(nodes) > 1:
                parts = merged(nodes, nodes[0].loc)
                replacements.update(zip((n.out for n in nodes), parts, strict=True))
        return substitute(graph, replacements)


def is_plain_linear(node: Node, is_weight: ParamExpressions) -> bool:
    """A linear layer with stored weights and no epilogue but its bias."""
    if node.op != "linear" or not all(is_weight(w) for w in node.inputs[1:2]):
        return False
    attrs = node.attrs
    return attrs["activation"] == "none" and attrs["scale"] == 1.0 and not attrs["has_residual"]


def merged(nodes: Sequence[Node], loc: str) -> list[Value]:
    """The results of linear layers of one input as slices of one linear layer."""
    x = nodes[0].inputs[0]
    has_bias = any(n.attrs["has_bias"] for n in nodes)
    weights = [stack_rows([n.inputs[1] for n in nodes])]
    if has_bias:
        weights.append(stack_rows([_bias(n) for n in nodes]))
    whole = emit("linear", x, *weights, has_bias=has_bias, loc=loc)
    parts, at = [], 0
    for node in nodes:
        width = fixed(node.types[0].shape[-1])
        parts.append(views.slice_last(whole, at, at + width))
        at += width
    return parts


def _bias(node: Node) -> Value:
    """The bias of a linear layer, zeros where it has none."""
    if node.attrs["has_bias"]:
        return node.inputs[2]
    return emit("expand", constant(0.0), shape=(node.inputs[1].shape[0],))
