"""f16 and bf16 conversions in integer arithmetic, where the target has no instruction for them.

LLVM would otherwise call compiler-rt (`__extendhfsf2`), one lane at a time. bf16 is always written
out: the AVX-512 instruction flushes subnormals. Rounding is to nearest, ties to even; subnormals,
infinities and NaN (with its sign) are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bessemer.backend.math_library import FunctionBody, define, replace_by_call, shape_prefix

if TYPE_CHECKING:
    import mlir.ir as ir

    from bessemer.backend.target import Target

_SIGN = 0x8000
_MAGNITUDE = 0x7FFF
_F32_MAGNITUDE = 0x7FFFFFFF
_F32_INFINITY = 0x7F800000
_F16_INFINITY = 0x7C00
_F16_SMALLEST_NORMAL = 0x0400
_F32_OF_F16_SMALLEST_NORMAL = 0x38800000  # 2^-14
_F32_OF_F16_OVERFLOW = 0x47800000  # 2^16; 65520 and above round up to infinity by the carry
_MANTISSA_DIFFERENCE = 23 - 10
_REBIAS = (127 - 15) << 23
_HALF_BITS = 126 << 23  # 0.5f: its last bit is worth 2^-24, the smallest f16 subnormal


def _i32(b: FunctionBody, value: int) -> str:
    return b.constant(value if value < 1 << 31 else value - (1 << 32), "i32")


def _int(b: FunctionBody, name: str, x: str, y: str | int) -> str:
    return b.op(f"arith.{name}", x, _i32(b, y) if isinstance(y, int) else y, element="i32")


def _wide_bits(b: FunctionBody, x: str, source: str) -> str:
    """The 16 bits of x in the low half of an i32."""
    return b.convert("arith.extui", b.convert("arith.bitcast", x, source, "i16"), "i16", "i32")


def _narrow(b: FunctionBody, bits: str, result: str) -> str:
    return b.convert("arith.bitcast", b.convert("arith.trunci", bits, "i32", "i16"), "i16", result)


def _extend_f16(b: FunctionBody, x: str) -> str:
    bits = _wide_bits(b, x, "f16")
    sign = _int(b, "shli", _int(b, "andi", bits, _SIGN), 16)
    magnitude = _int(b, "andi", bits, _MAGNITUDE)
    shifted = _int(b, "shli", magnitude, _MANTISSA_DIFFERENCE)
    normal = _int(b, "addi", shifted, _REBIAS)
    special = _int(b, "addi", normal, _REBIAS)
    # A subnormal's bits, put under the exponent of 2^-14, are that number plus 2^-14.
    with_one = b.convert("arith.bitcast", _int(b, "addi", normal, 1 << 23), "i32", "f32")
    least = b.convert("arith.bitcast", _i32(b, _REBIAS + (1 << 23)), "i32", "f32")
    subnormal = b.convert("arith.bitcast", b.op("arith.subf", with_one, least), "f32", "i32")
    is_special = b.compare("uge", magnitude, _i32(b, _F16_INFINITY), "i32")
    is_subnormal = b.compare("ult", magnitude, _i32(b, _F16_SMALLEST_NORMAL), "i32")
    value = b.select(is_special, special, normal, "i32")
    value = b.select(is_subnormal, subnormal, value, "i32")
    return b.convert("arith.bitcast", _int(b, "ori", value, sign), "i32", "f32")


def _truncate_f16(b: FunctionBody, x: str) -> str:
    bits = b.convert("arith.bitcast", x, "f32", "i32")
    magnitude = _int(b, "andi", bits, _F32_MAGNITUDE)
    sign = _int(b, "andi", _int(b, "shrui", bits, 16), _SIGN)
    odd = _int(b, "andi", _int(b, "shrui", magnitude, _MANTISSA_DIFFERENCE), 1)
    rounded = _int(b, "addi", _int(b, "addi", magnitude, (1 << 12) - 1), odd)
    normal = _int(b, "shrui", _int(b, "subi", rounded, _REBIAS), _MANTISSA_DIFFERENCE)
    # Adding 0.5 leaves the value in units of 2^-24 in the low bits, rounded by the hardware.
    sum_ = b.op(
        "arith.addf",
        b.convert("arith.bitcast", magnitude, "i32", "f32"),
        b.convert("arith.bitcast", _i32(b, _HALF_BITS), "i32", "f32"),
    )
    subnormal = _int(b, "subi", b.convert("arith.bitcast", sum_, "f32", "i32"), _HALF_BITS)
    is_nan = b.compare("ugt", magnitude, _i32(b, _F32_INFINITY), "i32")
    special = b.select(is_nan, _i32(b, 0x7E00), _i32(b, _F16_INFINITY), "i32")
    is_special = b.compare("uge", magnitude, _i32(b, _F32_OF_F16_OVERFLOW), "i32")
    is_subnormal = b.compare("ult", magnitude, _i32(b, _F32_OF_F16_SMALLEST_NORMAL), "i32")
    value = b.select(is_special, special, normal, "i32")
    value = b.select(is_subnormal, subnormal, value, "i32")
    return _narrow(b, _int(b, "ori", value, sign), "f16")


def _extend_bf16(b: FunctionBody, x: str) -> str:
    return b.convert("arith.bitcast", _int(b, "shli", _wide_bits(b, x, "bf16"), 16), "i32", "f32")


def _truncate_bf16(b: FunctionBody, x: str) -> str:
    bits = b.convert("arith.bitcast", x, "f32", "i32")
    high = _int(b, "shrui", bits, 16)
    rounded = _int(b, "addi", _int(b, "addi", bits, _MAGNITUDE), _int(b, "andi", high, 1))
    is_nan = b.compare("ugt", _int(b, "andi", bits, _F32_MAGNITUDE), _i32(b, _F32_INFINITY), "i32")
    quiet = _int(b, "ori", high, 0x0040)
    return _narrow(b, b.select(is_nan, quiet, _int(b, "shrui", rounded, 16), "i32"), "bf16")


_CONVERSIONS: dict[tuple[str, str, str], Callable[[FunctionBody, str], str]] = {
    ("arith.extf", "f16", "f32"): _extend_f16,
    ("arith.truncf", "f32", "f16"): _truncate_f16,
    ("arith.extf", "bf16", "f32"): _extend_bf16,
    ("arith.truncf", "f32", "bf16"): _truncate_bf16,
}


def _element(kind: ir.Type) -> str:
    text = str(kind).removesuffix(">")
    return text[text.rfind("x") + 1 :] if "<" in text else text


def expand(module: ir.Module, target: Target) -> None:
    """Replace the conversions that `target` has no exact instruction for. Works in place."""
    from bessemer.backend.pipeline import operations

    for op in operations(module):
        if op.name not in ("arith.extf", "arith.truncf"):
            continue
        source, result = _element(op.operands[0].type), _element(op.results[0].type)
        body = _CONVERSIONS.get((op.name, source, result))
        if body is None or ("f16" in (source, result) and target.has_f16c):
            continue
        name = "extend" if op.name == "arith.extf" else f"truncate_{result}"
        prefix = shape_prefix(op.operands[0].type)
        replace_by_call(op, define(module, name, prefix, source, result, body))
