"""The linear layers of routed experts: each row of x meets the weights of the experts it chose.

Operands: x[ROWS, K] or x[ROWS, k, K] (of quantised weights: integers and their scales, see
`integer_rows`), indices[ROWS, k] (i64), w panels [E, N/32, K, 32] (gated: [E, 2, N/32, K, 32]),
[bias[E, N] or [E, 2, N]], out[ROWS, k, N]. A thread takes a range of panels of every expert.
Weights of experts that no row chose are not touched.

Many rows are grouped by expert first: the (row, choice) pairs of each expert go through the
register tile together, gathered by index. One row is a matrix-vector product for each choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bessemer.artifact.layout import PANEL_ROWS
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, Operand, register
from bessemer.codegen.kernels import tile
from bessemer.codegen.kernels.activation import FloatOps, activate, gate
from bessemer.codegen.kernels.integer_rows import IntegerRows
from bessemer.codegen.kernels.linear import row_reader
from bessemer.codegen.kernels.panel import Panel
from bessemer.codegen.kernels.tile import (
    PRODUCT_TYPE,
    Tile,
    padded_rows,
    scratch_view,
    tile_shape,
)
from bessemer.codegen.kernels.tile_integer import IntegerTile
from bessemer.codegen.kernels.vectors import Array, ScratchPlan, operand, pieces

# (panel, number of rows, product, the (row, choice) pair of a number)
SlabProduct = Callable[[Panel, str, str, Callable[[str], tuple[str, str]]], None]


@dataclass(frozen=True)
class Experts:
    """The group's operands and sizes."""

    spec: GroupSpec
    x: Array
    scales: Array | None  # of integer rows
    indices: Array
    w: Array
    bias: Array | None
    out: Array

    @staticmethod
    def of(spec: GroupSpec) -> Experts:
        x, *rest, out = (operand(spec, i) for i in range(len(spec.operands)))
        scales = rest.pop(0) if x.element == "i16" else None
        indices, w, *bias = rest
        return Experts(spec, x, scales, indices, w, bias[0] if bias else None, out)

    def described(self, array: Array) -> tuple[str, Operand]:
        """An operand's name and description."""
        return array.name, self.spec.operands[int(array.name.removeprefix("%op"))]

    def shape(self, array: Array) -> tuple[int | str, ...]:
        return self.described(array)[1].shape

    @property
    def parts(self) -> int:
        """Weight matrices of an expert: gate and up, or one."""
        return 2 if self.spec.attr("gated") else 1

    @property
    def experts(self) -> int:
        return int(self.shape(self.w)[0])

    @property
    def panels(self) -> int:
        return int(self.shape(self.w)[-3])

    @property
    def blocks(self) -> int:
        """Blocks of the depth of quantised weights."""
        return int(self.shape(self.w)[-2])

    @property
    def choices(self) -> int:
        return int(self.shape(self.indices)[1])

    @property
    def width(self) -> int:
        return int(self.spec.operands[-1].shape[-1])

    @property
    def depth(self) -> int:
        return int(self.spec.operands[0].shape[-1])

    @property
    def one_row(self) -> bool:
        return self.shape(self.indices)[0] == 1

    def x_at(self, row: str, choice: str) -> list[str]:
        """Indices of the input of a (row, choice) pair."""
        return [row, choice] if len(self.spec.operands[0].shape) == 3 else [row]

    def part(self, f: Fn, part: int) -> list[str]:
        return [f.index(part)] if self.parts == 2 else []

    def panel(self, f: Fn, lanes: int, expert: str, part: int, panel: str) -> Panel:
        """One panel of an expert's weight."""
        return Panel(f, lanes, *self.described(self.w), (expert, *self.part(f, part), panel))

    def integer_rows(self, f: Fn, target: CodegenTarget) -> IntegerRows:
        """The rows, when they come as integers: one for each row of x, or for each pair."""
        assert self.scales is not None
        group = 1 if self.one_row else tile_shape(target).rows
        return IntegerRows.of(f, self.x, self.scales, self.blocks, group)

    def integer_row(self, f: Fn, row: str, choice: str) -> str:
        """Number of the integer row of a (row, choice) pair."""
        assert self.scales is not None
        if self.shape(self.scales)[-1] == self.blocks:
            return row
        return f.add(f.mul(row, f.index(self.choices)), choice)

    def product(
        self, f: Fn, target: CodegenTarget, panel: Panel, row: str, choice: str
    ) -> list[str]:
        """The sums of a panel with the input of a (row, choice) pair."""
        if self.scales is not None:
            rows = self.integer_rows(f, target)
            place = rows.place(f, self.integer_row(f, row, choice))
            return panel.integer_product(target, rows, place)
        at = self.x_at(row, choice)
        return panel.product(row_reader(f, target, self.described(self.x), at), self.depth)

    def slab_product(self, f: Fn, target: CodegenTarget, offset: int) -> SlabProduct:
        """How a panel is multiplied with gathered rows."""
        if self.scales is not None:
            integers = IntegerTile(f, target, self.integer_rows(f, target))
            return lambda panel, count, product, pair: integers.block_product(
                panel, count, product, lambda i: self.integer_row(f, *pair(i))
            )
        floats = Tile(f, target, *self.described(self.x), offset)
        return lambda panel, count, product, pair: floats.block_product(
            panel, count, product, lambda i: self.x_at(*pair(i))
        )

    def chosen(self, f: Fn, row: str, choice: str) -> str:
        """The expert of a pair. A router of NaN must not lead out of the weights."""
        found = f.cast_index(self.indices.load(f, row, choice), "i64", "index")
        return f.op(f"arith.minui {found}, {f.index(self.experts - 1)} : index")


