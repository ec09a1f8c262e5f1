"""y = residual + scale * act(x @ W.T + b), and the gated form act(x @ G.T + b) * (x @ U.T + c).

Weights are panels (gated: [2] of them, see `panel`); a thread takes a range of panels. Many
rows go through a register tile; one row is a matrix-vector product that streams each panel once.
Both end in the same epilogue, on vectors, or on scalars for the columns past N.

Quantised weights meet rows of 16-bit integers (`integer_rows`). Many rows come as such, made once
by a group of their own; one row each thread converts for itself, which costs less than to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bessemer.artifact.layout import PANEL_ROWS
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import (
    BlockUnits,
    CodegenTarget,
    GroupSpec,
    Kernel,
    Operand,
    Units,
    register,
)
from bessemer.codegen.kernels import tile
from bessemer.codegen.kernels.activation import FloatOps, activate, gate
from bessemer.codegen.kernels.integer_rows import (
    IntegerRows,
    plan_row,
    quantise_row,
    scratch_row,
)
from bessemer.codegen.kernels.panel import Panel
from bessemer.codegen.kernels.tile import (
    PRODUCT_TYPE,
    Tile,
    padded_rows,
    product_bytes,
    scratch_view,
    tile_shape,
)
from bessemer.codegen.kernels.tile_integer import IntegerTile
from bessemer.codegen.kernels.vectors import Array, ScratchPlan

# Matrices of so few panels would leave threads without work. Of many rows these are shared out as
# well, in blocks: of 48 rows, whole tiles, for which widening a panel is a few per cent of the
# products. One row is cut along its depth: see `linear_parts`.
FEW_PANELS = 8
ROW_BLOCK = 48
# A matrix of at most so many bytes stays in the last cache while blocks of ROW_BLOCK rows meet it,
# one after the other: the rows then stay in L2, where all of them would come from L3 for every
# panel. Larger ones would come from memory again for every block.
CACHED_BYTES = 8 << 20


@dataclass(frozen=True)
class Operands:
    """The operands of a linear group by name: (SSA name, description). scales: of integer rows."""

    x: tuple[str, Operand]
    scales: tuple[str, Operand] | None
    w: tuple[str, Operand]
    bias: tuple[str, Operand] | None
    residual: tuple[str, Operand] | None
    out: tuple[str, Operand]

    @staticmethod
    def of(spec: GroupSpec) -> Operands:
        x, *rest, out = [(f"%op{i}", o) for i, o in enumerate(spec.operands)]
        scales = rest.pop(0) if x[1].element == "i16" else None
        w = x if spec.kind == "linear_combine" else rest.pop(0)
        bias = rest.pop(0) if spec.attr("has_bias") else None
        residual = rest.pop(0) if spec.attr("has_residual") else None
        return Operands(x, scales, w, bias, residual, out)

    @property
    def one_row(self) -> bool:
        return self.x[1].shape[0] == 1

    @property
    def depth(self) -> int:
        depth = self.x[1].shape[-1]
        assert isinstance(depth, int)
        return depth

    def integer_rows(self, fn: Fn, target: CodegenTarget) -> IntegerRows:
        """The rows, when they come as integers."""
        assert self.scales is not None
        q, scales = (Array(name, o.type, o.element) for name, o in (self.x, self.scales))
        blocks = self.scales[1].shape[-1]
        assert isinstance(blocks, int)
        return IntegerRows.of(fn, q, scales, blocks, tile_shape(target).rows)


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


def emit_columns(
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


def _open_tile(fn: Fn, target: CodegenTarget, ops: Operands) -> Tile | IntegerTile:
    if ops.scales is not None:
        return IntegerTile(fn, target, ops.integer_rows(fn, target))
    return Tile(fn, target, *ops.x, 0)


def _by_row_blocks(spec: GroupSpec) -> bool:
    """Whether a unit is a panel of the weight for some of the rows, and not for all."""
    ops = Operands.of(spec)
    few = _panels(spec) <= FEW_PANELS and ops.w[1].element != "q8_0"
    return few and _parts(spec) == 1 and not ops.one_row


def _rows_at_once(spec: GroupSpec, target: CodegenTarget) -> int:
    """Rows that meet a range of panels before the next ones do."""
    ops = Operands.of(spec)
    whole = padded_rows(target.chunk, target)
    if _by_row_blocks(spec):
        return min(ROW_BLOCK, whole)
    if tile.is_widened(ops.w[1].element, target):
        return whole  # a panel is widened for all of them
    return min(ROW_BLOCK, whole) if ops.w[1].nbytes <= CACHED_BYTES else whole


def _emit_tiled(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """Many rows: for each panel, C = X @ W.T block by block into scratch, then the epilogue."""
    size, zero = fn.index(_rows_at_once(spec, target)), fn.index(0)
    if _by_row_blocks(spec):
        blocks = fn.op(f"arith.ceildivsi %rows, {size} : index")
        with fn.loop("%begin", "%end") as unit:
            start = fn.mul(fn.rem(unit.iv, blocks), size)
            _emit_panel(fn, spec, target, fn.div(unit.iv, blocks), start)
        return
    with (
        fn.loop(zero, "%rows", _rows_at_once(spec, target)) as block,
        fn.loop("%begin", "%end") as panel,
    ):
        _emit_panel(fn, spec, target, panel.iv, block.iv)


def _emit_panel(fn: Fn, spec: GroupSpec, target: CodegenTarget, panel: str, start: str) -> None:
    """One panel and the rows from `start`, as many as are taken at once."""
    ops, size = Operands.of(spec), _rows_at_once(spec, target)
    opened = _open_tile(fn, target, ops)
    count = fn.min(fn.index(size), fn.sub("%rows", start))
    views = [
        scratch_view(
            fn,
            tile.weights_bytes(ops.depth, ops.w[1].element, target) + part * product_bytes(size),
            PRODUCT_TYPE,
            fn.index(size),
        )
        for part in range(_parts(spec))
    ]
    last = fn.index(_panels(spec) - 1)
    after = [(part + 1, panel) for part in range(_parts(spec) - 1)]
    after += [(0, fn.min(fn.offset(panel, 1), last))]
    for part, view in enumerate(views):
        weights = _panel(fn, spec, target, part, panel)
        if isinstance(opened, IntegerTile):
            opened.block_product(weights, count, view, start=start)
        else:
            following = _panel(fn, spec, target, *after[part])
            opened.block_product(weights, count, view, lambda m: [fn.add(start, m)], following)
    with fn.loop(fn.index(0), count) as row:

        def products(o: FloatOps, column: str) -> list[str]:
            at = [row.iv, column]
            if o.lanes:
                return [fn.vload(v, at, PRODUCT_TYPE, o.lanes) for v in views]
            return [fn.load(v, at, PRODUCT_TYPE) for v in views]

        emit_columns(fn, spec, target, panel, fn.add(start, row.iv), products)


def _matvec_plan(spec: GroupSpec) -> ScratchPlan:
    """The row as integers, where weights are quantised and it doesn't come as such; the sums of the
    last panel, where it passes N.
    """
    ops, plan = Operands.of(spec), ScratchPlan()
    plan.add("sums", (_parts(spec), PANEL_ROWS))
    if ops.w[1].element == "q8_0" and ops.scales is None:
        plan_row(plan, ops.depth)
    return plan


def _row_product(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> Callable[[Panel], list[str]]:
    """The sums of a panel with the one row there is."""
    ops, zero = Operands.of(spec), fn.index(0)
    if ops.w[1].element != "q8_0":
        reader = row_reader(fn, target, ops.x, [zero])
        return lambda panel: panel.product(reader, ops.depth)
    if ops.scales is not None:
        given = ops.integer_rows(fn, target)
        return lambda panel: panel.integer_product(target, given, [zero, zero])
    row = scratch_row(fn, _matvec_plan(spec), ops.depth)
    x = Array(ops.x[0], ops.x[1].type, ops.x[1].element)
    quantise_row(fn, target, (x, [zero]), ops.depth, (row, [zero, zero]))
    return lambda panel: panel.integer_product(target, row, [zero, zero])


def _emit_matvec(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """One row: each panel is read once, front to back; its 32 sums stay in registers."""
    ops, zero = Operands.of(spec), fn.index(0)
    product = _row_product(fn, spec, target)
    width = ops.out[1].shape[-1]
    assert isinstance(width, int)
    held = _matvec_plan(spec).view(fn, "sums") if width % PANEL_ROWS else None
    with fn.loop("%begin", "%end") as panels:
        sums = [product(_panel(fn, spec, target, part, panels.iv)) for part in range(_parts(spec))]
        for part, values in enumerate(sums if held else []):
            assert held is not None
            for v, value in enumerate(values):
                held.vstore(fn, value, target.lanes, fn.index(part), fn.index(v * target.lanes))

        def products(o: FloatOps, column: str) -> list[str]:
            if o.lanes:
                whole = next(j for j in range(0, PANEL_ROWS, o.lanes) if fn.index(j) == column)
                return [values[whole // o.lanes] for values in sums]
            assert held is not None
            return [held.load(fn, fn.index(part), column) for part in range(_parts(spec))]

        emit_columns(fn, spec, target, panels.iv, zero, products)


def row_reader(
    fn: Fn, target: CodegenTarget, x: tuple[str, Operand], row: list[str]
) -> Callable[[str], str]:
    """x[row, k] in every lane, by k."""
    name, operand = x
    return lambda k: fn.broadcast(fn.load(name, [*row, k], operand.type), target.lanes)


def emit(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """Operands: x[rows, K] (or integers i16 and their scales), w panels, [bias],
    [residual[rows, N]], out[rows, N].
    """
    if Operands.of(spec).one_row:
        _emit_matvec(fn, spec, target)
        return
    few = 0
    if spec.attr("few_rows"):
        # The rows whose logits are wanted: mostly the last one, which needs no tile of six.
        few = 1
        with fn.when(fn.cmp("eq", "%rows", fn.index(few))):
            _emit_matvec(fn, spec, target)
    # No rows (a chunk whose logits nobody wants) must not clamp row indices to -1.
    with fn.when(fn.cmp("sgt", "%rows", fn.index(few))):
        _emit_tiled(fn, spec, target)


def _panels(spec: GroupSpec) -> int:
    panels = Operands.of(spec).w[1].shape[-3]
    assert isinstance(panels, int)
    return panels


def units(spec: GroupSpec) -> Units:
    """Panels of the weight; of few panels and many rows, each with blocks of the rows. One row is
    one block, so that units are panels for it.
    """
    panels = _panels(spec)
    return BlockUnits(panels, ROW_BLOCK) if _by_row_blocks(spec) else panels


def thread_scratch(spec: GroupSpec, target: CodegenTarget) -> int:
    one_row, ops = _matvec_plan(spec).nbytes, Operands.of(spec)
    if ops.one_row:
        return one_row
    widened = tile.weights_bytes(ops.depth, ops.w[1].element, target)
    return max(one_row, widened + _parts(spec) * product_bytes(_rows_at_once(spec, target)))


for _kind in ("linear", "glu_linear"):
    register(Kernel(_kind, "panels", emit, units, thread_scratch))
