"""Activations that are spelt out: silu(x) = x * sigmoid(x), gelu(x) = x/2 * (1 + erf(x/sqrt 2)),
gelu_tanh(x) = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))), sigmoid(x) = 1 / (1 + exp(-x)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Node, Value, emit
from bessemer.passes.base import RulePass, Uses
from bessemer.passes.pattern import Pattern, match, op, var

_X = var("x")


def _halved(x: Pattern, t: Pattern) -> Pattern:
    """x / 2 * (1 + t), in every order of the products."""
    one = t + 1.0
    half = (x * 0.5) | (x / 2.0)
    half_one = (one * 0.5) | (one / 2.0)
    return (half * one) | (x * half_one) | ((x * one) * 0.5) | ((x * one) / 2.0)


_ROOT = math.sqrt(2 / math.pi)
_CUBED = _X * (_X * _X)
_BENT = (_X + _CUBED * 0.044715) | (_X * ((_X * _X) * 0.044715 + 1.0))
_SCALED = (
    (_BENT * _ROOT)
    | ((_X * _ROOT) * ((_X * _X) * 0.044715 + 1.0))
    | ((_X * _ROOT) * (_X * (_X * 0.044715) + 1.0))
)
_OVER_ROOT2 = (_X / math.sqrt(2)) | (_X * math.sqrt(0.5))
_EXP = op("exp", op("neg", _X)) + 1.0

_EQUATIONS: dict[str, Pattern] = {
    "silu": _X * op("sigmoid", _X),
    "gelu": _halved(_X, op("erf", _OVER_ROOT2)),
    "gelu_tanh": _halved(_X, op("tanh", _SCALED)),
    "sigmoid": op("reciprocal", _EXP) | op("div", 1.0, _EXP),
}
_ROOTS = frozenset({"mul", "div", "reciprocal"})


@dataclass(frozen=True)
class Activations(RulePass):
    """silu(x) = x * sigmoid(x), and gelu, gelu_tanh and sigmoid by their equations."""

    name: ClassVar[str] = "activations"

    def rule(self, node: Node, uses: Uses) -> Value | None:
        if node.op not in _ROOTS:
            return None
        for name, equation in _EQUATIONS.items():
            found = match(equation, node.out)
            if found and found["x"].type == node.types[0]:
                return emit(name, found["x"])
        return None
