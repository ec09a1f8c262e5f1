"""What no output or state update needs is gone: reachability is the definition of a graph.

Leaves nothing to remove in the graph itself; stored weights that nothing reads any more go.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from bessemer.graph import Graph
from bessemer.passes.base import Pass


@dataclass(frozen=True)
class DeadCode(Pass):
    """Nodes that no root reaches, and weights that no node reads, are dropped."""

    name: ClassVar[str] = "dead_code"

    def apply(self, graph: Graph) -> Graph:
        read = {n.attrs["name"] for n in graph.nodes() if n.op == "param"}
        kept = {k: v for k, v in graph.weights.items() if k in read}
        states = {n.attrs["name"] for n in graph.nodes() if n.op == "state"}
        updates = {k: v for k, v in graph.updates.items() if k in states}
        if len(kept) == len(graph.weights) and len(updates) == len(graph.updates):
            return graph
        return DeadCode().apply(replace(graph, weights=kept, updates=updates))
