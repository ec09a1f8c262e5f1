"""Flash attention: causal attention of the rows of a chunk over the KV cache.

Operands: q[ROWS, Hq, D] (rows may be strided), positions[ROWS], slots[ROWS], state, [sinks[Hq]],
out[ROWS, Hq, Dv]. Literals: the layer's entry in the state header, the window (0: full).

A unit is a KV head and a block of rows; the query heads that share the KV head are taken together,
so that a key block is fetched once for all of them (and widened, where loads don't). Blocks of keys
that no row of the unit sees are skipped, at both ends: causality and the window. Units of a head
are ordered first, last, second, last but one ...: contiguous ranges of units then cost about the
same, although late rows see more keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.artifact.layout import KEY_BLOCK, align
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import BlockUnits, CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.attention_steps import (
    AttentionShape,
    Blocks,
    Seen,
    Step,
    Workspace,
    block_range,
    plan_workspace,
    target_vectors,
)
from bessemer.codegen.kernels.kv_address import KVCache, kv_cache
from bessemer.codegen.kernels.tile import tile_shape
from bessemer.codegen.kernels.vectors import Array, ScratchPlan, columns, operand, vector_type

# Query vectors (rows x query heads of a KV head) of a unit: eight register tiles of six. 24 to 96
# are equally fast where the heads allow it; more waste work at the causal edge, fewer fetch a key
# block more often.
QUERIES = 48
# Blocks of 32 keys per step: the running sums are loaded, scaled and stored once a step. Two keep
# the step's scores (12 KiB) and one 16-column stripe of its values in L1; 4 and 8 gain nothing.
STEP_BLOCKS = 2


@dataclass(frozen=True)
class Operands:
    q: Array
    positions: Array
    slots: Array
    state: Array
    sinks: Array | None
    out: Array

    @staticmethod
    def of(spec: GroupSpec) -> Operands:
        q, positions, slots, state, *sinks, out = (
            operand(spec, i) for i in range(len(spec.operands))
        )
        return Operands(q, positions, slots, state, sinks[0] if sinks else None, out)


def shape_of(spec: GroupSpec) -> AttentionShape:
    return AttentionShape.of(spec, int(spec.operands[0].shape[1]))


def block_rows(shape: AttentionShape) -> int:
    """Rows of a unit."""
    return max(1, QUERIES // shape.group)


def units(spec: GroupSpec) -> BlockUnits:
    shape = shape_of(spec)
    return BlockUnits(shape.kv_heads, block_rows(shape))


def _is_widened(target: CodegenTarget) -> bool:
    """Whether blocks of the cache are widened before they are used; not where loads widen."""
    return target.kv_dtype != "f32" and not target.loads_halves


def _plan(spec: GroupSpec, target: CodegenTarget) -> ScratchPlan:
    shape = shape_of(spec)
    queries = align(block_rows(shape) * shape.group, tile_shape(target).rows)
    plan = plan_workspace(shape, queries, STEP_BLOCKS, target.lanes)
    if _is_widened(target):
        plan.add("keys", (STEP_BLOCKS, shape.key_width, KEY_BLOCK))
        plan.add("values", (STEP_BLOCKS, KEY_BLOCK, shape.value_width))
    return plan


def thread_scratch(spec: GroupSpec, target: CodegenTarget) -> int:
    return _plan(spec, target).nbytes


def emit(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    shape, given = shape_of(spec), Operands.of(spec)
    cache = kv_cache(
        f,
        given.state.name,
        given.slots,
        "%lit0",
        kv_heads=shape.kv_heads,
        key_width=shape.key_width,
        value_width=shape.value_width,
        element=target.kv_dtype,
    )
    plan = _plan(spec, target)
    work = Workspace(f, plan, shape, target.lanes)
    wide = None
    if _is_widened(target):
        wide = (plan.view(f, "keys"), plan.view(f, "values"))
    size = f.index(block_rows(shape))
    blocks = f.op(f"arith.ceildivsi %rows, {size} : index")
    with f.loop("%begin", "%end") as unit:
        head = f.div(unit.iv, blocks)
        row = f.mul(_balanced(f, f.rem(unit.iv, blocks), blocks), size)
        rows = f.min(size, f.sub("%rows", row))
        queries = f.mul(rows, f.index(shape.group))
        tile = f.index(tile_shape(target).rows)
        padded = f.mul(f.op(f"arith.ceildivsi {queries}, {tile} : index"), tile)
        seen = _load_queries(work, given, (head, row), queries, padded)
        begin, end = block_range(f, seen)
        with f.loop(begin, end, STEP_BLOCKS) as at:
            count = f.min(f.index(STEP_BLOCKS), f.sub(end, at.iv))
            source = _blocks(work, cache, wide, head, at.iv, count)
            _step(work, Step(at.iv, count, seen, source), padded, target)
        _store(work, given.out, (head, row), queries)


def _balanced(f: Fn, i: str, n: str) -> str:
    """0, n-1, 1, n-2, ...: the i-th block of rows of a head."""
    half = f.div(i, f.index(2))
    odd = f.cmp("ne", f.rem(i, f.index(2)), f.index(0))
    return f.select(odd, f.sub(f.sub(n, f.index(1)), half), half, "index")


def _load_queries(
    work: Workspace, given: Operands, place: tuple[str, str], queries: str, padded: str
) -> Seen:
    """Fill the workspace; the last tile is filled up with copies of the last query."""
    f, (head, row) = work.f, place
    group = f.index(work.shape.group)
    last = f.sub(queries, f.index(1))
    with f.loop(f.index(0), padded, 1, Seen.nothing(f)) as loop:
        query = f.min(loop.iv, last)
        source = f.add(row, f.div(query, group))
        query_head = f.add(f.mul(head, group), f.rem(query, group))
        sink = given.sinks.load(f, query_head) if given.sinks else None
        work.begin(loop.iv, given.q, (source, query_head), sink)
        position = f.cast_index(given.positions.load(f, source), "i64", "index")
        loop.carry(*work.see(loop.iv, position, "%lit1", Seen(*loop.args)))
    return Seen(*loop.results)


def _blocks(
    work: Workspace,
    cache: KVCache,
    wide: tuple[Array, Array] | None,
    head: str,
    first: str,
    count: str,
) -> Blocks:
    """The step's blocks, in the cache or widened in scratch."""
    f, shape, lanes = work.f, work.shape, work.lanes
    ring = cache.blocks_from(f, first)

    def in_cache(j: str) -> list[str]:
        return [head, ring(j)]

    if wide is None:
        return Blocks(cache.keys, cache.values, in_cache)
    keys, values = wide
    with f.loop(f.index(0), count) as j:
        where = in_cache(j.iv)
        for source, to, (height, width) in (
            (cache.keys, keys, (shape.key_width, KEY_BLOCK)),
            (cache.values, values, (KEY_BLOCK, shape.value_width)),
        ):
            with f.loop(f.index(0), f.index(height)) as line:
                for at, piece in columns(f, width, lanes):
                    value = source.vload(f, piece, *where, line.iv, at)
                    to.vstore(f, value, piece, j.iv, line.iv, at)
    return Blocks(keys, values, lambda j: [j])


