"""ATen to graph: elementwise arithmetic, comparisons, activations, casts and selection."""

from __future__ import annotations

import math
from typing import Any

from bessemer.graph import DType, Value
from bessemer.importer.aten import Builder, Complex, NoMapping, aten, operand, promoted

_UNARY = {
    "neg": "neg",
    "abs": "abs",
    "exp": "exp",
    "log": "log",
    "log1p": "log1p",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "reciprocal": "reciprocal",
    "sin": "sin",
    "cos": "cos",
    "erf": "erf",
    "floor": "floor",
    "ceil": "ceil",
    "relu": "relu",
    "silu": "silu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
# ATen name -> (graph op, the one for bool results, overloads)
_BINARY: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "mul": ("mul", "logical_and", ("Scalar",)),  # tensors may be complex: below
    "maximum": ("maximum", "logical_or", ("default",)),
    "minimum": ("minimum", "logical_and", ("default",)),
    "pow": ("pow", None, ("Tensor_Tensor", "Tensor_Scalar", "Scalar")),
    "floor_divide": ("floordiv", None, ("default", "Scalar")),
    "remainder": ("mod", None, ("Tensor", "Scalar")),
}
_COMPARE = {
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "not_equal": "ne",
}
_ON_BOOLS = ("Tensor", "Scalar")
_LOGICAL: dict[str, tuple[str, tuple[str, ...]]] = {
    "logical_and": ("logical_and", ("default",)),
    "logical_or": ("logical_or", ("default",)),
    "logical_xor": ("ne", ("default",)),
    "bitwise_and": ("logical_and", _ON_BOOLS),
    "bitwise_or": ("logical_or", _ON_BOOLS),
    "bitwise_xor": ("ne", _ON_BOOLS),
    "__and__": ("logical_and", _ON_BOOLS),
    "__or__": ("logical_or", _ON_BOOLS),
    "__xor__": ("ne", _ON_BOOLS),
}


def _unary(op: str) -> Any:
    return lambda b, x: b.emit(op, b.cast(x, b.out.dtype))


def _binary(op: str, on_bool: str | None) -> Any:
    def handler(b: Builder, x: Any, y: Any) -> Value:
        if b.out.dtype == DType.BOOL:
            if on_bool is None:
                raise NoMapping("arithmetic on bool tensors")
            return b.emit(on_bool, operand(b, x, DType.BOOL), operand(b, y, DType.BOOL))
        return b.emit(op, operand(b, x, b.out.dtype), operand(b, y, b.out.dtype))

    return handler


def _compare(op: str) -> Any:
    return lambda b, x, y: b.emit(op, *promoted(b, x, y))


def _logical(op: str) -> Any:
    def handler(b: Builder, x: Any, y: Any) -> Value:
        if b.out.dtype != DType.BOOL:
            raise NoMapping("bit operations on integers")
        return b.emit(op, as_bool(b, x), as_bool(b, y))

    return handler


for _name, _op in _UNARY.items():
    aten(f"{_name}.default")(_unary(_op))
for _name, (_op, _other, _kinds) in _BINARY.items():
    for _kind in _kinds:
        aten(f"{_name}.{_kind}")(_binary(_op, _other))
for _name, _op in _COMPARE.items():
    for _kind in ("Tensor", "Scalar"):
        aten(f"{_name}.{_kind}")(_compare(_op))
for _name, (_op, _kinds) in _LOGICAL.items():
    for _kind in _kinds:
        aten(f"{_name}.{_kind}")(_logical(_op))


def as_bool(b: Builder, x: Any) -> Value:
    """Whether elements are not zero."""
    if not isinstance(x, Value):
        return b.scalar(bool(x), DType.BOOL)
    return x if x.dtype == DType.BOOL else b.emit("ne", x, b.scalar(0, x.dtype))


@aten("mul.Tensor")
def _mul(b: Builder, x: Any, y: Any) -> Any:
    if isinstance(x, Complex) and isinstance(y, Complex):
        a, c = b.emit("mul", x.re, y.re), b.emit("mul", x.im, y.im)
        d, e = b.emit("mul", x.re, y.im), b.emit("mul", x.im, y.re)
        return Complex(b.emit("sub", a, c), b.emit("add", d, e))
    if isinstance(x, Complex) or isinstance(y, Complex):
        z, factor = (x, y) if isinstance(x, Complex) else (y, x)
        real = operand(b, factor, DType.F32)
        return Complex(b.emit("mul", z.re, real), b.emit("mul", z.im, real))
    return _binary("mul", "logical_and")(b, x, y)


@aten("add.Tensor", "add.Scalar")
def _add(b: Builder, x: Any, y: Any, *, alpha: Any = 1) -> Value:
    if b.out.dtype == DType.BOOL:
        return b.emit("logical_or", as_bool(b, x), as_bool(b, y))
    left, right = operand(b, x, b.out.dtype), operand(b, y, b.out.dtype)
    return b.emit("add", left, _scaled(b, right, alpha))


@aten("sub.Tensor", "sub.Scalar")
def _sub(b: Builder, x: Any, y: Any, *, alpha: Any = 1) -> Value:
    left, right = operand(b, x, b.out.dtype), operand(b, y, b.out.dtype)
    return b.emit("sub", left, _scaled(b, right, alpha))


@aten("rsub.Scalar", "rsub.Tensor")
def _rsub(b: Builder, x: Any, y: Any, alpha: Any = 1) -> Value:
    return _sub(b, y, x, alpha=alpha)


