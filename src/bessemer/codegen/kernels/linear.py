"""y = residual + scale * act(x @ W.T + b), and the gated form act(x @ G.T + b) * (x @ U.T + c).

Weights are panels (gated: [2] of them, see `panel`); a thread takes a range of panels. Many
rows go through the register tile of `tile`; one row is a matrix-vector product that streams each
panel once. Both end in the same epilogue, on vectors, or on scalars for the columns past N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bessemer.artifact.layout import PANEL_ROWS
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, Operand, register
from bessemer.codegen.kernels.activation import FloatOps, activate, gate
from bessemer.codegen.kernels.panel import Panel
from bessemer.codegen.kernels.tile import (
    PRODUCT_TYPE,
    block_product,
    open_tile,
    padded_rows,
    product_bytes,
    scratch_view,
    weights_bytes,
)


@dataclass(frozen=True)
class Operands:
    """The operands of a linear group by name: (SSA name, description)."""

    x: tuple[str, Operand]
    w: tuple[str, Operand]
    bias: tuple[str, Operand] | None
    residual: tuple[str, Operand] | None
    out: tuple[str, Operand]

    @staticmethod
    def of(spec: GroupSpec) -> Operands:
        named = [(f"%op{i}", o) for i, o in enumerate(spec.operands)]
        rest = named[2:-1]
        bias = rest.pop(0) if spec.attr("has_bias") else None
        residual = rest.pop(0) if spec.attr("has_residual") else None
        return Operands(named[0], named[1], bias, residual, named[-1])


# Gives the products of column j.. of the panel: one per weight part (two when gated).
Products = Callable[[FloatOps, str], list[str]]


def _epilogue(
    fn: Fn, spec: GroupSpec, o: FloatOps, products: list[str], row: str, column: str
) -> None:
    """Bias, activation or gate, scale, residual and store of `o.lanes` columns (or one)."""
    ops = Operands.of(spec)
    lanes = o.lanes

    def read(source: tuple[str, Operand], at: list[str]) -> str:
        name, operand = source
        if lanes:
            return fn.vload(name, at, operand.type, lanes, operand.element)
        return fn.widen(fn.load(name, at, operand.type), operand.element)

    if ops.bias is not None:
        gated = len(products) == 2
        ats = [[fn.index(i), column] for i in range(2)] if gated else [[column]]
        products = [o("addf", p, read(ops.bias, at)) for p, at in zip(products, ats, strict=True)]
    if len(products) == 2:
        y = gate(o, spec.attr("activation"), spec.attr("alpha"), spec.attr("limit"), *products)
    else:
        y = activate(o, spec.attr("activation"), products[0])
        if spec.attr("scale") != 1.0:
            y = o("mulf", y, o.const(spec.attr("scale")))
    if ops.residual is not None:
        y = o("addf", y, read(ops.residual, [row, column]))
    name, operand = ops.out
    if lanes:
        fn.vstore(y, name, [row, column], operand.type, lanes)
    else:
        fn.store(y, name, [row, column], operand.type)


def _columns(
    fn: Fn, spec: GroupSpec, target: CodegenTarget, panel: str, row: str, products: Products
) -> None:
    """The epilogue of one row of a panel: whole vectors, or scalars where the panel passes N."""
    width = Operands.of(spec).out[1].shape[-1]
    assert isinstance(width, int)
    first = fn.mul(panel, fn.index(PANEL_ROWS))
    vector, scalar = FloatOps(fn, target.lanes), FloatOps(fn, 0)

    def whole() -> None:
        for j in range(0, PANEL_ROWS, target.lanes):
            values = products(vector, fn.index(j))
            _epilogue(fn, spec, vector, values, row, fn.offset(first, j))

    tail = width % PANEL_ROWS
    if not tail:
        whole()
        return
    with fn.when(fn.cmp("slt", panel, fn.index(width // PANEL_ROWS))):
        whole()
    with (
        fn.when(fn.cmp("eq", panel, fn.index(width // PANEL_ROWS))),
        fn.loop(fn.index(0), fn.index(tail)) as loop,
    ):
        values = products(scalar, loop.iv)
        _epilogue(fn, spec, scalar, values, row, fn.add(first, loop.iv))


def _parts(spec: GroupSpec) -> int:
    return 2 if spec.kind == "glu_linear" else 1


def _panel(fn: Fn, spec: GroupSpec, target: CodegenTarget, part: int, panel: str) -> Panel:
    lead = (fn.index(part), panel) if _parts(spec) == 2 else (panel,)
    return Panel(fn, target.lanes, *Operands.of(spec).w, lead)


def _emit_tiled(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """Many rows: for each panel, C = X @ W.T block by block into scratch, then the epilogue."""
    ops = Operands.of(spec)
    rows = fn.index(padded_rows(target.chunk, target))
    tile = open_tile(fn, target, *ops.x)
    base = weights_bytes()
    views = [
        scratch_view(fn, base + part * product_bytes(target), PRODUCT_TYPE, rows)
        for part in range(_parts(spec))
    ]
    # No rows (a chunk whose logits nobody wants) must not clamp row indices to -1.
    with (
        fn.when(fn.cmp("sgt", "%rows", fn.index(0))),
        fn.loop("%begin", "%end") as panels,
    ):
        for part, view in enumerate(views):
            block_product(tile, _panel(fn, spec, target, part, panels.iv), "%rows", view)
        with fn.loop(fn.index(0), "%rows") as row:

            def products(o: FloatOps, column: str) -> list[str]:
                at = [row.iv, column]
                if o.lanes:
                    return [fn.vload(v, at, PRODUCT_TYPE, o.lanes) for v in views]
                return [fn.load(v, at, PRODUCT_TYPE) for v in views]

            _columns(fn, spec, target, panels.iv, row.iv, products)


def _emit_matvec(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """One row: each panel is read once, front to back; its 32 sums stay in registers."""
    ops = Operands.of(spec)
    zero = fn.index(0)
    sums_type = f"memref<{PANEL_ROWS}xf32>"
    depth = ops.x[1].shape[-1]
    assert isinstance(depth, int)
    with fn.loop("%begin", "%end") as panels:
        sums = [
            _panel(fn, spec, target, part, panels.iv).product(
                row_reader(fn, target, ops.x, [zero]), depth
            )
            for part in range(_parts(spec))
        ]
        views = []
        width = ops.out[1].shape[-1]
        if isinstance(width, int) and width % PANEL_ROWS:
            for part, values in enumerate(sums):
                view = scratch_view(fn, part * PANEL_ROWS * 4, sums_type)
                for v, value in enumerate(values):
                    fn.vstore(value, view, [fn.index(v * target.lanes)], sums_type, target.lanes)
                views.append(view)

        def products(o: FloatOps, column: str) -> list[str]:
            if o.lanes:
                whole = next(j for j in range(0, PANEL_ROWS, o.lanes) if fn.index(j) == column)
                return [values[whole // o.lanes] for values in sums]
            return [fn.load(view, [column], sums_type) for view in views]

        _columns(fn, spec, target, panels.iv, zero, products)


def row_reader(
    fn: Fn, target: CodegenTarget, x: tuple[str, Operand], row: list[str]
) -> Callable[[str], str]:
    """x[row, k] in every lane, by k."""
    name, operand = x
    return lambda k: fn.broadcast(fn.load(name, [*row, k], operand.type), target.lanes)


def emit(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """Operands: x[rows, K], w panels, [bias], [residual[rows, N]], out[rows, N]."""
    if spec.operands[0].shape[0] == 1:
        _emit_matvec(fn, spec, target)
    else:
        _emit_tiled(fn, spec, target)


def units(spec: GroupSpec) -> int:
    """Panels of the weight."""
    shape = spec.operands[1].shape
    panels = shape[-3]
    assert isinstance(panels, int)
    return panels


def thread_scratch(spec: GroupSpec, target: CodegenTarget) -> int:
    if spec.operands[0].shape[0] == 1:
        return _parts(spec) * PANEL_ROWS * 4
    return weights_bytes() + _parts(spec) * product_bytes(target)


for _kind in ("linear", "glu_linear"):
    register(Kernel(_kind, "panels", emit, units, thread_scratch))
