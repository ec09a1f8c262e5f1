"""act(x g.T) * (x u.T): the gate and the up projection become one, [x g.T, x u.T] = x [g; u].T.

Both may be clamped before they meet, the gate from above, the other one on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Graph, Node, Value
from bessemer.graph.ops.elementwise import ACTIVATIONS
from bessemer.passes.base import Pass, substitute, use_counts
from bessemer.passes.merge_qkv import is_plain_linear, merged
from bessemer.passes.params import ParamExpressions
from bessemer.passes.pattern import match, named, op, scalar, var

_CLAMPED_GATE = op("silu", named("clamped", op("minimum", var("gate"), scalar("high"))))
_CLAMPED_UP = named(
    "clamped",
    op("minimum", named("raised", op("maximum", var("up"), scalar("low"))), scalar("high")),
)


@dataclass(frozen=True)
class MergeGateUp(Pass):
    """act(x g.T) * (x u.T) = act(y[:F]) * y[F:] with y = x [g; u].T."""

    name: ClassVar[str] = "merge_gate_up"

    def apply(self, graph: Graph) -> Graph:
        counts, is_weight = use_counts(graph), ParamExpressions()
        replacements: dict[Value, Value] = {}
        for node in graph.nodes():
            product = gate_and_up(node, counts)
            if product is None:
                continue
            gate, up = product.gate, product.up
            if not all(is_plain_linear(v.node, is_weight) for v in (gate, up)):
                continue
            same = gate.node.inputs[0] == up.node.inputs[0] and gate.type == up.type
            if same and gate != up:
                parts = merged([gate.node, up.node], node.loc)
                replacements.update(zip((gate, up), parts, strict=True))
        return substitute(graph, replacements)


@dataclass(frozen=True)
class GatedProduct:
    """act(gate) * up by the name that a gated op has for it; limit: of a clamped one."""

    gate: Value
    up: Value
    activation: str
    limit: float | None = None


def gate_and_up(node: Node, counts: dict[Value, int]) -> GatedProduct | None:
    """The parts of act(gate) * up; both and the activation are used only here."""
    if node.op != "mul":
        return None
    for gated, up in (node.inputs, node.inputs[::-1]):
        if gated.op in ACTIVATIONS and counts[gated] == 1:
            found = _clamped(gated, up, counts) or GatedProduct(gated.node.inputs[0], up, gated.op)
            gate, up = found.gate, found.up
            if counts[gate] == counts[up] == 1 and gate.type == up.type == node.types[0]:
                return found
    return None


def _clamped(gated: Value, up: Value, counts: dict[Value, int]) -> GatedProduct | None:
    """silu(min(gate, L)) * clip(up, -L, L)."""
    below = match(_CLAMPED_GATE, gated)
    between = match(_CLAMPED_UP, up)
    if below is None or between is None:
        return None
    limit = below["high"]
    if between["high"] != limit or between["low"] != -limit:
        return None
    inner = [below["clamped"], between["clamped"], between["raised"]]
    if any(counts[v] != 1 for v in inner):
        return None
    return GatedProduct(below["gate"], between["up"], "silu_clamped", float(limit))
