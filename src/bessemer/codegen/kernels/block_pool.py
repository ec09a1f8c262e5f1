"""Pool the projected rows of a window into one compressed row.

Operands: bias[rate, W], norm[D], cos[ROWS, r/2], sin[ROWS, r/2], positions[ROWS], slots[ROWS]
(i64), state, visible[ROWS] (i64, out). Literal: the stream's entry in the state header.
Attributes: stream, overlap, eps, round.

A row whose position p closes a window, (p + 1) % rate == 0, makes compressed row p // rate: element
by element a sum of the window's values, weighted by the softmax of gate + bias; RMS norm; its
trailing r elements rotated in pairs; rounded; kept in the cache's element. With overlap the window
before takes part by the first halves of its rows, and the window itself by the second halves.
`pending_update` has written the rows of the whole call before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.activation import FloatOps
from bessemer.codegen.kernels.attention_steps import MINUS_INFINITY, safe_maximum
from bessemer.codegen.kernels.rope import rotate_interleaved
from bessemer.codegen.kernels.rounding import rotate_hadamard, round_span
from bessemer.codegen.kernels.state_entry import StreamRows
from bessemer.codegen.kernels.vectors import (
    Array,
    ScratchPlan,
    columns,
    horizontal,
    operand,
    vadd,
    vector_type,
)
from bessemer.graph.ops.compressed import ROUNDINGS


@dataclass(frozen=True)
class Pool:
    """The group's operands and sizes."""

    spec: GroupSpec
    bias: Array
    norm: Array
    cos: Array
    sin: Array
    positions: Array
    slots: Array
    state: Array
    visible: Array

    @staticmethod
    def of(spec: GroupSpec) -> Pool:
        return Pool(spec, *(operand(spec, i) for i in range(8)))

    @property
    def rate(self) -> int:
        return int(self.spec.operands[0].shape[0])

    @property
    def projected(self) -> int:
        return int(self.spec.operands[0].shape[1])

    @property
    def width(self) -> int:
        return int(self.spec.operands[1].shape[0])

    @property
    def half(self) -> int:
        """Pairs of elements that are rotated."""
        return int(self.spec.operands[2].shape[1])

    def open(self, f: Fn, element: str) -> StreamRows:
        return StreamRows.open(
            f,
            self.state.name,
            self.slots,
            "%lit0",
            stream=self.spec.attr("stream"),
            width=self.width,
            projected=self.projected,
            element=element,
        )


@dataclass(frozen=True)
class Closing:
    """A row that closes a block: the row, the position after it, and the block's number."""

    row: str
    end: str
    block: str


def closing_rows(f: Fn, pool: Pool) -> Iterator[Closing]:
    """The group's rows, of which each learns how many compressed rows it sees. The body of the
    Python `for` is emitted once, inside the loop, for rows that close a block.
    """
    rate = f.index(pool.rate)
    with f.loop("%begin", "%end") as loop:
        position = f.cast_index(pool.positions.load(f, loop.iv), "i64", "index")
        end = f.max(f.offset(position, 1), f.index(0))
        visible = f.div(end, rate)
        pool.visible.store(f, f.cast_index(visible, "index", "i64"), loop.iv)
        closes = f.cmp("eq", f.rem(end, rate), f.index(0))
        some = f.cmp("sgt", end, f.index(0))
        with f.when(f.op(f"arith.andi {closes}, {some} : i1")):
            yield Closing(loop.iv, end, f.sub(visible, f.index(1)))


