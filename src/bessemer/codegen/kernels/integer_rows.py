"""Rows of activations as 16-bit integers, for products with quantised weights.

x[32 b + i] = s[b] * q[32 b + i] in blocks of 32, as deep as those of the weights. s is a power of
two, so that small integers keep their very values; q has 15 bits and a sign, which is 256 times
finer than the 8 bits that engines usually give to activations, and costs no more: AVX2 multiplies
pairs of 16-bit integers at twice the rate of floats.

Rows lie in groups, as many as a register tile has: what a step of the tile takes of each of its
rows is one short stretch of memory, at one address.

A block with an infinity or a NaN gets an infinite scale: what it touches is not finite either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bessemer.artifact.layout import Q8_DEPTH, Q8_PAIR
from bessemer.codegen.emit import Fn, contiguous_strides, memref_type
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
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
    """Where quantised rows lie. q: i16 [groups][pairs][group][2], depths by pairs.
    scales: f32 [groups][blocks][group]. A place is a row's group, and which of its rows it is.
    """

    q: Array
    scales: Array
    group: int

    @staticmethod
    def of(f: Fn, q: Array, scales: Array, count: int, group: int) -> IntegerRows:
        """Rows of `count` blocks in memory of any rank that begins with a group."""
        pairs = count * Q8_DEPTH // Q8_PAIR
        return IntegerRows(
            _reshaped(f, q, (pairs, group, Q8_PAIR)), _reshaped(f, scales, (count, group)), group
        )

    def place(self, f: Fn, row: str) -> list[str]:
        """Of any row."""
        size = f.index(self.group)
        return [f.div(row, size), f.rem(row, size)]

    def places(self, f: Fn, first: str) -> list[list[str]]:
        """Of the rows of the group that begins with row `first`."""
        at = f.div(first, f.index(self.group))
        return [[at, f.index(r)] for r in range(self.group)]

    def pair(self, f: Fn, lanes: int, place: list[str], pair: str) -> str:
        """A row's values at depths 2 * pair and 2 * pair + 1, side by side in every pair of a
        vector of 2 * lanes i16.
        """
        at, row = place
        where = ", ".join([at, pair, row, f.index(0)])
        two = f.op(f"vector.load {self.q.name}[{where}] : {self.q.type}, vector<2xi16>")
        word = f.op(f"vector.bitcast {two} : vector<2xi16> to vector<1xi32>")
        word = f.op(f"vector.extract {word}[0] : i32 from vector<1xi32>")
        words = f.op(f"vector.broadcast {word} : i32 to vector<{lanes}xi32>")
        return f.op(f"vector.bitcast {words} : vector<{lanes}xi32> to vector<{2 * lanes}xi16>")

    def scale(self, f: Fn, lanes: int, place: list[str], block: str) -> str:
        """A row's scale of a block, in every lane."""
        at, row = place
        return f.broadcast(self.scales.load(f, at, block, row), lanes)

    def store_pair(self, f: Fn, values: str, place: list[str], pair: str) -> None:
        """values: vector<2xi16>"""
        at, row = place
        where = ", ".join([at, pair, row, f.index(0)])
        f.line(f"vector.store {values}, {self.q.name}[{where}] : {self.q.type}, vector<2xi16>")


def _reshaped(f: Fn, array: Array, inner: tuple[int, ...]) -> Array:
    """Contiguous memory as [any number][inner...]."""
    strides = contiguous_strides(("?", *inner))
    assert strides is not None
    type_ = memref_type(("?", *inner), array.element)
    sizes = ", ".join([f.index(1), *map(str, inner)])
    return Array(
        f.op(
            f"memref.reinterpret_cast {array.name} to offset: [0], sizes: [{sizes}], "
            f"strides: [{', '.join(map(str, strides))}] : {array.type} to {type_}"
        ),
        type_,
        array.element,
    )


def pair_dot(f: Fn, target: CodegenTarget, total: str, a: str, b: str) -> str:
    """y[i] = total[i] + a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1]: i32 lanes, of i16 vectors twice
    as long.

    LLVM does not find x86's instructions when one side is broadcast, so they are named where there
    is one: one that adds to the total (VNNI), or one that doesn't.
    """
    lanes, name = target.lanes, target.pair_dot
    short, long = vector_type(2 * lanes, "i16"), vector_type(lanes, "i32")
    if "vpdpwssd" in name:
        called = f'llvm.call_intrinsic "{name}"({total}, {a}, {b})'
        return f.op(f"{called} : ({long}, {short}, {short}) -> {long}")
    if name:
        called = f'llvm.call_intrinsic "{name}"({a}, {b})'
        product = f.op(f"{called} : ({short}, {short}) -> {long}")
    else:
        product = _pair_products(f, lanes, a, b)
    return f.arith("addi", total, product, type_=long)


