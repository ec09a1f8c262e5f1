"""exp, exp2, expm1, log, log1p, tanh, erf, sin and cos in f32, as arithmetic; scalars and vectors.

Every `math.exp` (and so on) on f32 becomes a call of a private function that LLVM inlines, so a
vector of any width stays in registers and a scalar loop still vectorises. All are right at zeros,
infinities, NaN and in the subnormal range, and within a few units in the last place elsewhere
(tests/backend/test_math.py has the bounds). `math.exp ... fastmath<afn>` is for arguments of at
most 0, the weights of a softmax, has a small error of 1 rather than of the result, and rounds
subnormal results to 0. `pow` and the rest call libm.

C libraries differ in the last bit of sines, and a model's logits with them; these are the same
wherever the code runs.

The polynomials are minimax fits, by Remez exchange in 40 digits, of the functions named beside
them, weighted so that the relative error of the result is equal over the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlir.ir as ir

# exp(r) = 1 + r + r^2 P(r), |r| <= ln(2)/2; relative error 3e-9.
_EXP = (
    0.4999999403953552,
    0.1666651964187622,
    0.04166839271783829,
    0.008368780836462975,
    0.0013814467238262296,
)
# 2^r = 1 + r P(r), |r| <= 1/2; relative error 1.1e-7.
_EXP2 = (
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.001326472614891827,
)
# log(1 + f) = f - f^2/2 + f^3 P(f), sqrt(1/2) <= 1 + f <= sqrt(2); relative error 6e-9.
_LOG = (
    0.33333316445350647,
    -0.25000810623168945,
    0.2000228613615036,
    -0.16624553501605988,
    0.14181192219257355,
    -0.13128754496574402,
    0.12881644070148468,
    -0.07859606295824051,
)
# tanh(x) = x + x^3 P(x^2), x^2 <= 0.4; relative error 5e-9.
_TANH = (
    -0.33333274722099304,
    0.13331274688243866,
    -0.05372512713074684,
    0.02058982662856579,
    -0.005648316349834204,
)
# erf(x) = x + x P(x^2), |x| <= 1; relative error 1e-9.
_ERF = (
    0.12837916612625122,
    -0.3761262595653534,
    0.11283600330352783,
    -0.026854444295167923,
    0.005189535673707724,
    -0.0008020842215046287,
    7.889122935011983e-05,
)
# -log(1 - erf(x)) = P(x), 1 <= x <= 4; error of erf 1.2e-9.
_ERF_TAIL = (
    0.00030044245067983866,
    1.127251386642456,
    0.637883186340332,
    0.10332725942134857,
    -0.021940384060144424,
    0.00297243008390069,
    -0.00018882236327044666,
)

# sin(r) = r + r^3 P(r^2), |r| <= pi/4; relative error 5e-12.
_SIN = (
    -0.1666666664074494,
    0.008333329298772316,
    -0.00019839310307742468,
    2.718102842856237e-06,
)
# cos(r) = 1 - r^2/2 + r^4 P(r^2), |r| <= pi/4; relative error 1e-10.
_COS = (0.04166664565091659, -0.0013887314659562762, 2.4432971145367326e-05)

# ln(2) in two parts: the first has 10 significant bits, so n * _LN2_HIGH is exact for |n| < 2^14.
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2) - _LN2_HIGH
# Adding 1.5 * 2^23 rounds an f32 to an integer, which is then in the low bits of the sum.
_ROUND = 12582912.0
_ROUND_BITS = 0x4B400000
# exp is 0 below and inf above; inside, the exponent of the result fits two scaling steps.
_EXP_RANGE = (-104.0, 89.0)
# Below -30 expm1 rounds to -1; above 80 to exp.
_EXPM1_RANGE = (-30.0, 89.0)
_EXPM1_IS_EXP = 80.0
_TINY = 2.0**-25
_EXP2_RANGE = (-150.0, 129.0)
_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23
_SMALLEST_NORMAL = 2.0**-126
_SQRT_HALF_BITS = 0x3F3504F3
# pi/2 in two parts: the first has 33 significant bits, so n * _HALF_PI_HIGH is exact for |n| < 2^20
# also where it is rounded before it is subtracted.
_HALF_PI_HIGH = 1.5707963267341256
_HALF_PI_LOW = 6.077100506506192e-11
# Rounds an f64 to an integer as _ROUND does an f32.
_ROUND_F64 = 1.5 * 2.0**52
# From here on neighbours in f32 are turns apart, and the sine of one means nothing: NaN shows it.
_ANGLE_LIMIT = 2.0**50


@dataclass
class FunctionBody:
    """Writes the body of one private function on `shape` x f32, as MLIR text.

    `prefix` is `""` for a scalar and `"8x"` or `"6x16x"` for a vector.
    """

    prefix: str
    lines: list[str] = field(default_factory=list)

    def type(self, element: str) -> str:
        """The MLIR type of `element` in this function's shape."""
        return f"vector<{self.prefix}{element}>" if self.prefix else element

    def emit(self, text: str) -> str:
        """Append one operation and return the name of its result."""
        name = f"%v{len(self.lines)}"
        self.lines.append(f"    {name} = {text}")
        return name

    def constant(self, value: float | int, element: str = "f32") -> str:
        """A constant, equal in all lanes. Integers and floats print exactly."""
        if element.startswith("f"):
            import struct

            bits, number, digits = ("<I", "<f", 8) if element == "f32" else ("<Q", "<d", 16)
            text = f"0x{struct.unpack(bits, struct.pack(number, value))[0]:0{digits}X}"
        else:
            text = str(int(value))
        literal = f"dense<{text}>" if self.prefix else text
        return self.emit(f"arith.constant {literal} : {self.type(element)}")

    def op(self, name: str, *operands: str, element: str = "f32", flags: str = "") -> str:
        """An operation whose operands and result have one type."""
        tail = f" fastmath<{flags}>" if flags else ""
        return self.emit(f"{name} {', '.join(operands)}{tail} : {self.type(element)}")

    def mul(self, a: str, b: str, element: str = "f32") -> str:
        """a * b, which may be fused with a following addition."""
        return self.op("arith.mulf", a, b, element=element, flags="contract")

    def add(self, a: str, b: str, element: str = "f32") -> str:
        """a + b, which may be fused with a multiplication before it."""
        return self.op("arith.addf", a, b, element=element, flags="contract")

    def sub(self, a: str, b: str, element: str = "f32") -> str:
        """a - b, which may be fused with a multiplication before it."""
        return self.op("arith.subf", a, b, element=element, flags="contract")

    def compare(self, predicate: str, a: str, b: str, element: str = "f32") -> str:
        """Lane-wise comparison: `arith.cmpf` for floats, `arith.cmpi` for integers."""
        name = "arith.cmpf" if element.startswith("f") else "arith.cmpi"
        return self.emit(f"{name} {predicate}, {a}, {b} : {self.type(element)}")

    def select(self, condition: str, a: str, b: str, element: str = "f32") -> str:
        """Lane-wise `condition ? a : b`."""
        kind = self.type(element)
        head = f"{self.type('i1')}, {kind}" if self.prefix else kind
        return self.emit(f"arith.select {condition}, {a}, {b} : {head}")

    def convert(self, name: str, value: str, source: str, result: str) -> str:
        """A conversion such as `arith.bitcast` or `arith.sitofp`."""
        return self.emit(f"{name} {value} : {self.type(source)} to {self.type(result)}")

    def polynomial(self, x: str, coefficients: Sequence[float], element: str = "f32") -> str:
        """Horner's rule, lowest coefficient first."""
        total = self.constant(coefficients[-1], element)
        for coefficient in reversed(coefficients[:-1]):
            product = self.mul(total, x, element)
            total = self.add(product, self.constant(coefficient, element), element)
        return total

    def absolute(self, x: str) -> str:
        """|x|"""
        return self.op("math.absf", x)

    def with_sign(self, magnitude: str, sign: str) -> str:
        """|magnitude| with the sign of `sign`."""
        return self.op("math.copysign", magnitude, sign)