def _scaled(b: Builder, x: Value, alpha: Any) -> Value:
    return x if alpha == 1 else b.emit("mul", x, b.scalar(alpha, x.dtype))


@aten("div.Tensor", "div.Scalar", "true_divide.Tensor")
def _div(b: Builder, x: Any, y: Any) -> Value:
    return b.emit("div", operand(b, x, DType.F32), operand(b, y, DType.F32))


@aten("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(b: Builder, x: Any, y: Any, *, rounding_mode: str | None) -> Value:
    if rounding_mode is None:
        return _div(b, x, y)
    if rounding_mode != "floor":
        raise NoMapping(f"division with rounding_mode {rounding_mode!r}")
    return b.emit("floordiv", operand(b, x, b.out.dtype), operand(b, y, b.out.dtype))


@aten("square.default")
def _square(b: Builder, x: Value) -> Value:
    return b.emit("mul", x, x)


@aten("exp2.default")
def _exp2(b: Builder, x: Value) -> Value:
    return b.emit("pow", b.scalar(2.0, DType.F32), b.cast(x, DType.F32))


@aten("gelu.default")
def _gelu(b: Builder, x: Value, *, approximate: str = "none") -> Value:
    return b.emit("gelu_tanh" if approximate == "tanh" else "gelu", x)


@aten("softplus.default")
def _softplus(b: Builder, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    # Past the threshold torch returns x itself; softplus differs from it by less than 2e-9 there.
    if beta == 1:
        return b.emit("softplus", x)
    factor = b.scalar(float(beta), DType.F32)
    return b.emit("div", b.emit("softplus", b.emit("mul", x, factor)), factor)


@aten("log_sigmoid.default")
def _log_sigmoid(b: Builder, x: Value) -> Value:
    return b.emit("neg", b.emit("softplus", b.emit("neg", x)))


@aten("mish.default")
def _mish(b: Builder, x: Value) -> Value:
    return b.emit("mul", x, b.emit("tanh", b.emit("softplus", x)))


@aten("leaky_relu.default")
def _leaky_relu(b: Builder, x: Value, negative_slope: float = 0.01) -> Value:
    low = b.emit("mul", x, b.scalar(float(negative_slope), DType.F32))
    return b.emit("where", b.emit("gt", x, b.scalar(0.0, DType.F32)), x, low)


@aten("elu.default")
def _elu(b: Builder, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    if scale != 1 or input_scale != 1:
        raise NoMapping("elu with a scale")
    one = b.scalar(1.0, DType.F32)
    low = b.emit("sub", b.emit("exp", b.emit("minimum", x, b.scalar(0.0, DType.F32))), one)
    low = b.emit("mul", low, b.scalar(float(alpha), DType.F32))
    return b.emit("where", b.emit("gt", x, b.scalar(0.0, DType.F32)), x, low)


@aten("hardtanh.default", "clamp.default", "clip.default", "clamp.Tensor")
def _clamp(b: Builder, x: Value, min: Any = None, max: Any = None) -> Value:
    dtype = b.out.dtype
    result = b.cast(x, dtype)
    if min is not None:
        result = b.emit("maximum", result, operand(b, min, dtype))
    return result if max is None else b.emit("minimum", result, operand(b, max, dtype))


@aten("clamp_min.default", "clamp_min.Tensor")
def _clamp_min(b: Builder, x: Value, min: Any) -> Value:
    return _clamp(b, x, min)


@aten("clamp_max.default", "clamp_max.Tensor")
def _clamp_max(b: Builder, x: Value, max: Any) -> Value:
    return _clamp(b, x, None, max)


@aten("relu6.default")
def _relu6(b: Builder, x: Value) -> Value:
    return _clamp(b, x, 0, 6)


@aten("logical_not.default", "bitwise_not.default")
def _not(b: Builder, x: Value) -> Value:
    if b.out.dtype != DType.BOOL:
        raise NoMapping("bit operations on integers")
    return b.emit("logical_not", as_bool(b, x))


@aten("isnan.default")
def _isnan(b: Builder, x: Value) -> Value:
    return b.emit("ne", x, x)


@aten("isinf.default")
def _isinf(b: Builder, x: Value) -> Value:
    return b.emit("eq", b.emit("abs", x), b.scalar(math.inf, DType.F32))


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(b: Builder, condition: Value, x: Any, y: Any) -> Value:
    dtype = b.out.dtype
    return b.emit("where", as_bool(b, condition), operand(b, x, dtype), operand(b, y, dtype))


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(b: Builder, x: Value, mask: Value, value: Any) -> Value:
    return b.emit("where", mask, operand(b, value, x.dtype), x)


@aten("copy.default")
def _copy(b: Builder, x: Value, source: Any, non_blocking: bool = False) -> Value:
    return b.expand(operand(b, source, x.dtype), x.shape)


@aten("fill.Scalar", "fill.Tensor")
def _fill(b: Builder, x: Value, value: Any) -> Value:
    return b.expand(operand(b, value, x.dtype), x.shape)


@aten("zero.default")
def _zero(b: Builder, x: Value) -> Value:
    return b.fill(0, x.type)


@aten("polar.default")
def _polar(b: Builder, length: Value, angle: Value) -> Complex:
    re = b.emit("mul", length, b.emit("cos", angle))
    return Complex(re, b.emit("mul", length, b.emit("sin", angle)))


@aten("complex.default")
def _complex(b: Builder, re: Value, im: Value) -> Complex:
    return Complex(re, im)