def _plan(spec: GroupSpec, target: CodegenTarget) -> ScratchPlan:
    group = Experts.of(spec)
    plan = ScratchPlan()
    if group.one_row:
        plan.add("product", (group.parts, PANEL_ROWS))
        return plan
    widened = tile.weights_bytes(group.depth, group.described(group.w)[1].element, target)
    plan.add("weights", (widened // 4,))
    for part in range(group.parts):
        plan.add(f"product{part}", (padded_rows(target.chunk, target), PANEL_ROWS))
    plan.add("ends", (group.experts,), "i64")
    plan.add("pairs", (target.chunk * group.choices,), "i64")
    return plan


def thread_scratch(spec: GroupSpec, target: CodegenTarget) -> int:
    return _plan(spec, target).nbytes


def units(spec: GroupSpec) -> int:
    """Panels of an expert's weight."""
    return Experts.of(spec).panels


def emit(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    group = Experts.of(spec)
    if group.one_row:
        _emit_one_row(f, group, target)
    else:
        _emit_grouped(f, group, target)


def _emit_one_row(f: Fn, group: Experts, target: CodegenTarget) -> None:
    row = f.index(0)
    product = _plan(group.spec, target).view(f, "product")
    with f.loop(f.index(0), f.index(group.choices)) as choice:
        expert = group.chosen(f, row, choice.iv)
        with f.loop("%begin", "%end") as panel:
            for part in range(group.parts):
                weights = group.panel(f, target.lanes, expert, part, panel.iv)
                sums = group.product(f, target, weights, row, choice.iv)
                for v, value in enumerate(sums):
                    at = f.index(v * target.lanes)
                    product.vstore(f, value, target.lanes, f.index(part), at)

            def products(width: int, column: str) -> list[str]:
                return [product.vload(f, width, f.index(p), column) for p in range(group.parts)]

            _finish(f, group, target, (expert, panel.iv), products, lambda: (row, choice.iv))


def _emit_grouped(f: Fn, group: Experts, target: CodegenTarget) -> None:
    plan = _plan(group.spec, target)
    size = f.index(padded_rows(target.chunk, target))
    multiply = group.slab_product(f, target, plan.offset("weights"))
    outputs = [
        Array(scratch_view(f, plan.offset(f"product{p}"), PRODUCT_TYPE, size), PRODUCT_TYPE)
        for p in range(group.parts)
    ]
    ends, pairs = plan.view(f, "ends"), plan.view(f, "pairs")
    _group_by_expert(f, group, ends, pairs)
    zero, chunk = f.index(0), f.index(target.chunk)
    with f.loop(zero, f.index(group.experts), 1, [(zero, "index")]) as expert:
        first = expert.args[0]
        end = f.cast_index(ends.load(f, expert.iv), "i64", "index")
        # A row that chose an expert twice can make more pairs than a chunk has rows.
        with f.loop("%begin", "%end") as panel, f.loop(first, end, chunk) as slab:
            count = f.min(f.sub(end, slab.iv), chunk)
            place = (expert.iv, panel.iv)
            _slab(f, group, target, multiply, place, (pairs, slab.iv, count), outputs)
        expert.carry(end)


def _group_by_expert(f: Fn, group: Experts, ends: Array, pairs: Array) -> None:
    """Counting sort: pairs = row * choices + choice in order of expert, ends[e] past e's last."""
    zero, choices, experts = f.index(0), f.index(group.choices), f.index(group.experts)

    def bump(at: str) -> str:
        """ends[at]++; returns the old value."""
        held = ends.load(f, at)
        ends.store(f, f.add(held, f.i64(1), "i64"), at)
        return f.cast_index(held, "i64", "index")

    with f.loop(zero, experts) as expert:
        ends.store(f, f.i64(0), expert.iv)
    with f.loop(zero, "%rows") as row, f.loop(zero, choices) as choice:
        bump(group.chosen(f, row.iv, choice.iv))
    # The number of pairs becomes the place of the first one, and that the end as pairs are placed.
    with f.loop(zero, experts, 1, [(f.i64(0), "i64")]) as expert:
        count = ends.load(f, expert.iv)
        ends.store(f, expert.args[0], expert.iv)
        expert.carry(f.add(expert.args[0], count, "i64"))
    with f.loop(zero, "%rows") as row, f.loop(zero, choices) as choice:
        pair = f.cast_index(f.add(f.mul(row.iv, choices), choice.iv), "index", "i64")
        pairs.store(f, pair, bump(group.chosen(f, row.iv, choice.iv)))


def _slab(
    f: Fn,
    group: Experts,
    target: CodegenTarget,
    multiply: SlabProduct,
    place: tuple[str, str],
    slab: tuple[Array, str, str],
    outputs: list[Array],
) -> None:
    """One panel of one expert for up to a chunk of its pairs: products, then their epilogues."""
    expert, panel = place
    pairs, first, count = slab

    def pair(i: str) -> tuple[str, str]:
        found = f.cast_index(pairs.load(f, f.add(first, i)), "i64", "index")
        choices = f.index(group.choices)
        return f.div(found, choices), f.rem(found, choices)

    for part, output in enumerate(outputs):
        weights = group.panel(f, target.lanes, expert, part, panel)
        multiply(weights, count, output.name, pair)
    with f.loop(f.index(0), count) as i:

        def products(width: int, column: str) -> list[str]:
            return [output.vload(f, width, i.iv, column) for output in outputs]

        _finish(f, group, target, place, products, lambda: pair(i.iv))


def _finish(
    f: Fn,
    group: Experts,
    target: CodegenTarget,
    place: tuple[str, str],
    products: Callable[[int, str], list[str]],
    pair: Callable[[], tuple[str, str]],
) -> None:
    """The epilogue of a pair's panel: all 32 columns, or those up to N in the last panel.

    products(width, column) gives vectors of each part's products.
    """
    expert, panel = place
    row, choice = pair()
    whole, tail = divmod(group.width, PANEL_ROWS)
    first = f.mul(panel, f.index(PANEL_ROWS))

    def store(count: int) -> None:
        for offset, width in pieces(count, target.lanes):
            column = f.offset(first, offset)
            values = products(width, f.index(offset))
            y = _activated(f, group, expert, column, width, values)
            group.out.vstore(f, y, width, row, choice, column)

    if not tail:
        store(PANEL_ROWS)
        return
    with f.when(f.cmp("slt", panel, f.index(whole))):
        store(PANEL_ROWS)
    with f.otherwise():
        store(tail)


def _activated(
    f: Fn, group: Experts, expert: str, column: str, width: int, values: list[str]
) -> str:
    """act(product + bias), or act(gate + bias) * (up + bias)."""
    o, attr = FloatOps(f, width), group.spec.attr
    if group.bias is not None:
        found = [
            group.bias.vload(f, width, expert, *group.part(f, p), column)
            for p in range(group.parts)
        ]
        values = [o("addf", value, b) for value, b in zip(values, found, strict=True)]
    if group.parts == 2:
        return gate(o, attr("activation"), attr("alpha"), attr("limit"), *values)
    return activate(o, attr("activation"), values[0])


register(Kernel("expert_linear", "panels", emit, units, thread_scratch))
