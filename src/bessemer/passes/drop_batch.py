"""The leading batch axis of one is dropped: rows come first.

The inputs lose their batch axis, it moves below one op after the other (`sink_units`), and the
outputs lose it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from bessemer.graph import Graph, Node, Value
from bessemer.graph.schema import build_from
from bessemer.passes.base import Pass, Uses, rewrite
from bessemer.passes.canonicalize_views import CanonicalizeViews
from bessemer.passes.sink_units import SinkUnits, lift, strip


@dataclass(frozen=True)
class DropBatch(Pass):
    """f(x.view(1, ...)) = f(x).view(1, ...), from the inputs to the outputs."""

    name: ClassVar[str] = "drop_batch"

    def apply(self, graph: Graph) -> Graph:
        after = rewrite(graph, _strip_leaf)
        after = SinkUnits().apply(after)
        after = replace(
            after,
            outputs={k: _strip_root(v) for k, v in after.outputs.items()},
            updates={k: _strip_update(v, graph, k) for k, v in after.updates.items()},
        )
        return CanonicalizeViews().apply(after)


def _strip_leaf(node: Node, uses: Uses) -> Value | None:
    """Inputs and states are declared without their leading one."""
    if node.op not in ("input", "state") or len(node.types[0].shape) < 2:
        return None
    if node.types[0].shape[0] != 1:
        return None
    attrs = {**node.attrs, "shape": node.types[0].shape[1:]}
    return lift(build_from(node.op, (), attrs, node.loc).out)


def _strip_root(x: Value) -> Value:
    return strip(x) if len(x.shape) >= 2 and x.shape[0] == 1 else x


def _strip_update(x: Value, before: Graph, name: str) -> Value:
    """An update loses the axis that its state has lost."""
    held = [n for n in before.nodes() if n.op == "state" and n.attrs["name"] == name]
    return _strip_root(x) if held and held[0].types[0].shape[0] == 1 else x