def _power_of_two(b: FunctionBody, n: str) -> str:
    """2^n for an integer n in the range of normal numbers."""
    shifted = b.op("arith.addi", n, b.constant(_EXPONENT_BIAS, "i32"), element="i32")
    bits = b.op("arith.shli", shifted, b.constant(_MANTISSA_BITS, "i32"), element="i32")
    return b.convert("arith.bitcast", bits, "i32", "f32")


def _clamp(b: FunctionBody, x: str, bounds: tuple[float, float]) -> str:
    """x within bounds; a NaN stays (each comparison is false for it)."""
    low, high = (b.constant(v) for v in bounds)
    x = b.select(b.compare("olt", x, low), low, x)
    return b.select(b.compare("ogt", x, high), high, x)


def _round(b: FunctionBody, x: str) -> tuple[str, str]:
    """x rounded to the nearest integer, as f32 and as i32, for |x| < 2^22."""
    magic = b.constant(_ROUND)
    shifted = b.op("arith.addf", x, magic, flags="contract")
    bits = b.convert("arith.bitcast", shifted, "f32", "i32")
    number = b.op("arith.subi", bits, b.constant(_ROUND_BITS, "i32"), element="i32")
    return b.op("arith.subf", shifted, magic), number


def _expm1_reduced(b: FunctionBody, r: str) -> str:
    """exp(r) - 1, |r| <= ln(2)/2."""
    return b.add(b.mul(b.polynomial(r, _EXP), b.mul(r, r)), r)


