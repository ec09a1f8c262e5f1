"""What a pass is, and how passes rewrite a graph.

A pass is a frozen dataclass: its class has the name, its fields are its options, and `apply` takes
a graph and returns another one. Most passes are a `RulePass`: one rule, tried on every node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from bessemer.graph import Graph, GraphError, Node, Value

# Rounds after which a repeated pass must have settled; each round shrinks a chain of views by one
# or moves a view below one op, so that this bounds the depth of the deepest straight chain.
MAX_ROUNDS = 256


class Uses:
    """How often each value of the graph that is being built is used.

    The counts are those of the graph before the pass, under the values' new names. A value that a
    rule has just created counts as used once, by the node that it was created for.
    """

    def __init__(self) -> None:
        self._counts: dict[Value, int] = {}

    def add(self, value: Value, count: int) -> None:
        self._counts[value] = self._counts.get(value, 0) + count

    def count(self, value: Value) -> int:
        return self._counts.get(value, 1)

    def once(self, value: Value) -> bool:
        return self.count(value) == 1


Result = Value | Sequence[Value] | None
Rule = Callable[[Node, Uses], "Value | Sequence[Value] | None"]


@dataclass(frozen=True)
class Pass(ABC):
    """A named rewrite of a graph. Equal options give equal passes."""

    name: ClassVar[str]

    @abstractmethod
    def apply(self, graph: Graph) -> Graph:
        """The rewritten graph; `graph` itself when there is nothing to do."""


@dataclass(frozen=True)
class RulePass(Pass):
    """A pass that is one rule; `repeat` applies it until nothing changes."""

    repeat: ClassVar[bool] = False

    @abstractmethod
    def rule(self, node: Node, uses: Uses) -> Value | Sequence[Value] | None:
        """What takes the place of `node`, whose operands are already rewritten; None keeps it."""

    def apply(self, graph: Graph) -> Graph:
        return settle(graph, self.rule, self.name) if self.repeat else rewrite(graph, self.rule)


def use_counts(graph: Graph) -> dict[Value, int]:
    """Uses of each value as an operand, a graph output or a state update."""
    counts = {value: len(users) for value, users in graph.uses().items()}
    for root in graph.roots:
        counts[root] = counts.get(root, 0) + 1
    return counts


def rewrite(graph: Graph, rule: Rule) -> Graph:
    """Rebuild the graph bottom-up with one rule. Returns `graph` itself when no node changes.

    Raises GraphError when the rule changes the type of a value. What a rule builds inherits the
    location of the node that it replaces.
    """
    before = use_counts(graph)
    uses = Uses()
    done: dict[Value, Value] = {}
    known = set(graph.nodes())
    changed = False
    for node in graph.nodes():
        new = node
        if any(done[v] != v for v in node.inputs):
            new = replace(node, inputs=tuple(done[v] for v in node.inputs))
        values = _located(new, rule(new, uses), known)
        if [v.type for v in values] != list(node.types):
            raise GraphError(f"a rule turned {new} into {list(values)}")
        for old, value in zip(node.outputs, values, strict=True):
            done[old] = value
            uses.add(value, before.get(old, 0))
            changed = changed or old != value
    if not changed:
        return graph
    return replace(
        graph,
        outputs={k: done[v] for k, v in graph.outputs.items()},
        updates={k: done[v] for k, v in graph.updates.items()},
    )


def substitute(graph: Graph, replacements: Mapping[Value, Value]) -> Graph:
    """The graph with values replaced everywhere. Replacements are built from values of this graph,
    which are replaced in turn; none may contain the value that it stands for.
    """
    if not replacements:
        return graph

    def follow(value: Value) -> Value:
        while value in replacements:
            value = replacements[value]
        return value

    built: dict[Node, Node] = {}
    stack = [follow(v).node for v in reversed(graph.roots)]
    while stack:
        node = stack[-1]
        operands = [follow(v) for v in node.inputs]
        waiting = [v.node for v in operands if v.node not in built]
        if node in built or not waiting:
            stack.pop()
            new = tuple(Value(built[v.node], v.index) for v in operands)
            built.setdefault(node, node if new == node.inputs else replace(node, inputs=new))
        else:
            stack += reversed(waiting)

    def rebuilt(value: Value) -> Value:
        found = follow(value)
        if found.type != value.type:
            raise GraphError(f"{value} can't be replaced by {found}")
        return Value(built[found.node], found.index)

    return replace(
        graph,
        outputs={k: rebuilt(v) for k, v in graph.outputs.items()},
        updates={k: rebuilt(v) for k, v in graph.updates.items()},
    )


def _located(node: Node, result: Result, known: set[Node]) -> Sequence[Value]:
    """The results in a list; nodes that are not `known` yet take the location of `node` and are
    known from now on.
    """
    known.add(node)
    if result is None:
        return node.outputs
    moved: dict[Node, Node] = {}

    def located(fresh: Node) -> Node:
        # Rules build a few nodes at a time, so that this does not go deep.
        if fresh in known:
            return fresh
        if fresh not in moved:
            inputs = tuple(Value(located(v.node), v.index) for v in fresh.inputs)
            loc = fresh.loc or (node.loc if fresh.inputs else "")
            same = loc == fresh.loc and inputs == fresh.inputs
            moved[fresh] = fresh if same else replace(fresh, inputs=inputs, loc=loc)
            known.add(moved[fresh])
        return moved[fresh]

    values = (result,) if isinstance(result, Value) else result
    return [Value(located(v.node), v.index) for v in values]


def settle(graph: Graph, rule: Rule, name: str = "rule") -> Graph:
    """Apply a rule until nothing changes. Raises GraphError if it never settles."""
    for _ in range(MAX_ROUNDS):
        after = rewrite(graph, rule)
        if after is graph:
            return graph
        graph = after
    raise GraphError(f"{name} did not settle after {MAX_ROUNDS} rounds")
