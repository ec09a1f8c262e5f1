"""Slices of heads are slices of weights:
reshape(x w.T, [.., H, M])[..., a:b] = reshape(x w'.T, [.., H, b - a]), w' = rows a:b of each head.

Heads that hold q, k and v (or rotated and plain parts) side by side become one matrix for each,
which `merge_qkv` puts one below the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from bessemer.graph import Graph, Node, Value, emit
from bessemer.graph.schema import build_from
from bessemer.passes import views
from bessemer.passes.attributes import fixed
from bessemer.passes.base import Pass, substitute, use_counts
from bessemer.passes.params import ParamExpressions


@dataclass(frozen=True)
class HeadRows(Pass):
    """reshape(linear(x, w))[..., a:b] = reshape(linear(x, w[rows a:b of each head]))."""

    name: ClassVar[str] = "head_rows"

    def apply(self, graph: Graph) -> Graph:
        uses, counts, is_weight = graph.uses(), use_counts(graph), ParamExpressions()
        replacements: dict[Value, Value] = {}
        for node in graph.nodes():
            if node.op != "reshape" or not _splits_heads(node, counts, is_weight):
                continue
            heads = node.out
            users = uses.get(heads, [])
            if len(users) == counts.get(heads, 0) and _are_parts(users):
                for user in users:
                    replacements[user.out] = _rows_of_heads(node.inputs[0], user)
        return substitute(graph, replacements)


def _splits_heads(node: Node, counts: dict[Value, int], is_weight: ParamExpressions) -> bool:
    """Whether the node is linear(x, w).reshape(..., H, M) and the linear is used only here."""
    (y,) = node.inputs
    if y.op != "linear" or counts[y] != 1 or node.types[0].shape[:-2] != y.shape[:-1]:
        return False
    attrs = y.node.attrs
    plain = attrs["activation"] == "none" and not attrs["has_residual"]
    return plain and all(is_weight(w) for w in y.node.inputs[1:])


def _are_parts(users: list[Node]) -> bool:
    """Whether all are slices of the last axis that do not overlap."""
    if len(users) < 2 or not all(views.is_last_slice(n.out) for n in users):
        return False
    ranges = sorted(views.bounds(n.out) for n in users)
    return all(a[1] <= b[0] for a, b in pairwise(ranges))


def _rows_of_heads(y: Value, part: Node) -> Value:
    x, *weights = y.node.inputs
    heads = fixed(part.types[0].shape[-2])
    width = part.inputs[0].shape[-1]
    start, stop = views.bounds(part.out)
    chosen = []
    for w in weights:
        lead = emit("reshape", w, shape=(heads, width, *w.shape[1:]))
        rows = emit("slice", lead, axis=-len(w.shape), start=start, stop=stop)
        chosen.append(emit("reshape", rows, shape=(heads * (stop - start), *w.shape[1:])))
    narrow = build_from("linear", (x, *chosen), y.node.attrs, y.node.loc).out
    return emit("reshape", narrow, shape=part.types[0].shape, loc=part.loc)
