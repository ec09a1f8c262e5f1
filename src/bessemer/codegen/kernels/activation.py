"""Activations of epilogues, on f32 scalars or vectors. Nothing assumes finite numbers."""

from __future__ import annotations

import math

from bessemer.codegen.emit import Fn
from bessemer.codegen.kernels.vectors import exp_falling
from bessemer.graph.ops.fused import CLAMPED


class FloatOps:
    """f32 arithmetic of one width: `lanes` elements, or a scalar when lanes is 0."""

    def __init__(self, fn: Fn, lanes: int) -> None:
        self.fn = fn
        self.lanes = lanes
        self.type = f"vector<{lanes}xf32>" if lanes else "f32"

    def const(self, value: float) -> str:
        return self.fn.splat(value, self.lanes) if self.lanes else self.fn.f32(value)

    def __call__(self, op: str, *operands: str) -> str:
        return self.fn.arith(op, *operands, type_=self.type)

    def exp_falling(self, x: str) -> str:
        """exp(x) for x <= 0, 0 below the normal numbers."""
        return exp_falling(self.fn, x, self.type)

    def less(self, a: str, b: str) -> str:
        """a < b, lane by lane; false for NaN."""
        return self.fn.op(f"arith.cmpf olt, {a}, {b} : {self.type}")

    def select(self, condition: str, a: str, b: str) -> str:
        """condition ? a : b, lane by lane."""
        kind = f"vector<{self.lanes}xi1>, {self.type}" if self.lanes else self.type
        return self.fn.select(condition, a, b, kind)

    def splat(self, scalar: str) -> str:
        """A scalar SSA value in every lane."""
        return self.fn.broadcast(scalar, self.lanes) if self.lanes else scalar


def sigmoid(o: FloatOps, x: str) -> str:
    """1 / (1 + exp(-x)): exp may overflow to inf, which gives the right 0."""
    e = o("math.exp", o("negf", x))
    return o("divf", o.const(1.0), o("addf", o.const(1.0), e))


def silu(o: FloatOps, x: str) -> str:
    """x / (1 + exp(-x)), by e = exp(-|x|), which is cheaper to compute than what may overflow:
    x * (x < 0 ? e : 1) / (1 + e).
    """
    e, one = o.exp_falling(o("negf", o("math.absf", x))), o.const(1.0)
    top = o.select(o.less(x, o.const(0.0)), e, one)
    return o("mulf", x, o("divf", top, o("addf", one, e)))


def gelu(o: FloatOps, x: str) -> str:
    """x/2 * (1 + erf(x / sqrt 2))."""
    e = o("math.erf", o("mulf", x, o.const(1 / math.sqrt(2))))
    return o("mulf", o("mulf", x, o.const(0.5)), o("addf", e, o.const(1.0)))


def gelu_tanh(o: FloatOps, x: str) -> str:
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))."""
    cube = o("mulf", o("mulf", o("mulf", o.const(0.044715), x), x), x)
    inner = o("mulf", o.const(math.sqrt(2 / math.pi)), o("addf", x, cube))
    t = o("math.tanh", inner)
    return o("mulf", o("mulf", x, o.const(0.5)), o("addf", t, o.const(1.0)))


def activate(o: FloatOps, name: str, x: str) -> str:
    """The activation `name` of bessemer.graph.ops.elementwise.ACTIVATIONS."""
    if name == "none":
        return x
    if name == "relu":
        return o("maximumf", x, o.const(0.0))
    if name == "tanh":
        return o("math.tanh", x)
    return {"silu": silu, "sigmoid": sigmoid, "gelu": gelu, "gelu_tanh": gelu_tanh}[name](o, x)


def gate(o: FloatOps, name: str, alpha: float, limit: float, g: str, u: str) -> str:
    """act(g) * u. Both are clamped by `limit` first in "silu_clamped", silu(g) * u, and in
    "swiglu_clamped", (u + 1) * g * sigmoid(alpha * g).
    """
    if name not in CLAMPED:
        return o("mulf", activate(o, name, g), u)
    g = o("minimumf", g, o.const(limit))
    u = o("maximumf", o("minimumf", u, o.const(limit)), o.const(-limit))
    if name == "silu_clamped":
        return o("mulf", silu(o, g), u)
    glu = o("mulf", g, sigmoid(o, o("mulf", g, o.const(alpha))))
    return o("mulf", o("addf", u, o.const(1.0)), glu)