def _step(work: Workspace, step: Step, queries: str, target: CodegenTarget) -> None:
    f, tile = work.f, tile_shape(target)
    vectors = target_vectors(target, tile.vectors)
    with (
        f.loop(f.index(0), step.count) as block,
        f.loop(f.index(0), queries, tile.rows) as row,
    ):
        work.scores(row.iv, tile.rows, vectors, block.iv, step)
    work.soften(queries, step)
    work.softmax(queries, step)
    with f.loop(f.index(0), queries, tile.rows) as row:
        work.weigh(row.iv, tile.rows, vectors, step)


def _store(work: Workspace, out: Array, place: tuple[str, str], queries: str) -> None:
    """sum / total; zeros for a query that saw no key."""
    f, (head, row) = work.f, place
    group = f.index(work.shape.group)
    with f.loop(f.index(0), queries) as query:
        total = work.total_of(query.iv)
        none = f.op(f"arith.cmpf oeq, {total}, {f.f32(0.0)} : f32")
        total = f.select(none, f.f32(1.0), total, "f32")
        share = f.arith("divf", f.f32(1.0), total, type_="f32")
        source = f.add(row, f.div(query.iv, group))
        query_head = f.add(f.mul(head, group), f.rem(query.iv, group))
        for at, width in columns(f, work.shape.value_width, work.lanes):
            value = work.sum.vload(f, width, query.iv, at)
            value = f.arith("mulf", value, f.broadcast(share, width), type_=vector_type(width))
            out.vstore(f, value, width, source, query_head, at)


register(Kernel("flash_attention", "heads", emit, units, thread_scratch))
