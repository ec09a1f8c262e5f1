"""Rotary position embedding of q or k.

Operands: x[ROWS, H, D] (rows may be strided), cos[ROWS, half], sin[ROWS, half], out[ROWS, H, D],
all f32. Of each head 2*half elements from `offset` are rotated, the rest are copied. `out` may be
the very memory of x: both halves of a pair are read before either is written.

Attribute style: "half" pairs element i with i + half, "interleaved" pairs 2i with 2i + 1, counted
from the offset.
"""

from __future__ import annotations

from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.vectors import Array, columns, operand, vector_type


def emit(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    x, cos, sin, out = (operand(spec, i) for i in range(4))
    heads, width = (int(n) for n in spec.operands[0].shape[1:])
    half = int(spec.operands[1].shape[1])
    offset = spec.attr("offset")
    rotate = {"half": _rotate_half, "interleaved": rotate_interleaved}[spec.attr("style")]
    end = offset + 2 * half
    with f.loop("%begin", "%end") as row, f.loop(f.index(0), f.index(heads)) as head:
        place = (row.iv, head.iv)
        for at, lanes in columns(f, half, target.lanes):
            c, s = cos.vload(f, lanes, row.iv, at), sin.vload(f, lanes, row.iv, at)
            rotate(f, x, out, place, at, lanes, (c, s), (offset, half))
        for first, count in ((0, offset), (end, width - end)):
            for at, lanes in columns(f, count, target.lanes):
                rest = f.offset(at, first)
                out.vstore(f, x.vload(f, lanes, *place, rest), lanes, *place, rest)


def _rotated(f: Fn, a: str, b: str, turn: tuple[str, str], lanes: int) -> tuple[str, str]:
    """(a cos - b sin, b cos + a sin)"""
    c, s = turn
    type_ = vector_type(lanes)
    minus = f.op(f"arith.negf {f.arith('mulf', b, s, type_=type_)} : {type_}")
    return f.fma(a, c, minus, lanes), f.fma(b, c, f.arith("mulf", a, s, type_=type_), lanes)


def _rotate_half(
    f: Fn,
    x: Array,
    out: Array,
    place: tuple[str, ...],
    at: str,
    lanes: int,
    turn: tuple[str, str],
    span: tuple[int, int],
) -> None:
    first, half = span
    at = f.offset(at, first)
    other = f.offset(at, half)
    a, b = x.vload(f, lanes, *place, at), x.vload(f, lanes, *place, other)
    low, high = _rotated(f, a, b, turn, lanes)
    out.vstore(f, low, lanes, *place, at)
    out.vstore(f, high, lanes, *place, other)


def rotate_interleaved(
    f: Fn,
    x: Array,
    out: Array,
    place: tuple[str, ...],
    at: str,
    lanes: int,
    turn: tuple[str, str],
    span: tuple[int, int],
) -> None:
    """Pairs [at, at + lanes) of the elements from span[0] of x[place], by the factors `turn`."""
    first = f.offset(f.mul(at, f.index(2)), span[0])
    both, single = vector_type(2 * lanes), vector_type(lanes)
    pairs = x.vload(f, 2 * lanes, *place, first)
    a, b = (
        f.op(f"vector.shuffle {pairs}, {pairs} {picked} : {both}, {both}")
        for picked in (list(range(0, 2 * lanes, 2)), list(range(1, 2 * lanes, 2)))
    )
    low, high = _rotated(f, a, b, turn, lanes)
    order = [i // 2 + (i % 2) * lanes for i in range(2 * lanes)]
    merged = f.op(f"vector.shuffle {low}, {high} {order} : {single}, {single}")
    out.vstore(f, merged, 2 * lanes, *place, first)


register(Kernel("rope", "rows", emit))
