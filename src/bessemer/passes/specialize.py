"""The graph for one number of rows: f[T](x) at T = 1, R = 1 is the decode step.

The only row is the wanted one: x[rows] = x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from bessemer.graph import Graph, Node, Size, Value
from bessemer.graph.core import Attr
from bessemer.graph.dims import Dim
from bessemer.graph.schema import build_from
from bessemer.passes.attributes import int_of
from bessemer.passes.base import Pass


@dataclass(frozen=True)
class Specialize(Pass):
    """f[T, R](x) with the symbols replaced by sizes."""

    sizes: tuple[tuple[str, int], ...] = (("T", 1), ("R", 1))

    name: ClassVar[str] = "specialize"

    def apply(self, graph: Graph) -> Graph:
        sizes: dict[str, Size] = dict(self.sizes)
        done: dict[Value, Value] = {}
        for node in graph.nodes():
            operands = tuple(done[v] for v in node.inputs)
            if node.op == "select_rows" and self._is_whole(node, operands):
                done[node.out] = operands[0]
                continue
            attrs = {k: _substituted(v, sizes) for k, v in node.attrs.items()}
            same = operands == node.inputs and all(attrs[k] is v for k, v in node.attrs.items())
            new = node if same else build_from(node.op, operands, attrs, node.loc)
            done.update(zip(node.outputs, new.outputs, strict=True))
        return replace(
            graph,
            outputs={k: done[v] for k, v in graph.outputs.items()},
            updates={k: done[v] for k, v in graph.updates.items()},
        )

    @staticmethod
    def _is_whole(node: Node, operands: tuple[Value, ...]) -> bool:
        """Whether the rows can only be the only row there is."""
        x, rows = operands
        return x.shape[int_of(node, "axis")] == 1 and rows.shape == (1,)


def _substituted(value: Attr, sizes: Mapping[str, Size]) -> Attr:
    """The attribute with symbols replaced; the same object when it has none."""
    if isinstance(value, Dim):
        return value.substitute(sizes)
    if isinstance(value, tuple):
        parts = tuple(_substituted(v, sizes) for v in value)
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
    return value
