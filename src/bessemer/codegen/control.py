"""Matrices that stay in f32 whatever the format of the others: those whose products decide.

A router's product says which experts work and with what weight, a hyper-connection's how the
streams of the residual are mixed. They are small, and what a router loses by rounding is not an
error of some size but another choice.
"""

from __future__ import annotations

from bessemer.graph.core import Graph, Node, Value
from bessemer.graph.schema import schema_of

CONTROL_FORMAT = "f32"
# Ops whose operands decide, and which these are.
_DECIDING = {
    "expert_linear": (1,),
    "collapse_streams": (1,),
    "mix_streams": (2, 3),
}
# What lies between such a product and the decision, besides elementwise ops.
_BETWEEN = frozenset(
    {
        *("reshape", "permute", "expand", "slice", "concat"),
        *("softmax", "topk", "gather", "scatter", "sinkhorn"),
    }
)


def control_weights(graph: Graph) -> frozenset[str]:
    """Names of the stored matrices of a lowered graph whose products decide."""
    return frozenset(
        str(n.attrs["name"]) for n in control_params(graph) if len(n.types[0].shape) > 1
    )


def control_params(graph: Graph) -> list[Node]:
    """The parameters of a lowered graph that decide: those matrices, biases and factors."""
    found: dict[Node, None] = {}
    seen: set[Value] = set()
    waiting = [v for node in graph.nodes() for v in _decisions(node)]
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        node = value.node
        if node.op == "param":
            found[node] = None
        elif node.op == "linear":  # of x, its first operand, no more is known than that it is data
            waiting += node.inputs[1 : 3 if node.attrs["has_bias"] else 2]
        elif node.op in _BETWEEN or schema_of(node.op).elementwise:
            waiting += node.inputs
    return list(found)


def _decisions(node: Node) -> list[Value]:
    """Operands of a node that decide: those of `_DECIDING`, and the weights of experts' outputs."""
    if node.op == "mul" and any(v.op == "expert_linear" for v in node.inputs):
        return [v for v in node.inputs if v.op != "expert_linear"]
    return [node.inputs[i] for i in _DECIDING.get(node.op, ())]
