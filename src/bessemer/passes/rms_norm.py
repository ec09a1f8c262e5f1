"""rms_norm(x, w) = x / sqrt(mean(x^2) + eps) * w."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Node, Value, emit
from bessemer.passes.base import RulePass, Uses
from bessemer.passes.pattern import match, mean, op, scalar, var

_X = var("x")
_ENERGY = mean(_X * _X) + scalar("eps")
_RMS_NORM = (
    (_X * op("rsqrt", _ENERGY))
    | (_X / op("sqrt", _ENERGY))
    | (_X * op("reciprocal", op("sqrt", _ENERGY)))
    | (_X * op("pow", _ENERGY, -0.5))
)
_PLAIN = var("norm", lambda v: v.op == "rms_norm" and len(v.node.inputs) == 1)
_WEIGHTED = _PLAIN * var("w", lambda v: len(v.shape) == 1)


@dataclass(frozen=True)
class RmsNorm(RulePass):
    """rms_norm(x, w) = x / sqrt(mean(x^2) + eps) * w; Gemma's 1 + w is arithmetic on weights."""

    name: ClassVar[str] = "rms_norm"

    def rule(self, node: Node, uses: Uses) -> Value | None:
        if node.op not in ("mul", "div"):
            return None
        found = match(_RMS_NORM, node.out)
        if found and found["x"].type == node.types[0]:
            return emit("rms_norm", found["x"], eps=float(found["eps"]))
        found = match(_WEIGHTED, node.out)
        if found and uses.once(found["norm"]) and found["w"].shape == node.types[0].shape[-1:]:
            norm = found["norm"].node
            return emit("rms_norm", *norm.inputs, found["w"], eps=norm.attrs["eps"])
        return None
