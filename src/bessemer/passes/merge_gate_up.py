"""act(x g.T) * (x u.T): the gate and the up projection become one, [x g.T, x u.T] = x [g; u].T."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Graph, Node, Value
from bessemer.graph.ops.elementwise import ACTIVATIONS
from bessemer.passes.base import Pass, substitute, use_counts
from bessemer.passes.merge_qkv import is_plain_linear, merged
from bessemer.passes.params import ParamExpressions


@dataclass(frozen=True)
class MergeGateUp(Pass):
    """act(x g.T) * (x u.T) = act(y[:F]) * y[F:] with y = x [g; u].T."""

    name: ClassVar[str] = "merge_gate_up"

    def apply(self, graph: Graph) -> Graph:
        counts, is_weight = use_counts(graph), ParamExpressions()
        replacements: dict[Value, Value] = {}
        for node in graph.nodes():
            pair = gate_and_up(node, counts)
            if pair is None or not all(is_plain_linear(v.node, is_weight) for v in pair):
                continue
            gate, up = pair
            same = gate.node.inputs[0] == up.node.inputs[0] and gate.type == up.type
            if same and gate != up:
                parts = merged([gate.node, up.node], node.loc)
                replacements.update(zip(pair, parts, strict=True))
        return substitute(graph, replacements)


def gate_and_up(node: Node, counts: dict[Value, int]) -> tuple[Value, Value] | None:
    """The operands of act(gate) * up; both and the activation are used only here."""
    if node.op != "mul":
        return None
    for gated, up in (node.inputs, node.inputs[::-1]):
        if gated.op in ACTIVATIONS and counts[gated] == 1:
            gate = gated.node.inputs[0]
            if counts[gate] == counts[up] == 1 and gate.type == up.type == node.types[0]:
                return gate, up
    return None
