"""A state that is written part by part becomes one state a part, each updated in place:
s' = concat(f(s[:i]), g(s[i:])) is s0' = f(s0) and s1' = g(s1).

So a module may keep the caches of all its layers in one tensor. A state that is only looked at in
another shape takes that shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from bessemer.graph import Graph, Shape, Value, emit
from bessemer.passes.attributes import int_of, size_of
from bessemer.passes.base import Pass, substitute


@dataclass(frozen=True)
class SplitStates(Pass):
    """concat(f(s[:i]), g(s[i:])) as the update of s: two states."""

    name: ClassVar[str] = "split_states"

    def apply(self, graph: Graph) -> Graph:
        while True:
            after = next(_changes(graph), None)
            if after is None:
                return graph
            graph = after


def _changes(graph: Graph) -> Iterator[Graph]:
    """The graph with one state split or reshaped."""
    uses = graph.uses()
    states = {str(n.attrs["name"]): n.out for n in graph.nodes() if n.op == "state"}
    for name, state in states.items():
        update = graph.updates.get(name)
        if update is None or update == state:
            continue
        readers = [node.out for node in uses[state]]
        if update.op == "reshape":
            changed = _reshaped(graph, name, update, readers)
        elif update.op == "concat":
            changed = _split(graph, name, update, readers)
        else:
            changed = None
        if changed is not None:
            yield changed


def _reshaped(graph: Graph, name: str, update: Value, readers: list[Value]) -> Graph | None:
    """The state in the shape that it is always looked at in, and written from."""
    (written,) = update.node.inputs
    if any(r.op != "reshape" or r.shape != written.shape for r in readers):
        return None
    fresh = _state(name, update, written.shape)
    updates = {**graph.updates, name: written}
    return substitute(replace(graph, updates=updates), dict.fromkeys(readers, fresh))


def _split(graph: Graph, name: str, update: Value, readers: list[Value]) -> Graph | None:
    """One state a part of the concat, if every reader takes its elements from one part alone."""
    axis = int_of(update.node, "axis")
    ends = [0]
    for part in update.node.inputs:
        size = part.shape[axis]
        if not isinstance(size, int):
            return None
        ends.append(ends[-1] + size)
    fresh = [_state(f"{name}.{i}", update, part.shape) for i, part in enumerate(update.node.inputs)]
    replacements: dict[Value, Value] = {}
    for reader in readers:
        if reader.op != "slice" or reader.node.attrs["axis"] != axis:
            return None
        start, stop = size_of(reader.node, "start"), size_of(reader.node, "stop")
        if not (isinstance(start, int) and isinstance(stop, int)):
            return None
        at = next(i for i, end in enumerate(ends[1:]) if stop <= end)
        if start < ends[at]:
            return None
        replacements[reader] = _part(fresh[at], reader, start - ends[at], stop - ends[at])
    updates = {k: v for k, v in graph.updates.items() if k != name}
    for i, part in enumerate(update.node.inputs):
        # What is only passed on is never written: it stays at zero.
        if replacements.get(part) != fresh[i]:
            updates[f"{name}.{i}"] = part
    return substitute(replace(graph, updates=updates), replacements)


def _part(state: Value, reader: Value, start: int, stop: int) -> Value:
    """What the slice `reader` of the whole state is of one part."""
    if reader.shape == state.shape and reader.node.attrs["step"] == 1:
        return state
    axis, step = int_of(reader.node, "axis"), int_of(reader.node, "step")
    return emit("slice", state, axis=axis, start=start, stop=stop, step=step, loc=reader.node.loc)


def _state(name: str, like: Value, shape: Shape) -> Value:
    return emit("state", name=name, dtype=like.dtype, shape=shape)
