"""Rows of activations as 16-bit integers, for products with quantised weights.

x[32 b + i] = s[b] * q[32 b + i] in blocks of 32, as deep as those of the weights. s is a power of
two, so that small integers keep their very values; q has 15 bits and a sign, which is 256 times
finer than the 8 bits that engines usually give to activations, and costs no more: AVX2 multiplies
pairs of 16-bit integers at twice the rate of floats.

A block with an infinity or a NaN gets an infinite scale: what it touches is not finite either.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.artifact.layout import Q8_DEPTH
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, Operand, register
from bessemer.codegen.kernels.vectors import (
    Array,
    ScratchPlan,
    operand,
    pieces,
    tree,
    vector_type,
)

LARGEST = 32767.0
# The largest magnitude of a block lies in [2^14, 2^15) after scaling.
SCALE_BITS = 14
# The least magnitude that a scale is made for: its reciprocal is still a finite float32, and
# what is smaller is zero beside any other number that matters.  2^-110, as the bits of a float32.
LEAST_BITS = (127 - 110) << 23
# 1.5 * 2^23: adding it rounds a float32 below 2^22 to a whole number, ties to even.
ROUNDER = 12582912.0
# Bits of a float32: its exponent, and all but its sign.
EXPONENT = 0x7F800000
MAGNITUDE = 0x7FFFFFFF


def blocks(depth: int) -> int:
    """Blocks of a row; the last one is filled up with zeros."""
    return -(-depth // Q8_DEPTH)


@dataclass(frozen=True)
class IntegerRows:
    """Where quantised rows lie. q: i16 [..., 32 * blocks].  scales: f32 [..., blocks]."""

    q: Array
    scales: Array

    def pair(self, f: Fn, lanes: int, at: list[str], k: str) -> str:
        """q[at, k] and q[at, k + 1] side by side in every pair of a vector of 2 * lanes i16."""
        place = ", ".join([*at, k])
        two = f.op(f"vector.load {self.q.name}[{place}] : {self.q.type}, vector<2xi16>")
        word = f.op(f"vector.bitcast {two} : vector<2xi16> to vector<1xi32>")
        word = f.op(f"vector.extract {word}[0] : i32 from vector<1xi32>")
        words = f.op(f"vector.broadcast {word} : i32 to vector<{lanes}xi32>")
        return f.op(f"vector.bitcast {words} : vector<{lanes}xi32> to vector<{2 * lanes}xi16>")

    def scale(self, f: Fn, lanes: int, at: list[str], block: str) -> str:
        """s[at, block] in every lane."""
        return f.broadcast(self.scales.load(f, *at, block), lanes)


def pair_dot(f: Fn, target: CodegenTarget, a: str, b: str) -> str:
    """y[i] = a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1]: i32 lanes of i16 vectors twice as long.

    LLVM does not find x86's instruction when one side is broadcast, so it is named where there is
    one.
    """
    lanes = target.lanes
    short, long = vector_type(2 * lanes, "i16"), vector_type(lanes, "i32")
    if target.pair_dot:
        called = f'llvm.call_intrinsic "{target.pair_dot}"({a}, {b})'
        return f.op(f"{called} : ({short}, {short}) -> {long}")
    products = []
    for parity in (0, 1):
        picked = list(range(parity, 2 * lanes, 2))
        wide = []
        for x in (a, b):
            half = f.op(f"vector.shuffle {x}, {x} {picked} : {short}, {short}")
            wide.append(f.op(f"arith.extsi {half} : {vector_type(lanes, 'i16')} to {long}"))
        products.append(f.arith("muli", *wide, type_=long))
    return f.arith("addi", *products, type_=long)


def quantise_row(
    f: Fn,
    target: CodegenTarget,
    x: tuple[Array, list[str]],
    depth: int,
    to: tuple[IntegerRows, list[str]],
) -> None:
    """One row of x, f32 [.., depth], into `to`. x and `to`: the arrays and the row's indices."""
    whole = depth // Q8_DEPTH
    with f.loop(f.index(0), f.index(whole)) as block:
        _quantise_block(f, target, x, Q8_DEPTH, to, block.iv)
    if depth % Q8_DEPTH:
        _quantise_block(f, target, x, depth % Q8_DEPTH, to, f.index(whole))


def _quantise_block(
    f: Fn,
    target: CodegenTarget,
    x: tuple[Array, list[str]],
    count: int,
    to: tuple[IntegerRows, list[str]],
    block: str,
) -> None:
    first = f.mul(block, f.index(Q8_DEPTH))
    (source, at), (rows, place) = x, to
    parts = pieces(count, target.lanes)
    values = [source.vload(f, w, *at, f.offset(first, o)) for o, w in parts]
    power = _power_of_two(f, target, parts, values)
    scale = f.arith("mulf", power, f.f32(2.0**-SCALE_BITS), type_="f32")
    inverse = f.arith("divf", f.f32(2.0**SCALE_BITS), power, type_="f32")
    rows.scales.store(f, scale, *place, block)
    for (offset, width), value in zip(parts, values, strict=True):
        _store(
            f, rows.q, [*place, f.offset(first, offset)], _round(f, value, inverse, width), width
        )
    for offset, width in pieces(Q8_DEPTH - count, target.lanes):
        zero = f.constant(f"arith.constant dense<0> : {vector_type(width, 'i16')}")
        _store(f, rows.q, [*place, f.offset(first, count + offset)], zero, width)


