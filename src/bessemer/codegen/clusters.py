"""Grouping: which graph nodes become one group.

A *hot* node has a scheduled kernel and is a group of its own. View nodes (reshape, slice, permute
that only re-index) are no code at all. What is left is *generic*: neighbours of one depth and one
kind (per token row, per output row, or neither) form a cluster with one payload function.

The depth of a node counts the changes of kind and the hot nodes on the longest path to it, so a
path that leaves a cluster can't come back to it: clusters are convex.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bessemer.codegen.payload import row_wise
from bessemer.codegen.views import Buffer, View, rows_of, view_through, whole
from bessemer.graph.core import Graph, Node, Value

LEAVES = frozenset({"input", "param", "constant", "state"})

Kind = tuple[str | None, bool]
HOT: Kind = ("hot", False)  # equal to no generic kind


@dataclass(frozen=True, eq=False)
class Item:
    """One group to be: a hot node, or the compute nodes of a cluster in topological order."""

    nodes: tuple[Node, ...]
    hot: bool


@dataclass(frozen=True)
class Partition:
    """items: in an order that respects dependencies. views: nodes that are only re-indexing."""

    items: tuple[Item, ...]
    views: frozenset[Node]


def find_views(graph: Graph) -> frozenset[Node]:
    """Reshapes, slices and permutes that need no copy, whatever buffer their source becomes."""
    known: dict[Value, View] = {}
    found = set()
    for node in graph.nodes():
        for value in node.outputs:
            if any(rows_of((s,)) for s in value.shape[1:]):
                continue
            known[value] = whole(Buffer("", "f32", value.shape, "arena"))
        if node.op in ("reshape", "slice", "permute"):
            source = known.get(node.inputs[0])
            view = source and view_through(node, source)
            if view:
                found.add(node)
                known[node.out] = view
    return frozenset(found)


def partition(graph: Graph, is_hot: Callable[[Node], bool]) -> Partition:
    """Split the graph's nodes into groups."""
    views = find_views(graph)
    depth: dict[Node, int] = {}
    kinds: dict[Node, Kind] = {}
    keys: dict[Node, tuple[int, Kind] | Node] = {}
    for node in graph.nodes():
        if node.op in LEAVES or node in views:
            continue
        producers = dict.fromkeys(_root(v, views) for v in node.inputs)
        hot = is_hot(node)
        kinds[node] = HOT if hot else (rows_of(node.types[0].shape), row_wise([node]))
        level = 0
        for producer in producers:
            if producer is not None:
                joined = not hot and kinds[producer] == kinds[node]
                level = max(level, depth[producer] + (0 if joined else 1))
        depth[node] = level
        keys[node] = node if hot else (level, kinds[node])
    return Partition(_order(keys, views), views)


def _root(value: Value, views: frozenset[Node]) -> Node | None:
    """The computing node behind views; None for leaves."""
    node = value.node
    while node in views:
        node = node.inputs[0].node
    return None if node.op in LEAVES else node


def _order(keys: dict[Node, tuple[int, Kind] | Node], views: frozenset[Node]) -> tuple[Item, ...]:
    """Items by dependency, ties in the graph's own order."""
    members: dict[tuple[int, Kind] | Node, list[Node]] = {}
    for node, key in keys.items():
        members.setdefault(key, []).append(node)
    done: dict[tuple[int, Kind] | Node, None] = {}

    def needs(key: tuple[int, Kind] | Node) -> list[tuple[int, Kind] | Node]:
        roots = (_root(v, views) for n in members[key] for v in n.inputs)
        found = dict.fromkeys(keys[r] for r in roots if r is not None)
        return [k for k in found if k != key]

    for start in members:
        stack = [start]
        while stack:
            key = stack[-1]
            missing = [k for k in needs(key) if k not in done]
            if missing:
                stack.append(missing[0])
                continue
            stack.pop()
            done.setdefault(key)
    return tuple(Item(tuple(members[k]), isinstance(k, Node)) for k in done)