def _exp_reduced(b: FunctionBody, r: str, n: str) -> str:
    """exp(r) * 2^n, |r| <= ln(2)/2. Two scaling steps reach subnormals and infinity."""
    value = b.add(_expm1_reduced(b, r), b.constant(1.0))
    half = b.op("arith.shrsi", n, b.constant(1, "i32"), element="i32")
    rest = b.op("arith.subi", n, half, element="i32")
    return b.op(
        "arith.mulf",
        b.op("arith.mulf", value, _power_of_two(b, half)),
        _power_of_two(b, rest),
    )


def _reduce(b: FunctionBody, x: str) -> tuple[str, str]:
    """(r, n) with x = r + n ln(2), |r| <= ln(2)/2, n an i32."""
    whole, n = _round(b, b.mul(x, b.constant(1 / math.log(2))))
    r = b.sub(x, b.mul(whole, b.constant(_LN2_HIGH)))
    return b.sub(r, b.mul(whole, b.constant(_LN2_LOW))), n


def _exp(b: FunctionBody, x: str) -> str:
    return _exp_reduced(b, *_reduce(b, _clamp(b, x, _EXP_RANGE)))


def _exp_falling(b: FunctionBody, x: str) -> str:
    """exp for x <= 0, with 0 for what is no normal number, as 2^n 2^r with n + r = x / ln(2).

    Half the instructions of `_exp`, and a shorter chain of them. x / ln(2) is rounded, so that the
    relative error is 1.7e-7 + 7.3e-8 |x|; of 1, the largest weight of a softmax, it is never more
    than 1.7e-7.
    """
    scaled = b.op("arith.mulf", x, b.constant(1 / math.log(2)))
    magic = b.constant(_ROUND)
    shifted = b.op("arith.addf", scaled, magic)
    r = b.op("arith.subf", scaled, b.op("arith.subf", shifted, magic))
    value = b.polynomial(r, (1.0, *_EXP2))
    # n is in the low bits of the sum; the exponent of 2^r takes it up.
    n = b.convert("arith.bitcast", shifted, "f32", "i32")
    n = b.op("arith.shli", n, b.constant(_MANTISSA_BITS, "i32"), element="i32")
    bits = b.op("arith.addi", b.convert("arith.bitcast", value, "f32", "i32"), n, element="i32")
    value = b.convert("arith.bitcast", bits, "i32", "f32")
    # A NaN is not below, and what became of -inf on the way does not matter.
    low = b.compare("olt", x, b.constant(math.log(_SMALLEST_NORMAL)))
    return b.select(low, b.constant(0.0), value)


def _expm1(b: FunctionBody, x: str) -> str:
    """2^n expm1(r) + (2^n - 1), which does not cancel; exp(x) where 2^n could overflow."""
    r, n = _reduce(b, _clamp(b, x, _EXPM1_RANGE))
    scale = _power_of_two(b, n)
    value = b.add(b.mul(scale, _expm1_reduced(b, r)), b.op("arith.subf", scale, b.constant(1.0)))
    large = b.compare("ogt", x, b.constant(_EXPM1_IS_EXP))
    value = b.select(large, _exp_reduced(b, r, n), value)
    return _keep_tiny(b, x, value)


def _keep_tiny(b: FunctionBody, x: str, value: str) -> str:
    """x itself where f(x) = x + O(x^2) rounds to x; keeps the sign of zero."""
    return b.select(b.compare("olt", b.absolute(x), b.constant(_TINY)), x, value)


def _log1p(b: FunctionBody, x: str) -> str:
    """log(u) + (x - (u - 1))/u with u = 1 + x rounded: the second term is what u lost of x."""
    one = b.constant(1.0)
    u = b.op("arith.addf", x, one)
    lost = b.op("arith.subf", x, b.op("arith.subf", u, one))
    logarithm = _log(b, u)
    value = b.op("arith.addf", logarithm, b.op("arith.divf", lost, u))
    # At -1 and infinity the second term is 0/0 and inf - inf.
    value = b.select(b.compare("oeq", x, b.constant(math.inf)), logarithm, value)
    value = b.select(b.compare("oeq", x, b.constant(-1.0)), logarithm, value)
    return _keep_tiny(b, x, value)


