"""Hyper-connections: a residual of N streams.

`sinkhorn`: x[ROWS, N, N], out.  `collapse_streams`: x[ROWS, N, D], pre[ROWS, N], out[ROWS, D].
`mix_streams`: x[ROWS, N, D], y[ROWS, D], post[ROWS, N], comb[ROWS, N, N], out[ROWS, N, D]. All
f32; N is small, and its loops are unrolled.
"""

from __future__ import annotations

from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.vectors import (
    columns,
    operand,
    tree,
    vadd,
    vector_type,
)


def emit_sinkhorn(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """The matrix stays in registers, one vector for each row of it."""
    x, out = operand(spec, 0), operand(spec, 1)
    n = int(spec.operands[0].shape[-1])
    type_ = vector_type(n)
    small, small_row = f.f32(spec.attr("eps")), f.splat(spec.attr("eps"), n)

    def by_columns(rows: list[str]) -> list[str]:
        total = f.arith("addf", tree(f, rows, vadd, n), small_row, type_=type_)
        return [f.arith("divf", row, total, type_=type_) for row in rows]

    def by_rows(rows: list[str]) -> list[str]:
        scaled = []
        for row in rows:
            total = f.op(f"vector.reduction <add>, {row} : {type_} into f32")
            total = f.arith("addf", total, small, type_="f32")
            scaled.append(f.arith("divf", row, f.broadcast(total, n), type_=type_))
        return scaled

    with f.loop("%begin", "%end") as row:
        start = by_columns([x.vload(f, n, row.iv, f.index(i), f.index(0)) for i in range(n)])
        rest = f.index(spec.attr("iterations") - 1)
        with f.loop(f.index(0), rest, 1, [(value, type_) for value in start]) as turn:
            turn.carry(*by_columns(by_rows(turn.args)))
        for i, value in enumerate(turn.results):
            out.vstore(f, value, n, row.iv, f.index(i), f.index(0))


def emit_collapse(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    x, pre, out = (operand(spec, i) for i in range(3))
    n, width = (int(s) for s in spec.operands[0].shape[1:])
    with f.loop("%begin", "%end") as row:
        weights = [pre.load(f, row.iv, f.index(i)) for i in range(n)]
        for at, lanes in columns(f, width, target.lanes):
            total = f.splat(0.0, lanes)
            for i, weight in enumerate(weights):
                part = x.vload(f, lanes, row.iv, f.index(i), at)
                total = f.fma(f.broadcast(weight, lanes), part, total, lanes)
            out.vstore(f, total, lanes, row.iv, at)


def emit_mix(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    x, y, post, comb, out = (operand(spec, i) for i in range(5))
    n, width = (int(s) for s in spec.operands[0].shape[1:])
    streams = range(n)
    with f.loop("%begin", "%end") as row:
        gains = [post.load(f, row.iv, f.index(i)) for i in streams]
        weights = [[comb.load(f, row.iv, f.index(j), f.index(i)) for j in streams] for i in streams]
        for at, lanes in columns(f, width, target.lanes):
            held = [x.vload(f, lanes, row.iv, f.index(j), at) for j in streams]
            new = y.vload(f, lanes, row.iv, at)
            for i in streams:
                gain = f.broadcast(gains[i], lanes)
                total = f.arith("mulf", gain, new, type_=vector_type(lanes))
                for weight, part in zip(weights[i], held, strict=True):
                    total = f.fma(f.broadcast(weight, lanes), part, total, lanes)
                out.vstore(f, total, lanes, row.iv, f.index(i), at)


register(Kernel("sinkhorn", "rows", emit_sinkhorn))
register(Kernel("collapse_streams", "rows", emit_collapse))
register(Kernel("mix_streams", "rows", emit_mix))