def _pair_products(f: Fn, lanes: int, a: str, b: str) -> str:
    short, long = vector_type(2 * lanes, "i16"), vector_type(lanes, "i32")
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
    """One row of x, f32 [.., depth], into `to`. x: the array and the row's indices; to: the rows
    and the place among them.
    """
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
    (source, at), (rows, place) = x, to
    first = f.mul(block, f.index(Q8_DEPTH))
    parts = pieces(count, target.lanes)
    values = [source.vload(f, w, *at, f.offset(first, o)) for o, w in parts]
    power = _power_of_two(f, target, parts, values)
    scale = f.arith("mulf", power, f.f32(2.0**-SCALE_BITS), type_="f32")
    inverse = f.arith("divf", f.f32(2.0**SCALE_BITS), power, type_="f32")
    rows.scales.store(f, scale, place[0], block, place[1])
    whole = [_round(f, v, inverse, w) for (_, w), v in zip(parts, values, strict=True)]
    pair = f.mul(block, f.index(Q8_DEPTH // Q8_PAIR))
    for i, values_ in enumerate(_pairs(f, parts, whole)):
        rows.store_pair(f, values_, place, f.offset(pair, i))


def _pairs(f: Fn, parts: list[tuple[int, int]], values: list[str]) -> Iterator[str]:
    """The i16 of a block as vector<2xi16>, one after another; past the last, zeros."""
    zero = f.constant(f"arith.constant dense<0> : {vector_type(Q8_PAIR, 'i16')}")
    for (_, width), value in zip(parts, values, strict=True):
        kind, two = vector_type(width, "i16"), vector_type(Q8_PAIR, "i16")
        if width == 1:
            yield f.op(f"vector.shuffle {value}, {zero} [0, 1] : {kind}, {two}")
        for i in range(0, width - 1, Q8_PAIR):
            cut = f"{{offsets = [{i}], sizes = [{Q8_PAIR}], strides = [1]}}"
            yield f.op(f"vector.extract_strided_slice {value} {cut} : {kind} to {two}")
    count = sum(width for _, width in parts)
    for _ in range((Q8_DEPTH - count) // Q8_PAIR):
        yield zero


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
    # These two pass a NaN by, so that the sum below is always in its range.
    scaled = f.arith("maxnumf", scaled, f.splat(-LARGEST, width), type_=kind)
    scaled = f.arith("minnumf", scaled, f.splat(LARGEST, width), type_=kind)
    # The last bit of the sum counts ones: its low half is the integer, in two's complement.
    shifted = f.arith("addf", scaled, f.splat(ROUNDER, width), type_=kind)
    bits = f.op(f"vector.bitcast {shifted} : {kind} to {vector_type(width, 'i32')}")
    return f.op(f"arith.trunci {bits} : {vector_type(width, 'i32')} to {vector_type(width, 'i16')}")


def plan_row(plan: ScratchPlan, depth: int) -> None:
    """Room for one quantised row in the thread's scratch."""
    plan.add("q", (blocks(depth) * Q8_DEPTH,), "i16")
    plan.add("scales", (blocks(depth),))


def scratch_row(f: Fn, plan: ScratchPlan, depth: int) -> IntegerRows:
    """The row that `plan_row` made room for."""
    q, scales = plan.view(f, "q"), plan.view(f, "scales")
    return IntegerRows.of(f, Array(q.name, q.type, "i16"), scales, blocks(depth), 1)


def emit(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """Operands: x[rows, K] or x[rows, n, K], q and scales out. Rows are numbered as they lie."""
    x, q, scales = (operand(spec, i) for i in range(3))
    *lead, depth = spec.operands[0].shape[1:]
    assert isinstance(depth, int)
    rows = IntegerRows.of(f, q, scales, blocks(depth), spec.attr("group"))
    with f.loop("%begin", "%end") as row:
        if not lead:
            quantise_row(f, target, (x, [row.iv]), depth, (rows, rows.place(f, row.iv)))
            return
        (count,) = lead
        assert isinstance(count, int)
        with f.loop(f.index(0), f.index(count)) as inner:
            place = rows.place(f, f.add(f.mul(row.iv, f.index(count)), inner.iv))
            quantise_row(f, target, (x, [row.iv, inner.iv]), depth, (rows, place))


register(Kernel("quantise_rows", "rows", emit))