def _power_of_two(
    f: Fn, target: CodegenTarget, parts: list[tuple[int, int]], values: list[str]
) -> str:
    """The power of two at or below the largest magnitude, and LEAST; infinity where something is
    not finite. Without their sign, floats are ordered as their bits are, with NaN above infinity.
    """
    sizes = []
    for (_, width), value in zip(parts, values, strict=True):
        kind = vector_type(width, "i32")
        bits = f.op(f"vector.bitcast {value} : {vector_type(width)} to {kind}")
        unsigned = f.constant(f"arith.constant dense<{MAGNITUDE}> : {kind}")
        sizes.append((width, f.arith("andi", bits, unsigned, type_=kind)))
    full = [v for w, v in sizes if w == target.lanes]
    rest = [(w, v) for w, v in sizes if w != target.lanes]
    if full:
        rest.insert(0, (target.lanes, tree(f, full, _larger, target.lanes)))
    largest = f.constant(f"arith.constant {LEAST_BITS} : i32")
    for width, value in rest:
        top = f.op(f"vector.reduction <maxsi>, {value} : {vector_type(width, 'i32')} into i32")
        largest = f.arith("maxsi", largest, top, type_="i32")
    exponent = f.constant(f"arith.constant {EXPONENT} : i32")
    return f.op(f"arith.bitcast {f.arith('andi', largest, exponent, type_='i32')} : i32 to f32")


def _larger(f: Fn, a: str, b: str, width: int) -> str:
    return f.arith("maxsi", a, b, type_=vector_type(width, "i32"))


def _round(f: Fn, value: str, inverse: str, width: int) -> str:
    """value * inverse to the nearest i16, ties to even. NaN becomes some number: its block's scale
    is infinite.
    """
    kind = vector_type(width)
    scaled = f.arith("mulf", value, f.broadcast(inverse, width), type_=kind)
    # These two pass a NaN by, so that the conversion below is always defined.
    scaled = f.arith("maxnumf", scaled, f.splat(-LARGEST, width), type_=kind)
    scaled = f.arith("minnumf", scaled, f.splat(LARGEST, width), type_=kind)
    rounder = f.splat(ROUNDER, width)
    whole = f.arith("subf", f.arith("addf", scaled, rounder, type_=kind), rounder, type_=kind)
    wide = f.op(f"arith.fptosi {whole} : {kind} to {vector_type(width, 'i32')}")
    return f.op(f"arith.trunci {wide} : {vector_type(width, 'i32')} to {vector_type(width, 'i16')}")


def _store(f: Fn, to: Array, at: list[str], value: str, width: int) -> None:
    kind = vector_type(width, "i16")
    f.line(f"vector.store {value}, {to.name}[{', '.join(at)}] : {to.type}, {kind}")


def plan_row(plan: ScratchPlan, depth: int) -> None:
    """Room for one quantised row in the thread's scratch."""
    plan.add("q", (blocks(depth) * Q8_DEPTH,), "i16")
    plan.add("scales", (blocks(depth),))


def scratch_row(f: Fn, plan: ScratchPlan) -> IntegerRows:
    """The row that `plan_row` made room for."""
    return IntegerRows(plan.view(f, "q"), plan.view(f, "scales"))


def shapes(x: Operand) -> tuple[tuple[int | str, ...], tuple[int | str, ...]]:
    """Shapes of q and of scales for x[..., K]."""
    depth = x.shape[-1]
    assert isinstance(depth, int)
    return (*x.shape[:-1], blocks(depth) * Q8_DEPTH), (*x.shape[:-1], blocks(depth))


def emit(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """Operands: x[rows, K] or x[rows, n, K], q and scales out."""
    x, q, scales = (operand(spec, i) for i in range(3))
    *lead, depth = spec.operands[0].shape[1:]
    assert isinstance(depth, int)
    rows = IntegerRows(q, scales)
    with f.loop("%begin", "%end") as row:
        if not lead:
            quantise_row(f, target, (x, [row.iv]), depth, (rows, [row.iv]))
            return
        (count,) = lead
        assert isinstance(count, int)
        with f.loop(f.index(0), f.index(count)) as inner:
            at = [row.iv, inner.iv]
            quantise_row(f, target, (x, at), depth, (rows, at))


register(Kernel("quantise_rows", "rows", emit))
