"""What follows a linear layer element by element is its epilogue:
residual + scale * act(x w.T + b) = linear(x, w, b, residual).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Node, Value
from bessemer.graph.ops.elementwise import ACTIVATIONS
from bessemer.graph.schema import build_from
from bessemer.passes.attributes import float_of
from bessemer.passes.base import RulePass, Uses
from bessemer.passes.pattern import scalar_of


@dataclass(frozen=True)
class FuseEpilogues(RulePass):
    """residual + scale * act(x w.T + b) = linear(x, w, b, residual)."""

    name: ClassVar[str] = "fuse_epilogues"
    repeat: ClassVar[bool] = True

    def rule(self, node: Node, uses: Uses) -> Value | None:
        if node.op in ACTIVATIONS:
            return _activation(node, uses)
        if node.op in ("mul", "div"):
            return _scale(node, uses)
        if node.op == "add":
            return _residual(node, uses)
        return None


def _open_linear(y: Value, node: Node, uses: Uses) -> bool:
    """Whether y is a linear layer that only `node` uses, of its type, and without residual."""
    is_linear = y.op == "linear" and not y.node.attrs["has_residual"]
    return is_linear and uses.once(y) and y.type == node.types[0]


def _activation(node: Node, uses: Uses) -> Value | None:
    (y,) = node.inputs
    if not _open_linear(y, node, uses):
        return None
    if y.node.attrs["activation"] != "none" or y.node.attrs["scale"] != 1.0:
        return None
    return build_from("linear", y.node.inputs, {**y.node.attrs, "activation": node.op}).out


def _scale(node: Node, uses: Uses) -> Value | None:
    for y, other in (node.inputs, node.inputs[::-1]):
        number = scalar_of(other)
        if number is None or not _open_linear(y, node, uses):
            continue
        if node.op == "div" and y != node.inputs[0]:
            continue
        held = float_of(y.node, "scale")
        scale = held / number if node.op == "div" else held * number
        return build_from("linear", y.node.inputs, {**y.node.attrs, "scale": float(scale)}).out
    return None


def _residual(node: Node, uses: Uses) -> Value | None:
    """Of two linear layers the second takes the sum: the first one is computed before it."""
    for y, residual in (node.inputs[::-1], node.inputs):
        if _open_linear(y, node, uses) and residual.type == y.type and residual != y:
            return _with_residual(y, residual)
    for y, other in (node.inputs[::-1], node.inputs):
        # (r + a) + x = (x + r) + a, where a and r are linear layers (parallel blocks).
        if y.op == "linear" and y.node.attrs["has_residual"] and uses.once(y):
            inner = y.node.inputs[-1]
            if _open_linear(inner, node, uses) and other.type == y.type:
                chained = _with_residual(inner, other)
                return build_from("linear", (*y.node.inputs[:-1], chained), y.node.attrs).out
    return None


def _with_residual(y: Value, residual: Value) -> Value:
    attrs = {**y.node.attrs, "has_residual": True}
    return build_from("linear", (*y.node.inputs, residual), attrs, y.node.loc).out
