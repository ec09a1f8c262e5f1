"""Low-precision steps in f32: round trips through E4M3 and E2M1, and the Hadamard rotation.

`round_trip`: x[ROWS, (H,) D], out; attributes format, block, begin, end.  `hadamard`: x, out.
The rules are those of `bessemer.graph.ops.rounding`, bit for bit: a block's scale is the least
power of two for which its largest magnitude fits the format; numbers are rounded to nearest, ties
to even. The helpers work on vectors and on scalars, and serve other kernels as well.
"""

from __future__ import annotations

from collections.abc import Callable

from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.activation import FloatOps
from bessemer.codegen.kernels.vectors import (
    Array,
    columns,
    horizontal,
    operand,
    pieces,
    vector_type,
    vgreater,
)
from bessemer.graph.ops.rounding import NARROW, NarrowFormat

_EXPONENT = 0x7F800000  # of an f32: its bits with only these set are a power of two
_FRACTION = 0x007FFFFF
# x + m - m with m = 1.5 * 2**23 * step rounds x to multiples of step, to nearest even: the sum has
# exponent 23 + log2(step), so that its last bit is worth one step. 1.5 keeps it there for x < 0.
_ROUNDER = 1.5 * 2.0**23


class Bits:
    """Integer arithmetic on the bits of f32 values of a width."""

    def __init__(self, o: FloatOps) -> None:
        self.f, self.o = o.fn, o
        self.type = f"vector<{o.lanes}xi32>" if o.lanes else "i32"

    def const(self, value: int) -> str:
        if self.o.lanes:
            return self.f.constant(f"arith.constant dense<{value}> : {self.type}")
        return self.f.constant(f"arith.constant {value} : i32")

    def of(self, x: str) -> str:
        return self.f.op(f"arith.bitcast {x} : {self.o.type} to {self.type}")

    def float(self, bits: str) -> str:
        return self.f.op(f"arith.bitcast {bits} : {self.type} to {self.o.type}")

    def __call__(self, op: str, a: str, b: str) -> str:
        return self.f.op(f"arith.{op} {a}, {b} : {self.type}")


def scale_of(o: FloatOps, amax: str, narrow: NarrowFormat) -> str:
    """The least power of two s with amax / s <= the format's largest number."""
    bits = Bits(o)
    floored = o("maximumf", amax, o.const(narrow.floor))
    ratio = bits.of(o("divf", floored, o.const(narrow.largest)))
    up = bits("addi", ratio, bits.const(_FRACTION))
    return bits.float(bits("andi", up, bits.const(_EXPONENT)))


def rounded(o: FloatOps, x: str, narrow: NarrowFormat) -> str:
    """x in the format, magnitudes clamped to its largest."""
    bits, largest = Bits(o), narrow.largest
    x = o("minimumf", o("maximumf", x, o.const(-largest)), o.const(largest))
    binade = bits.float(bits("andi", bits.of(x), bits.const(_EXPONENT)))
    binade = o("maximumf", binade, o.const(2.0**narrow.least_exponent))
    magic = o("mulf", binade, o.const(_ROUNDER * 2.0**-narrow.mantissa))
    return o("subf", o("addf", x, magic), magic)


def round_block(
    f: Fn, source: Array, to: Array, place: list[str], first: str, block: int, spec: tuple[str, int]
) -> None:
    """One block of elements [first, first + block) of source[place] into `to`. spec: the format
    and the target's lanes.
    """
    name, lanes = spec
    narrow = NARROW[name]
    o = FloatOps(f, 0)
    amax = f.f32(0.0)
    for offset, width in pieces(block, lanes):
        part = source.vload(f, width, *place, f.offset(first, offset))
        part = f.arith("math.absf", part, type_=vector_type(width))
        amax = o("maximumf", amax, horizontal(f, part, width, vgreater))
    scale = scale_of(o, amax, narrow)
    for offset, width in pieces(block, lanes):
        wide, at = FloatOps(f, width), f.offset(first, offset)
        by = wide.splat(scale)
        value = wide("divf", source.vload(f, width, *place, at), by)
        value = wide("mulf", rounded(wide, value, narrow), by)
        to.vstore(f, value, width, *place, at)


def round_span(
    f: Fn,
    source: Array,
    to: Array,
    place: list[str],
    span: tuple[int, int],
    block: int,
    spec: tuple[str, int],
) -> None:
    """All blocks of elements [begin, end)."""
    begin, end = span
    with f.loop(f.index(begin), f.index(end), block) as at:
        round_block(f, source, to, place, at.iv, block, spec)


def rotate_hadamard(f: Fn, source: Array, to: Array, place: list[str], width: int) -> None:
    """to[place] = H source[place] / sqrt(width), by log2(width) rounds of sums and differences."""
    o = FloatOps(f, 0)
    half = 1
    while half < width:
        given = source if half == 1 else to
        with (
            f.loop(f.index(0), f.index(width), 2 * half) as pair,
            f.loop(f.index(0), f.index(half)) as i,
        ):
            low = f.add(pair.iv, i.iv)
            high = f.offset(low, half)
            a, b = given.load(f, *place, low), given.load(f, *place, high)
            to.store(f, o("addf", a, b), *place, low)
            to.store(f, o("subf", a, b), *place, high)
        half *= 2
    given = source if half == 1 else to
    with f.loop(f.index(0), f.index(width)) as i:
        value = o("mulf", given.load(f, *place, i.iv), o.const(width**-0.5))
        to.store(f, value, *place, i.iv)


def _each_row(f: Fn, spec: GroupSpec, body: Callable[[list[str]], None]) -> None:
    """body([row, (head)]) for every row of the operands' last axis."""
    inner = spec.operands[0].shape[1:-1]
    with f.loop("%begin", "%end") as row:
        if not inner:
            body([row.iv])
            return
        with f.loop(f.index(0), f.index(int(inner[0]))) as head:
            body([row.iv, head.iv])


def emit_round_trip(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    x, out = operand(spec, 0), operand(spec, 1)
    width = int(spec.operands[0].shape[-1])
    begin, end = spec.attr("begin"), spec.attr("end")

    def row(place: list[str]) -> None:
        for first, count in ((0, begin), (end, width - end)):
            for at, lanes in columns(f, count, target.lanes):
                value = x.vload(f, lanes, *place, f.offset(at, first))
                out.vstore(f, value, lanes, *place, f.offset(at, first))
        how = (spec.attr("format"), target.lanes)
        round_span(f, x, out, place, (begin, end), spec.attr("block"), how)

    _each_row(f, spec, row)


def emit_hadamard(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    x, out = operand(spec, 0), operand(spec, 1)
    width = int(spec.operands[0].shape[-1])
    _each_row(f, spec, lambda place: rotate_hadamard(f, x, out, place, width))


register(Kernel("round_trip", "rows", emit_round_trip))
register(Kernel("hadamard", "rows", emit_hadamard))
