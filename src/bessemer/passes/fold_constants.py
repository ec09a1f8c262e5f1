"""Arithmetic on constants is done once, here: f(c1, c2) = c3; and x * 1 = x / 1 = x - 0 = x."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Env, Node, Value, constant, emit, evaluate_node
from bessemer.graph.dims import Dim, product
from bessemer.passes.base import RulePass, Uses
from bessemer.passes.pattern import scalar_of

# Constants stay in the text of a graph and in the code, so that they have to be small; this holds
# a table of frequencies or the bias of one head, and no weight of a model.
MAX_ELEMENTS = 4096
_SOURCES = frozenset({"constant", "iota"})


@dataclass(frozen=True)
class FoldConstants(RulePass):
    """f(c1, c2) = c3 for results of at most `max_elements`; x * 1 = x."""

    max_elements: int = MAX_ELEMENTS

    name: ClassVar[str] = "fold_constants"

    def rule(self, node: Node, uses: Uses) -> Value | tuple[Value, ...] | None:
        if node.op in _SOURCES:
            return None
        identity = _IDENTITIES.get(node.op)
        return (identity(node) if identity else None) or self._fold(node)

    def _fold(self, node: Node) -> tuple[Value, ...] | None:
        if not node.inputs or any(v.op not in _SOURCES for v in node.inputs):
            return None
        if not all(v.type.is_static for v in (*node.inputs, *node.outputs)):
            return None
        for kind in node.types:
            count = product(kind.shape)
            if isinstance(count, Dim) or count > self.max_elements:
                return None
        operands = [evaluate_node(v.node, [], Env())[0] for v in node.inputs]
        return tuple(constant(r, r.dtype) for r in evaluate_node(node, operands, Env()))


def _neutral(node: Node, places: tuple[int, ...], number: float) -> Value | None:
    """The other operand, where the one at a place is the neutral element and does not widen."""
    for place in places:
        other = node.inputs[1 - place]
        if _filling(node.inputs[place]) == number and other.type == node.types[0]:
            return other
    return None


def _filling(value: Value) -> float | None:
    """The number that every element of a value is, where that can be seen."""
    while value.op in ("expand", "reshape"):
        value = value.node.inputs[0]
    return scalar_of(value)


def _power(node: Node) -> Value | None:
    """pow(x, 2) = x * x, pow(x, 3) = x * x * x, pow(x, 1) = x."""
    x, exponent = node.inputs
    number = scalar_of(exponent)
    if x.type != node.types[0] or number not in (1, 2, 3):
        return None
    result = x
    for _ in range(int(number) - 1):
        result = emit("mul", result, x, loc=node.loc)
    return result


def _cast(node: Node) -> Value | None:
    return node.inputs[0] if node.inputs[0].type == node.types[0] else None


_IDENTITIES: dict[str, Callable[[Node], Value | None]] = {
    "mul": lambda node: _neutral(node, (0, 1), 1),
    "div": lambda node: _neutral(node, (1,), 1),
    "sub": lambda node: _neutral(node, (1,), 0),
    "pow": _power,
    "cast": _cast,
}
