"""layer_norm(x, w, b) = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + b."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Node, Value, emit
from bessemer.passes.base import RulePass, Uses
from bessemer.passes.pattern import Pattern, match, mean, op, scalar, var

_X, _C = var("x"), var("c")
_VARIANCE = mean(_C * _C) + scalar("eps")
_NORMALISED = (
    (_C * op("rsqrt", _VARIANCE))
    | (_C / op("sqrt", _VARIANCE))
    | (_C * op("reciprocal", op("sqrt", _VARIANCE)))
)
_CENTRED = _X - mean(_X)


def _is_vector(value: Value) -> bool:
    return len(value.shape) == 1


_UNSCALED = var("norm", lambda v: v.op == "layer_norm" and len(v.node.inputs) == 1)
_SCALED = var("norm", lambda v: v.op == "layer_norm" and len(v.node.inputs) == 2)
_WEIGHTED = _UNSCALED * var("w", _is_vector)
_BIASED = _SCALED + var("w", _is_vector)


@dataclass(frozen=True)
class LayerNorm(RulePass):
    """layer_norm(x, w, b) = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + b."""

    name: ClassVar[str] = "layer_norm"

    def rule(self, node: Node, uses: Uses) -> Value | None:
        if node.op in ("mul", "div"):
            return self._normalised(node) or self._with(node, uses, _WEIGHTED)
        if node.op == "add":
            return self._with(node, uses, _BIASED)
        return None

    @staticmethod
    def _normalised(node: Node) -> Value | None:
        found = match(_NORMALISED, node.out)
        centred = found and match(_CENTRED, found["c"])
        if not found or not centred or centred["x"].type != node.types[0]:
            return None
        return emit("layer_norm", centred["x"], eps=float(found["eps"]))

    @staticmethod
    def _with(node: Node, uses: Uses, equation: Pattern) -> Value | None:
        """The norm with one more operand, its weight or its bias."""
        found = match(equation, node.out)
        if not found or not uses.once(found["norm"]):
            return None
        if found["w"].shape != node.types[0].shape[-1:]:
            return None
        norm = found["norm"].node
        return emit("layer_norm", *norm.inputs, found["w"], eps=norm.attrs["eps"])
