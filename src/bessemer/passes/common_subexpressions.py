"""Equal computations are one value: a = f(x), b = f(x)  ->  a = b = f(x).

The rotary tables that every layer spells out again become one value this way.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bessemer.graph import Graph, Node, Value
from bessemer.passes.base import Pass, Uses, rewrite


@dataclass(frozen=True)
class CommonSubexpressions(Pass):
    """a = f(x), b = f(x)  ->  a = b = f(x)."""

    name: ClassVar[str] = "common_subexpressions"

    def apply(self, graph: Graph) -> Graph:
        known: dict[Hashable, Node] = {}

        def rule(node: Node, uses: Uses) -> tuple[Value, ...] | None:
            first = known.setdefault(node_key(node), node)
            return None if first is node else first.outputs

        return rewrite(graph, rule)


def node_key(node: Node) -> Hashable:
    """Equal for nodes that compute the same thing. Attention is told apart by its layer."""
    attrs = tuple((k, attr_key(v)) for k, v in node.attrs.items())
    return node.op, node.inputs, attrs, node.types


def attr_key(value: object) -> Hashable:
    """A hashable that keeps 0.0 and -0.0, and 1 and 1.0 and True, apart."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple):
        return tuple(attr_key(v) for v in value)
    return type(value).__name__, repr(value) if isinstance(value, float) else value