def emit(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    pool = Pool.of(spec)
    stream = pool.open(f, target.kv_dtype)
    plan = _plan(spec, target)
    row, turned = plan.view(f, "row"), plan.view(f, "turned")
    for closing in closing_rows(f, pool):
        _pool(f, pool, stream, closing.end, row, target.lanes)
        _normalise(f, pool, row, target.lanes)
        for at, lanes in columns(f, pool.half, target.lanes):
            turn = tuple(t.vload(f, lanes, closing.row, at) for t in (pool.cos, pool.sin))
            span = (pool.width - 2 * pool.half, pool.half)
            rotate_interleaved(f, row, row, (), at, lanes, (turn[0], turn[1]), span)
        kept = round_row(f, pool, row, turned, target.lanes)
        stream.write(f, closing.block, kept, pool.width, target.lanes)


def _pool(f: Fn, pool: Pool, stream: StreamRows, end: str, row: Array, lanes: int) -> None:
    """row = the weighted sum over the windows that end before position `end`."""
    overlap = pool.spec.attr("overlap")
    rate = f.index(pool.rate)
    start = f.sub(end, rate)
    # (first position, rows, first element) of each window that takes part.
    parts = [(start, rate, 0)]
    if overlap:
        first = f.cmp("slt", start, rate)
        rows = f.select(first, f.index(0), rate, "index")
        parts = [(f.sub(start, rate), rows, 0), (start, rate, pool.width)]
    for column, width in columns(f, pool.width, lanes):
        type_ = vector_type(width)
        o = FloatOps(f, width)

        def gate(i: str, at: str, place: str, width: int = width, o: FloatOps = o) -> str:
            found = stream.pending.vload(f, width, at, f.index(1), place)
            return o("addf", found, pool.bias.vload(f, width, i, place))

        top = o.const(MINUS_INFINITY)
        for begin, rows, offset in parts:
            place = f.offset(column, offset)
            with f.loop(f.index(0), rows, 1, [(top, type_)]) as i:
                at = f.rem(f.add(begin, i.iv), stream.count)
                i.carry(o("maximumf", i.args[0], gate(i.iv, at, place)))
            (top,) = i.results
        top = safe_maximum(f, top, width)
        sums = [o.const(0.0), o.const(0.0)]
        for begin, rows, offset in parts:
            place = f.offset(column, offset)
            with f.loop(f.index(0), rows, 1, [(s, type_) for s in sums]) as i:
                at = f.rem(f.add(begin, i.iv), stream.count)
                weight = o("math.exp", o("subf", gate(i.iv, at, place), top))
                value = stream.pending.vload(f, width, at, f.index(0), place)
                total = o("addf", i.args[0], weight)
                i.carry(total, f.fma(weight, value, i.args[1], width))
            sums = i.results
        row.vstore(f, o("divf", sums[1], sums[0]), width, column)


def _normalise(f: Fn, pool: Pool, row: Array, lanes: int) -> None:
    """row = row / sqrt(mean(row^2) + eps) * norm"""
    total = f.f32(0.0)
    o = FloatOps(f, 0)
    full = pool.width // lanes * lanes
    if full:
        start = [(f.splat(0.0, lanes), vector_type(lanes))]
        with f.loop(f.index(0), f.index(full), lanes, start) as at:
            part = row.vload(f, lanes, at.iv)
            at.carry(f.fma(part, part, at.args[0], lanes))
        total = horizontal(f, at.results[0], lanes, vadd)
    with f.loop(f.index(full), f.index(pool.width), 1, [(total, "f32")]) as at:
        part = row.load(f, at.iv)
        at.carry(o("addf", at.args[0], o("mulf", part, part)))
    mean = o("divf", at.results[0], f.f32(float(pool.width)))
    root = o("math.sqrt", o("addf", mean, f.f32(pool.spec.attr("eps"))))
    scale = o("divf", f.f32(1.0), root)
    for column, width in columns(f, pool.width, lanes):
        wide = FloatOps(f, width)
        value = wide("mulf", row.vload(f, width, column), wide.splat(scale))
        value = wide("mulf", value, pool.norm.vload(f, width, column))
        row.vstore(f, value, width, column)


def round_row(f: Fn, pool: Pool, row: Array, turned: Array, lanes: int) -> Array:
    """The row as the attribute `round` wants it; f32 in one of the two arrays."""
    how = pool.spec.attr("round")
    if how == "e4m3":
        span = (0, pool.width - 2 * pool.half)
        round_span(f, row, row, [], span, ROUNDINGS[how], (how, lanes))
        for at, width in columns(f, pool.width, lanes):
            value = f.widen(f.narrow(row.vload(f, width, at), "f16", width), "f16", width)
            row.vstore(f, value, width, at)
        return row
    if how == "e2m1":
        rotate_hadamard(f, row, turned, [], pool.width)
        round_span(f, turned, turned, [], (0, pool.width), ROUNDINGS[how], (how, lanes))
        return turned
    return row


def _plan(spec: GroupSpec, target: CodegenTarget) -> ScratchPlan:
    plan = ScratchPlan()
    plan.add("row", (Pool.of(spec).width,))
    plan.add("turned", (Pool.of(spec).width,))
    return plan


def thread_scratch(spec: GroupSpec, target: CodegenTarget) -> int:
    return _plan(spec, target).nbytes


register(Kernel("block_pool", "rows", emit, thread_scratch=thread_scratch))
