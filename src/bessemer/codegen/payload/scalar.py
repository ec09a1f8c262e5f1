"""Arithmetic on one element, as MLIR text: what the body of a payload's loop is made of.

A `Scalars` writes for one element type. The formulas are those of the NumPy references, with their
results at zeros, infinities and NaN; integer division by zero gives 0 as in NumPy (the machine's
instruction would trap).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bessemer.codegen.emit import Fn, f32_literal
from bessemer.graph.dtypes import DType

ELEMENT = {
    DType.F32: "f32",
    DType.F16: "f16",
    DType.I64: "i64",
    DType.I32: "i32",
    DType.BOOL: "i1",
}
# A bool is a byte in memory, 0 or 1: memrefs of i1 have no lowering.
BOOL_BYTE = "i8"
MEMORY = {**ELEMENT, DType.BOOL: BOOL_BYTE}
_BITS = {DType.I64: 64, DType.I32: 32, DType.BOOL: 1}
_FLOAT_PREDICATES = {
    "eq": "oeq",
    "ne": "une",
    "lt": "olt",
    "le": "ole",
    "gt": "ogt",
    "ge": "oge",
}


def literal(value: float | int | bool, dtype: DType) -> str:
    """The text of an attribute of this type: `1.5e+00`, `7`, `true`."""
    if dtype == DType.BOOL:
        return "true" if value else "false"
    if not dtype.is_float:
        return str(int(value))
    if dtype == DType.F16:
        import struct

        return f"0x{struct.unpack('<H', struct.pack('<e', value))[0]:04X}"
    return f32_literal(float(value))


@dataclass(frozen=True)
class Scalars:
    """Ops on SSA scalars of one graph dtype; each method returns the SSA name of its result."""

    fn: Fn
    dtype: DType

    @property
    def type(self) -> str:
        return ELEMENT[self.dtype]

    @property
    def is_float(self) -> bool:
        return self.dtype.is_float

    def const(self, value: float | int | bool) -> str:
        text = literal(value, self.dtype)
        typed = text if self.dtype == DType.BOOL else f"{text} : {self.type}"
        return self.fn.constant(f"arith.constant {typed}")

    def op(self, name: str, *operands: str, flags: str = "") -> str:
        tail = f" fastmath<{flags}>" if flags else ""
        return self.fn.op(f"{name} {', '.join(operands)}{tail} : {self.type}")

    def _pick(self, float_op: str, int_op: str, bool_op: str | None, a: str, b: str) -> str:
        if self.is_float:
            return self.op(float_op, a, b)
        if self.dtype == DType.BOOL:
            if bool_op is None:
                raise TypeError(f"{int_op} is not defined for bool")
            return self.op(bool_op, a, b)
        return self.op(int_op, a, b)

    def add(self, a: str, b: str) -> str:
        return self._pick("arith.addf", "arith.addi", "arith.ori", a, b)

    def sub(self, a: str, b: str) -> str:
        return self._pick("arith.subf", "arith.subi", None, a, b)

    def mul(self, a: str, b: str) -> str:
        return self._pick("arith.mulf", "arith.muli", "arith.andi", a, b)

    def maximum(self, a: str, b: str) -> str:
        return self._pick("arith.maximumf", "arith.maxsi", "arith.ori", a, b)

    def minimum(self, a: str, b: str) -> str:
        return self._pick("arith.minimumf", "arith.minsi", "arith.andi", a, b)

    def accumulate(self, kind: str, total: str, value: str) -> str:
        """One step of a reduction: "sum", "prod", "max" or "min". Float sums may be reordered,
        so that they vectorise; that makes them more accurate, too.
        """
        if kind == "sum" and self.is_float:
            return self.op("arith.addf", total, value, flags="reassoc,contract")
        if kind == "prod" and self.is_float:
            return self.op("arith.mulf", total, value, flags="reassoc")
        step = {"sum": self.add, "prod": self.mul, "max": self.maximum, "min": self.minimum}
        return step[kind](total, value)

    def neutral(self, kind: str) -> str:
        """What a reduction of this kind starts from."""
        if kind in ("sum", "prod"):
            return self.const(0 if kind == "sum" else 1)
        if self.is_float:
            return self.const(-math.inf if kind == "max" else math.inf)
        if self.dtype == DType.BOOL:
            return self.const(kind == "min")
        least = -(1 << (_BITS[self.dtype] - 1))
        return self.const(least if kind == "max" else -least - 1)

    def product(self, a: str, b: str) -> str:
        """a * b, which may be fused with the accumulation after it."""
        return self.op("arith.mulf", a, b, flags="contract") if self.is_float else self.mul(a, b)

    def compare(self, predicate: str, a: str, b: str) -> str:
        """An i1; predicate is eq, ne, lt, le, gt or ge, with NaN unequal to everything."""
        if self.is_float:
            return self.op(f"arith.cmpf {_FLOAT_PREDICATES[predicate]},", a, b)
        if predicate not in ("eq", "ne"):
            predicate = ("u" if self.dtype == DType.BOOL else "s") + predicate
        return self.op(f"arith.cmpi {predicate},", a, b)

    def select(self, condition: str, a: str, b: str) -> str:
        return self.op("arith.select", condition, a, b)

    def neg(self, a: str) -> str:
        return self.op("arith.negf", a) if self.is_float else self.sub(self.const(0), a)

    def abs(self, a: str) -> str:
        return self.op("math.absf" if self.is_float else "math.absi", a)

    # --- division ---------------------------------------------------------------------------------

    def div(self, a: str, b: str) -> str:
        """a / b; of integers, cut towards zero."""
        if self.is_float:
            return self.op("arith.divf", a, b)
        return self._guarded(a, b, lambda a, b: self.op("arith.divsi", a, b))

    def floordiv(self, a: str, b: str) -> str:
        """numpy.floor_divide."""
        if not self.is_float:
            return self._guarded(a, b, lambda a, b: self.op("arith.floordivsi", a, b))
        zero, one = self.const(0), self.const(1)
        quotient = self.div(a, b)
        _, borrowed = self._float_mod(a, b)
        exact = self.div(self.sub(a, self.op("arith.remf", a, b)), b)
        exact = self.select(borrowed, self.sub(exact, one), exact)
        down = self.op("math.floor", exact)
        up = self.compare("gt", self.sub(exact, down), self.const(0.5))
        down = self.select(up, self.add(down, one), down)
        signed_zero = self.op("math.copysign", zero, quotient)
        down = self.select(self.compare("eq", exact, zero), signed_zero, down)
        return self.select(self.compare("eq", b, zero), quotient, down)

    def mod(self, a: str, b: str) -> str:
        """numpy.mod: the result has the sign of b."""
        if self.is_float:
            return self._float_mod(a, b)[0]
        zero, minus_one = self.const(0), self.const(-1)
        is_zero, is_minus_one = self.compare("eq", b, zero), self.compare("eq", b, minus_one)
        trivial = self.fn.op(f"arith.ori {is_zero}, {is_minus_one} : i1")
        rest = self.op("arith.remsi", a, self.select(trivial, self.const(1), b))
        differ = self.compare("lt", self.op("arith.xori", rest, b), zero)
        wrong = self.fn.op(f"arith.andi {differ}, {self.compare('ne', rest, zero)} : i1")
        return self.select(trivial, zero, self.select(wrong, self.add(rest, b), rest))

    def _float_mod(self, a: str, b: str) -> tuple[str, str]:
        """numpy.mod, and whether b was added to get the sign right."""
        zero = self.const(0)
        rest = self.op("arith.remf", a, b)
        b_negative = self.compare("lt", b, zero)
        signs = self.fn.op(f"arith.xori {b_negative}, {self.compare('lt', rest, zero)} : i1")
        borrowed = self.fn.op(f"arith.andi {signs}, {self.compare('ne', rest, zero)} : i1")
        moved = self.select(borrowed, self.add(rest, b), rest)
        signed_zero = self.op("math.copysign", zero, b)
        moved = self.select(self.compare("eq", rest, zero), signed_zero, moved)
        return moved, borrowed

    def _guarded(self, a: str, b: str, divide: Callable[[str, str], str]) -> str:
        """Integer division that gives 0 for b = 0 and wraps for b = -1."""
        zero, minus_one = self.const(0), self.const(-1)
        is_zero, is_minus_one = self.compare("eq", b, zero), self.compare("eq", b, minus_one)
        trivial = self.fn.op(f"arith.ori {is_zero}, {is_minus_one} : i1")
        quotient = divide(a, self.select(trivial, self.const(1), b))
        quotient = self.select(is_minus_one, self.sub(zero, a), quotient)
        return self.select(is_zero, zero, quotient)

    # --- powers and functions ---------------------------------------------------------------------

    def pow(self, a: str, b: str) -> str:
        """a ** b; of integers by repeated squaring, 0 for a negative exponent."""
        if self.is_float:
            return self.op("math.powf", a, b)
        zero, one, two = self.const(0), self.const(1), self.const(2)
        total, base, left = self.fn.fresh(), self.fn.fresh(), self.fn.fresh()
        names = ", ".join(self.fn.fresh() for _ in range(3))
        first = names.split(", ")[0]
        t = self.type
        start = self.select(self.compare("lt", b, zero), zero, one)
        self.fn.line(
            f"{names} = scf.while ({total} = {start}, {base} = {a}, {left} = {b}) : "
            f"({t}, {t}, {t}) -> ({t}, {t}, {t}) {{"
        )
        more = self.compare("gt", left, zero)
        self.fn.line(f"scf.condition({more}) {total}, {base}, {left} : {t}, {t}, {t}")
        self.fn.line("} do {")
        total, base, left = self.fn.fresh(), self.fn.fresh(), self.fn.fresh()
        self.fn.line(f"^bb0({total}: {t}, {base}: {t}, {left}: {t}):")
        odd = self.compare("ne", self.op("arith.andi", left, one), zero)
        grown = self.select(odd, self.mul(total, base), total)
        rest = self.op("arith.divsi", left, two)
        self.fn.line(f"scf.yield {grown}, {self.mul(base, base)}, {rest} : {t}, {t}, {t}")
        self.fn.line("}")
        return first

    def exp(self, x: str) -> str:
        return self.op("math.exp", x)

    def log1p(self, x: str) -> str:
        """log(1 + x) without cancellation: log(u) * x / (u - 1) with u = 1 + x as rounded."""
        one = self.const(1)
        u = self.add(x, one)
        exact = self.mul(self.op("math.log", u), self.div(x, self.sub(u, one)))
        plain = self.compare("eq", u, one)
        infinite = self.compare("eq", x, self.const(math.inf))
        same = self.fn.op(f"arith.ori {plain}, {infinite} : i1")
        return self.select(same, x, exact)

    def sigmoid(self, x: str) -> str:
        """1 / (1 + exp(-x)), without overflow on either side."""
        one = self.const(1)
        e = self.exp(self.neg(self.abs(x)))
        up = self.select(self.compare("ge", x, self.const(0)), one, e)
        return self.div(up, self.add(one, e))

    def gelu(self, x: str) -> str:
        scaled = self.mul(x, self.const(1 / math.sqrt(2)))
        grown = self.add(self.const(1), self.op("math.erf", scaled))
        return self.mul(self.mul(self.const(0.5), x), grown)

    def gelu_tanh(self, x: str) -> str:
        cube = self.mul(self.mul(self.mul(self.const(0.044715), x), x), x)
        inner = self.mul(self.const(math.sqrt(2 / math.pi)), self.add(x, cube))
        grown = self.add(self.const(1), self.op("math.tanh", inner))
        return self.mul(self.mul(self.const(0.5), x), grown)

    def softplus(self, x: str) -> str:
        tail = self.log1p(self.exp(self.neg(self.abs(x))))
        return self.add(self.maximum(x, self.const(0)), tail)

    def cast(self, x: str, to: DType) -> str:
        """Another element type; float to int cuts, anything but zero is true."""
        if to == self.dtype:
            return x
        if to == DType.BOOL:
            return self.compare("ne", x, self.const(0))
        if self.is_float and to.is_float:
            name = "arith.extf" if to == DType.F32 else "arith.truncf"
        elif self.is_float:
            name = "arith.fptosi"
        elif to.is_float:
            name = "arith.uitofp" if self.dtype == DType.BOOL else "arith.sitofp"
        elif self.dtype == DType.BOOL:
            name = "arith.extui"
        else:
            name = "arith.extsi" if _BITS[to] > _BITS[self.dtype] else "arith.trunci"
        return self.fn.op(f"{name} {x} : {self.type} to {ELEMENT[to]}")
