"""One row times a matrix of few rows and great depth, cut along the depth for many threads.

A matrix of up to 32 rows is one panel, which one thread would read alone while the others wait: the
projections of hyper-connections, routers of few experts.

`linear_parts`: x[1, K], w panels [N/32, K, 32], partials out f32[N/32 * parts, 32]. A unit is a
part of a panel's depth, and writes that row of the partials.
`linear_combine`: partials, [bias[N]], [residual[1, N]], out[1, N]: the parts added up in their
order, then the epilogue of `linear`. How many parts there are depends on the matrix alone, so that
sums are the same for any number of threads.
"""

from __future__ import annotations

from bessemer.artifact.layout import PANEL_ROWS
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.activation import FloatOps
from bessemer.codegen.kernels.linear import FEW_PANELS, emit_columns, row_reader
from bessemer.codegen.kernels.panel import UNROLL, Panel
from bessemer.codegen.kernels.vectors import operand, vector_type

# Units that a matrix is cut into at most, and the least depth of one: 64 KiB of f32, which take
# longer to read than adding up the parts.
UNITS = 32
PART_DEPTH = 512


def depth_parts(panels: int, depth: int) -> int:
    """Parts of equal depth that each panel is cut into: a power of two, 1 where it doesn't pay."""
    parts = 1
    if panels > FEW_PANELS:
        return parts
    while (
        2 * parts * panels <= UNITS
        and depth >= 2 * parts * PART_DEPTH
        and depth % (2 * parts * UNROLL) == 0
    ):
        parts *= 2
    return parts


def emit_parts(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    x, w = spec.operands[:2]
    partials = operand(spec, 2)
    parts = spec.attr("parts")
    depth = int(x.shape[-1]) // parts
    reader = row_reader(fn, target, ("%op0", x), [fn.index(0)])
    with fn.loop("%begin", "%end") as unit:
        first = fn.mul(fn.rem(unit.iv, fn.index(parts)), fn.index(depth))
        panel = Panel(fn, target.lanes, "%op1", w, (fn.div(unit.iv, fn.index(parts)),))
        sums = panel.product(reader, depth, first)
        for column, value in zip(panel.columns, sums, strict=True):
            partials.vstore(fn, value, target.lanes, unit.iv, fn.index(column))


def emit_combine(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    partials = operand(spec, 0)
    parts = fn.index(spec.attr("parts"))
    with fn.loop("%begin", "%end") as panel:
        first = fn.mul(panel.iv, parts)

        def total(o: FloatOps, column: str) -> list[str]:
            kind = vector_type(o.lanes) if o.lanes else "f32"

            def part(at: str) -> str:
                if o.lanes:
                    return partials.vload(fn, o.lanes, at, column)
                return partials.load(fn, at, column)

            start = [(part(first), kind)]
            with fn.loop(fn.index(1), parts, 1, start) as at:
                at.carry(o("addf", at.args[0], part(fn.add(first, at.iv))))
            return at.results

        emit_columns(fn, spec, target, panel.iv, fn.index(0), total)


def _units(spec: GroupSpec) -> int:
    return int(spec.operands[2].shape[0])


def _panels(spec: GroupSpec) -> int:
    return -(-int(spec.operands[-1].shape[-1]) // PANEL_ROWS)


register(Kernel("linear_parts", "panels", emit_parts, _units))
register(Kernel("linear_combine", "single", emit_combine, _panels))