def _exp2(b: FunctionBody, x: str) -> str:
    x = _clamp(b, x, _EXP2_RANGE)
    whole, n = _round(b, x)
    r = b.mul(b.op("arith.subf", x, whole), b.constant(math.log(2)))
    return _exp_reduced(b, r, n)


def _log(b: FunctionBody, x: str) -> str:
    zero, infinity = b.constant(0.0), b.constant(math.inf)
    small = b.compare("olt", x, b.constant(_SMALLEST_NORMAL))
    scaled = b.select(small, b.op("arith.mulf", x, b.constant(2.0**_MANTISSA_BITS)), x)
    bits = b.convert("arith.bitcast", scaled, "f32", "i32")
    # Take the exponent relative to sqrt(1/2): the mantissa m is then in [sqrt(1/2), sqrt(2)).
    offset = b.op("arith.subi", bits, b.constant(_SQRT_HALF_BITS, "i32"), element="i32")
    exponent = b.op("arith.shrsi", offset, b.constant(_MANTISSA_BITS, "i32"), element="i32")
    shifted = b.op("arith.shli", exponent, b.constant(_MANTISSA_BITS, "i32"), element="i32")
    mantissa = b.convert(
        "arith.bitcast", b.op("arith.subi", bits, shifted, element="i32"), "i32", "f32"
    )
    correction = b.select(small, b.constant(_MANTISSA_BITS, "i32"), b.constant(0, "i32"), "i32")
    exponent = b.op("arith.subi", exponent, correction, element="i32")
    e = b.convert("arith.sitofp", exponent, "i32", "f32")
    f = b.op("arith.subf", mantissa, b.constant(1.0))
    square = b.mul(f, f)
    tail = b.mul(b.mul(b.polynomial(f, _LOG), f), square)
    tail = b.add(tail, b.mul(e, b.constant(_LN2_LOW)))
    tail = b.sub(tail, b.mul(square, b.constant(0.5)))
    value = b.add(b.add(tail, f), b.mul(e, b.constant(_LN2_HIGH)))
    value = b.select(b.compare("oeq", x, infinity), infinity, value)
    value = b.select(b.compare("oeq", x, zero), b.constant(-math.inf), value)
    # Negative or NaN: neither comparison with zero holds.
    return b.select(b.compare("oge", x, zero), value, b.constant(math.nan))


def _tanh(b: FunctionBody, x: str) -> str:
    square = b.mul(x, x)
    near = b.add(b.mul(b.mul(b.polynomial(square, _TANH), square), x), x)
    size = b.absolute(x)
    one = b.constant(1.0)
    grown = b.op("arith.addf", _exp(b, b.op("arith.addf", size, size)), one)
    far = b.op("arith.subf", one, b.op("arith.divf", b.constant(2.0), grown))
    limit = b.constant(0.625)  # x^2 stays below 0.4, and 1 - 2/(e^2x + 1) does not cancel
    return b.with_sign(b.select(b.compare("olt", size, limit), near, far), x)


def _erf(b: FunctionBody, x: str) -> str:
    square = b.mul(x, x)
    near = b.add(b.mul(b.polynomial(square, _ERF), x), x)
    size = b.absolute(x)
    limit = b.constant(4.0)  # erf(4) rounds to 1
    tail = b.select(b.compare("ogt", size, limit), limit, size)
    complement = _exp(b, b.emit(f"arith.negf {b.polynomial(tail, _ERF_TAIL)} : {b.type('f32')}"))
    far = b.op("arith.subf", b.constant(1.0), complement)
    return b.with_sign(b.select(b.compare("olt", size, b.constant(1.0)), near, far), x)


def _quadrant(b: FunctionBody, x: str) -> tuple[str, str]:
    """(r, n) with x = r + n pi/2, |r| <= pi/4 in f64, n modulo 2^32 in i32. NaN for inf and what is
    no angle any more.
    """
    limit = b.compare("olt", b.absolute(x), b.constant(_ANGLE_LIMIT))
    x = b.convert("arith.extf", b.select(limit, x, b.constant(math.nan)), "f32", "f64")
    turns = b.mul(x, b.constant(2 / math.pi, "f64"), "f64")
    shifted = b.add(turns, b.constant(_ROUND_F64, "f64"), "f64")
    whole = b.op("arith.subf", shifted, b.constant(_ROUND_F64, "f64"), element="f64")
    r = b.sub(x, b.mul(whole, b.constant(_HALF_PI_HIGH, "f64"), "f64"), "f64")
    r = b.sub(r, b.mul(whole, b.constant(_HALF_PI_LOW, "f64"), "f64"), "f64")
    bits = b.convert("arith.bitcast", shifted, "f64", "i64")
    return r, b.convert("arith.trunci", bits, "i64", "i32")


