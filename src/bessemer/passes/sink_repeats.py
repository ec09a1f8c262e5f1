"""Repeated values are computed once: f(concat(x, x)) = concat(f(x), f(x)), and the same for
expand. The rotary tables cos(concat(a, a)) become concat(c, c) with c = cos(a), half as wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Node, Value, emit, schema_of
from bessemer.graph.schema import build_from
from bessemer.passes import views
from bessemer.passes.base import RulePass, Uses


@dataclass(frozen=True)
class SinkRepeats(RulePass):
    """f(concat(x, x)) = concat(f(x), f(x)) for elementwise f of one value and scalars."""

    name: ClassVar[str] = "sink_repeats"
    repeat: ClassVar[bool] = True

    def rule(self, node: Node, uses: Uses) -> Value | None:
        place = _repeated_operand(node)
        if place is None:
            return None
        x = node.inputs[place]
        shape = node.types[0].shape

        def apply(inner: Value) -> Value:
            operands = (*node.inputs[:place], inner, *node.inputs[place + 1 :])
            return build_from(node.op, operands, node.attrs, node.loc).out

        if x.op == "concat":
            one = apply(x.node.inputs[0])
            return emit("concat", *[one] * len(x.node.inputs), axis=x.node.attrs["axis"])
        below = apply(x.node.inputs[0])
        return (
            emit("expand", below, shape=shape) if x.op == "expand" else views.reshape(below, shape)
        )


def _repeated_operand(node: Node) -> int | None:
    """The place of the only operand that is not a scalar, if it is repeated."""
    if not schema_of(node.op).elementwise:
        return None
    wide = [i for i, v in enumerate(node.inputs) if views.without_units(v.shape)]
    if len(wide) != 1 or node.inputs[wide[0]].shape != node.types[0].shape:
        return None
    return wide[0] if _is_repeat(node.inputs[wide[0]]) else None


def _is_repeat(x: Value) -> bool:
    if x.op == "concat":
        return len(x.node.inputs) > 1 and len(set(x.node.inputs)) == 1
    if x.op == "reshape":
        source = x.node.inputs[0]
        return source.op == "expand" or _only_adds_units(source, x)
    return x.op == "expand"


def _only_adds_units(source: Value, x: Value) -> bool:
    """A reshape that only adds axes of one stands in front of an expand that repeats."""
    return views.without_units(source.shape) == views.without_units(x.shape) and len(
        source.shape
    ) < len(x.shape)
