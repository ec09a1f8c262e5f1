"""The graph: immutable typed SSA nodes, and functional rewriting.

A `Node` is an op with operands, attributes and result types. A `Value` is one result of a node.
A `Graph` is the set of nodes that its outputs and state updates reach, in a fixed order.
Passes never change a graph; they build another one, mostly through `Graph.rewrite`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bessemer.graph.dims import Dim, Shape, is_static
from bessemer.graph.dtypes import DType

Attr = int | float | bool | str | DType | Dim | tuple | np.ndarray


@dataclass(frozen=True)
class TensorType:
    """Element type and shape of a value."""

    dtype: DType
    shape: Shape

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_static(self) -> bool:
        return is_static(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class Node:
    """One op. Compared by identity. `loc` is the module path and source line it came from."""

    op: str
    inputs: tuple[Value, ...]
    attrs: Mapping[str, Attr]
    types: tuple[TensorType, ...]
    loc: str = ""

    @property
    def outputs(self) -> tuple[Value, ...]:
        return tuple(Value(self, i) for i in range(len(self.types)))

    @property
    def out(self) -> Value:
        """The only result."""
        if len(self.types) != 1:
            raise ValueError(f"{self.op} has {len(self.types)} results")
        return Value(self, 0)

    def __repr__(self) -> str:
        return f"<{self.op} {', '.join(map(str, self.types))}>"


@dataclass(frozen=True)
class Value:
    """Result `index` of `node`; equal when both are the same."""

    node: Node
    index: int = 0

    @property
    def type(self) -> TensorType:
        return self.node.types[self.index]

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def op(self) -> str:
        return self.node.op

    def __repr__(self) -> str:
        return f"<{self.node.op}#{self.index} {self.type}>"


Rewriter = Callable[[Node], "Value | Sequence[Value] | None"]


@dataclass(frozen=True, eq=False)
class Graph:
    """A function from named inputs to named outputs.

    outputs: name -> value.  updates: state name -> value that the state holds afterwards.
    weights: stored weight name -> root of an expression over checkpoint `param` nodes; filled by
    the pass that folds weight arithmetic. A `param` whose name is not in it is read as it is.
    """

    name: str
    outputs: Mapping[str, Value]
    updates: Mapping[str, Value] = field(default_factory=dict)
    weights: Mapping[str, Value] = field(default_factory=dict)

    @property
    def roots(self) -> list[Value]:
        return [*self.outputs.values(), *self.updates.values()]

    def nodes(self) -> list[Node]:
        """Every reachable node, operands before users, in an order fixed by the graph alone."""
        return topological(self.roots)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes())

    def uses(self) -> dict[Value, list[Node]]:
        """Users of each value, once per operand; graph outputs do not count."""
        table: dict[Value, list[Node]] = {}
        for node in self.nodes():
            for value in node.inputs:
                table.setdefault(value, []).append(node)
        return table

    def rewrite(self, rule: Rewriter) -> Graph:
        """Rebuild the graph bottom-up. `rule` sees each node with its operands already rewritten
        and returns what takes its place (one value, one per result), or None to keep it.
        """
        done: dict[Value, Value] = {}
        for node in self.nodes():
            new = node
            if any(done[v] != v for v in node.inputs):
                new = replace(node, inputs=tuple(done[v] for v in node.inputs))
            result = rule(new)
            if result is None:
                values: Sequence[Value] = new.outputs
            else:
                values = [result] if isinstance(result, Value) else result
            if len(values) != len(node.types):
                raise ValueError(f"a rule replaced {node.op} by {len(values)} values")
            done.update(zip(node.outputs, values, strict=True))
        return replace(
            self,
            outputs={k: done[v] for k, v in self.outputs.items()},
            updates={k: done[v] for k, v in self.updates.items()},
        )

    def op_counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for node in self.nodes():
            counts[node.op] = counts.get(node.op, 0) + 1
        return dict(sorted(counts.items()))


def topological(roots: Sequence[Value]) -> list[Node]:
    """Nodes that the roots reach, operands first. Iterative: graphs are deeper than the stack."""
    order: list[Node] = []
    state: dict[Node, bool] = {}
    for root in roots:
        stack = [(root.node, iter(root.node.inputs))]
        if root.node in state:
            continue
        state[root.node] = False
        while stack:
            node, operands = stack[-1]
            for value in operands:
                if value.node not in state:
                    state[value.node] = False
                    stack.append((value.node, iter(value.node.inputs)))
                    break
                if not state[value.node]:
                    raise ValueError(f"the graph has a cycle through {value.node.op}")
            else:
                stack.pop()
                state[node] = True
                order.append(node)
    return order
