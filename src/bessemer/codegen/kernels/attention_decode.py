"""Decode attention: one row over the KV cache, split over heads and over the cache's length.

`decode_attention`: q[1, Hq, D] (may be strided), positions[1], slots[1], state, partials out.
Literals: the layer's entry in the state header, the window (0: full).  A unit is a KV head and one
of `splits` parts of the visible blocks of keys; its G query heads are taken together, so that the
cache is read once. With few keys the first parts do it all and the others stay empty.

`decode_combine`: partials, [sinks[Hq]], out[1, Hq, Dv]; a unit is a query head.

Partials are f32[Hkv * splits, G * (Dv + 2)]: of each query head the weighted values [G][Dv], then
the maxima [G], then the sums [G]. An empty part has maximum -inf, sum 0, and unwritten values.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.artifact.layout import KEY_BLOCK
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.attention_steps import (
    MINUS_INFINITY,
    AttentionShape,
    Blocks,
    Seen,
    Step,
    Workspace,
    block_range,
    plan_workspace,
)
from bessemer.codegen.kernels.kv_address import KVCache, kv_cache
from bessemer.codegen.kernels.tile import tile_shape
from bessemer.codegen.kernels.vectors import (
    Array,
    ScratchPlan,
    columns,
    greater,
    operand,
)

# Units that a model's heads are cut into, at least: enough to occupy many cores evenly, few enough
# that the partials (one row of values for each) stay small beside the cache.
UNITS = 32
# A part has at least this many blocks (64 keys): below, starting and combining it costs more than
# another core saves.
PART_BLOCKS = 2
# Blocks of keys per step. Sums are loaded and stored once a step; but what is fetched while values
# are summed are the keys of the next step, and with one block it comes most evenly: on a Zen 3, two
# threads read a cache of 2,000 tokens at 36 GB/s, with steps of two at 35, of four at 33. Without
# fetching it were 24.
STEP_BLOCKS = 1


def splits(kv_heads: int) -> int:
    """Parts that the visible keys of a KV head are cut into: a power of two."""
    parts = 1
    while kv_heads * parts < UNITS:
        parts *= 2
    return parts


def partial_shape(heads: int, kv_heads: int, value_width: int) -> tuple[int, int]:
    """Shape of the partials that `decode_attention` writes and `decode_combine` reads."""
    return kv_heads * splits(kv_heads), heads // kv_heads * (value_width + 2)


def shape_of(spec: GroupSpec) -> AttentionShape:
    return AttentionShape.of(spec, spec.attr("heads"))


@dataclass(frozen=True)
class QueryTiles:
    """Register tiles of rows x vectors that cover the query heads of a KV head."""

    count: int
    rows: int
    vectors: int

    @property
    def queries(self) -> int:
        """Query vectors of all tiles; the last ones repeat the last head."""
        return self.count * self.rows

    @staticmethod
    def of(queries: int, target: CodegenTarget) -> QueryTiles:
        """As few tiles as possible, as even as possible. Vectors: as many as fit the registers
        with the operands, of which the fewer are held and the others pass by one at a time.
        """
        count = -(-queries // tile_shape(target).rows)
        rows, vectors = -(-queries // count), 1
        while (
            2 * vectors * target.lanes <= KEY_BLOCK
            and rows * 2 * vectors + min(rows, 2 * vectors) + 1 <= target.registers
        ):
            vectors *= 2
        return QueryTiles(count, rows, vectors)


def _plan(spec: GroupSpec, target: CodegenTarget) -> ScratchPlan:
    shape = shape_of(spec)
    queries = QueryTiles.of(shape.group, target).queries
    return plan_workspace(shape, queries, STEP_BLOCKS, target.lanes)


def emit(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    shape = shape_of(spec)
    q, positions, slots, state, partials = (operand(spec, i) for i in range(5))
    cache = kv_cache(
        f,
        state.name,
        slots,
        "%lit0",
        kv_heads=shape.kv_heads,
        key_width=shape.key_width,
        value_width=shape.value_width,
        element=target.kv_dtype,
    )
    work = Workspace(f, _plan(spec, target), shape, target.lanes)
    tiles = QueryTiles.of(shape.group, target)
    position = f.cast_index(positions.load(f, f.index(0)), "i64", "index")
    parts = f.index(splits(shape.kv_heads))
    with f.loop("%begin", "%end") as unit:
        head, part = f.div(unit.iv, parts), f.rem(unit.iv, parts)
        seen = _load_queries(work, q, head, position, tiles.queries)
        begin, end = _part(f, seen, part, parts)
        some = f.cmp("slt", begin, end)
        with f.loop(begin, end, STEP_BLOCKS) as at:
            count = f.min(f.index(STEP_BLOCKS), f.sub(end, at.iv))
            blocks = _in_place(f, cache, head, at.iv)
            _step(work, Step(at.iv, count, seen, blocks, fetches=True), tiles)
        _write_partials(work, partials, unit.iv, some)


def _load_queries(work: Workspace, q: Array, head: str, position: str, queries: int) -> Seen:
    f, group = work.f, work.shape.group
    with f.loop(f.index(0), f.index(queries), 1, Seen.nothing(f)) as query:
        g = f.min(query.iv, f.index(group - 1))
        query_head = f.add(f.mul(head, f.index(group)), g)
        work.begin(query.iv, q, (f.index(0), query_head), None)
        query.carry(*work.see(query.iv, position, "%lit1", Seen(*query.args)))
    return Seen(*query.results)


def _part(f: Fn, seen: Seen, part: str, parts: str) -> tuple[str, str]:
    """Blocks [begin, end) of a part of what is visible."""
    begin, end = block_range(f, seen)
    blocks = f.max(f.sub(end, begin), f.index(0))
    few = f.op(f"arith.ceildivsi {blocks}, {f.index(PART_BLOCKS)} : index")
    active = f.max(f.min(few, parts), f.index(1))

    def boundary(of: str) -> str:
        return f.add(begin, f.div(f.mul(f.min(of, active), blocks), active))

    return boundary(part), boundary(f.offset(part, 1))


def _in_place(f: Fn, cache: KVCache, head: str, first: str) -> Blocks:
    """Blocks are read where they are, and widened in registers: each is used once."""
    ring = cache.blocks_from(f, first)
    return Blocks(cache.keys, cache.values, lambda j: [head, ring(j)])


def _step(work: Workspace, step: Step, tiles: QueryTiles) -> None:
    f, queries = work.f, work.f.index(tiles.queries)
    with (
        f.loop(f.index(0), step.count) as block,
        f.loop(f.index(0), queries, tiles.rows) as row,
    ):
        work.scores(row.iv, tiles.rows, tiles.vectors, block.iv, step)
    work.soften(queries, step)
    work.softmax(queries, step)
    with f.loop(f.index(0), queries, tiles.rows) as row:
        work.weigh(row.iv, tiles.rows, tiles.vectors, step)


def _write_partials(work: Workspace, partials: Array, unit: str, some: str) -> None:
    f, group, width = work.f, work.shape.group, work.shape.value_width
    with f.loop(f.index(0), f.index(group)) as g:
        at = f.offset(g.iv, group * width)
        partials.store(f, work.top.load(f, g.iv), unit, at)
        partials.store(f, work.total_of(g.iv), unit, f.offset(at, group))
        with f.when(some):
            base = f.mul(g.iv, f.index(width))
            for column, lanes in columns(f, width, work.lanes):
                value = work.sum.vload(f, lanes, g.iv, column)
                partials.vstore(f, value, lanes, unit, f.add(base, column))


def emit_combine(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    shape = shape_of(spec)
    partials, *sinks, out = (operand(spec, i) for i in range(len(spec.operands)))
    parts, width = splits(shape.kv_heads), shape.value_width
    group = f.index(shape.group)
    with f.loop("%begin", "%end") as head:
        first = f.mul(f.div(head.iv, group), f.index(parts))
        g = f.rem(head.iv, group)
        at = f.offset(g, shape.group * width)
        sink = sinks[0].load(f, head.iv) if sinks else None
        top, share = _weights(f, partials, first, at, shape, sink)
        for column, lanes in columns(f, width, target.lanes):
            out.vstore(f, f.splat(0.0, lanes), lanes, f.index(0), head.iv, column)
        with f.loop(f.index(0), f.index(parts)) as part:
            row = f.add(first, part.iv)
            total = partials.load(f, row, f.offset(at, shape.group))
            # Unordered: the values of a part whose sum is NaN are NaN, and stay visible.
            with f.when(f.op(f"arith.cmpf une, {total}, {f.f32(0.0)} : f32")):
                weight = f.arith("mulf", _weight(f, partials, row, at, top), share, type_="f32")
                base = f.mul(g, f.index(width))
                for column, lanes in columns(f, width, target.lanes):
                    value = partials.vload(f, lanes, row, f.add(base, column))
                    held = out.vload(f, lanes, f.index(0), head.iv, column)
                    value = f.fma(value, f.broadcast(weight, lanes), held, lanes)
                    out.vstore(f, value, lanes, f.index(0), head.iv, column)


def _weight(f: Fn, partials: Array, row: str, at: str, top: str) -> str:
    """exp(maximum of the part - overall maximum)"""
    difference = f.arith("subf", partials.load(f, row, at), top, type_="f32")
    return f.arith("math.exp", difference, type_="f32")


def _weights(
    f: Fn, partials: Array, first: str, at: str, shape: AttentionShape, sink: str | None
) -> tuple[str, str]:
    """The overall maximum (0 where there is none) and 1 / sum of a query head."""
    parts = f.index(splits(shape.kv_heads))
    lowest = f.f32(MINUS_INFINITY)
    with f.loop(f.index(0), parts, 1, [(sink or lowest, "f32")]) as part:
        found = partials.load(f, f.add(first, part.iv), at)
        part.carry(greater(f, found, part.args[0]))
    (top,) = part.results
    none = f.op(f"arith.cmpf oeq, {top}, {lowest} : f32")
    top = f.select(none, f.f32(0.0), top, "f32")
    total = f.f32(0.0)
    if sink is not None:
        difference = f.arith("subf", sink, top, type_="f32")
        total = f.arith("math.exp", difference, type_="f32")
    with f.loop(f.index(0), parts, 1, [(total, "f32")]) as part:
        row = f.add(first, part.iv)
        sum_ = partials.load(f, row, f.offset(at, shape.group))
        added = f.arith("mulf", sum_, _weight(f, partials, row, at, top), type_="f32")
        part.carry(f.arith("addf", part.args[0], added, type_="f32"))
    (total,) = part.results
    none = f.op(f"arith.cmpf oeq, {total}, {f.f32(0.0)} : f32")
    total = f.select(none, f.f32(1.0), total, "f32")
    return top, f.arith("divf", f.f32(1.0), total, type_="f32")


def units(spec: GroupSpec) -> int:
    shape = shape_of(spec)
    return shape.kv_heads * splits(shape.kv_heads)


def thread_scratch(spec: GroupSpec, target: CodegenTarget) -> int:
    return _plan(spec, target).nbytes


register(Kernel("decode_attention", "heads", emit, units, thread_scratch))
register(Kernel("decode_combine", "heads", emit_combine, lambda spec: spec.attr("heads")))