def _sine_from(b: FunctionBody, x: str, quarter: int) -> str:
    """sin(x + quarter * pi/2), rounded once from f64."""
    r, n = _quadrant(b, x)
    one, zero = b.constant(1.0, "f64"), b.constant(0, "i32")
    square = b.mul(r, r, "f64")
    # r times a factor, which keeps the sign of zero.
    sine = b.mul(b.polynomial(square, _SIN, "f64"), square, "f64")
    sine = b.mul(b.add(sine, one, "f64"), r, "f64")
    cosine = b.add(
        b.mul(b.polynomial(square, _COS, "f64"), square, "f64"), b.constant(-0.5, "f64"), "f64"
    )
    cosine = b.add(b.mul(cosine, square, "f64"), one, "f64")
    n = b.op("arith.addi", n, b.constant(quarter, "i32"), element="i32")

    def has(bit: int) -> str:
        masked = b.op("arith.andi", n, b.constant(bit, "i32"), element="i32")
        return b.compare("ne", masked, zero, "i32")

    value = b.select(has(1), cosine, sine, "f64")
    negative = b.emit(f"arith.negf {value} : {b.type('f64')}")
    return b.convert("arith.truncf", b.select(has(2), negative, value, "f64"), "f64", "f32")


def _sin(b: FunctionBody, x: str) -> str:
    return _sine_from(b, x, 0)


def _cos(b: FunctionBody, x: str) -> str:
    return _sine_from(b, x, 1)


_FUNCTIONS: dict[str, Callable[[FunctionBody, str], str]] = {
    "math.exp": _exp,
    "math.exp2": _exp2,
    "math.expm1": _expm1,
    "math.log": _log,
    "math.log1p": _log1p,
    "math.tanh": _tanh,
    "math.erf": _erf,
    "math.sin": _sin,
    "math.cos": _cos,
}
# What stands for an op that carries fastmath<afn>: name and body.
_APPROXIMATE = {"math.exp": ("exp_falling", _exp_falling)}


def shape_prefix(kind: ir.Type) -> str:
    """`""` for a scalar type, `"8x"` for vector<8xf32>."""
    text = str(kind)
    if not text.startswith("vector<"):
        return ""
    return text[len("vector<") : -1].rsplit("x", 1)[0] + "x"


def define(
    module: ir.Module,
    name: str,
    prefix: str,
    source: str,
    result: str,
    body: Callable[[FunctionBody, str], str],
) -> str:
    """Define the private function of `body` for one shape once; returns its symbol."""
    import mlir.ir as ir

    suffix = prefix.replace("[", "s").replace("]", "")
    symbol = f"bsm_{name}_{suffix}{source}"
    for op in module.body.operations:
        if op.operation.name == "func.func" and str(op.attributes["sym_name"]) == f'"{symbol}"':
            return symbol
    b = FunctionBody(prefix)
    value = body(b, "%x")
    text = "\n".join(
        [
            f"  func.func private @{symbol}(%x: {b.type(source)}) -> {b.type(result)} attributes "
            '{passthrough = ["alwaysinline", "nounwind"], '
            "llvm.linkage = #llvm.linkage<internal>} {",
            *b.lines,
            f"    return {value} : {b.type(result)}",
            "  }",
        ]
    )
    with ir.InsertionPoint.at_block_begin(module.body):
        ir.Operation.parse(text).clone()
    return symbol


def replace_by_call(op: ir.Operation, symbol: str) -> None:
    """Replace a one-operand, one-result operation by a call of `symbol`."""
    import mlir.ir as ir
    from mlir.dialects import func

    with ir.InsertionPoint(op), op.location:
        call = func.CallOp([op.results[0].type], symbol, [op.operands[0]])
    op.results[0].replace_all_uses_with(call.results[0])
    op.erase()


def expand(module: ir.Module) -> None:
    """Replace the math ops on f32 that have a function here. Works in place."""
    from bessemer.backend.pipeline import operations

    for op in operations(module):
        if op.name not in _FUNCTIONS:
            continue
        if not str(op.results[0].type).removesuffix(">").endswith("f32"):
            continue
        name, body = op.name.removeprefix("math."), _FUNCTIONS[op.name]
        if "afn" in str(op.attributes.get("fastmath")):
            name, body = _APPROXIMATE.get(op.name, (name, body))
        prefix = shape_prefix(op.results[0].type)
        replace_by_call(op, define(module, name, prefix, "f32", "f32", body))
