"""Attention over a few blocks of keys: what prefill and decode have in common.

A kernel keeps a set of query vectors in scratch, with the running maximum, sum and weighted values
of each (the online softmax: Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). A step
takes up to `blocks` blocks of 32 keys: scores by outer products of a query tile and a key block
[width][32], then mask, softmax, and outer products of the weights with the value rows. There are
no horizontal sums over widths, and all sums are f32.

No score that a mask hides is ever used in arithmetic: it is replaced by -inf, and value rows
outside of the keys that any query of the set sees are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bessemer.artifact.layout import ALIGN, KEY_BLOCK, STORAGE_BYTES, align
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec
from bessemer.codegen.kernels.vectors import (
    Array,
    ScratchPlan,
    columns,
    exp_falling,
    greater,
    horizontal,
    tree,
    vadd,
    vector_type,
    vgreater,
)

MINUS_INFINITY = -math.inf


@dataclass(frozen=True)
class AttentionShape:
    """The attributes of an attention group; G = group query heads share a KV head."""

    kv_heads: int
    group: int
    key_width: int
    value_width: int
    scale: float
    softcap: float
    has_sinks: bool

    @staticmethod
    def of(spec: GroupSpec, heads: int) -> AttentionShape:
        """heads: query heads."""
        kv_heads = spec.attr("kv_heads")
        return AttentionShape(
            kv_heads,
            heads // kv_heads,
            spec.attr("key_width"),
            spec.attr("value_width"),
            spec.attr("scale"),
            spec.attr("softcap"),
            spec.attr("has_sinks"),
        )


# Indices in front of [width, key] of a key block, or of [key, width] of a value block, for the
# j-th block of the step.
Locate = Callable[[str], list[str]]


@dataclass(frozen=True)
class Blocks:
    """The step's keys and values: memory and where the j-th block lies in it."""

    keys: Array
    values: Array
    locate: Locate


@dataclass(frozen=True)
class Fetched:
    """A block of `size` elements that is fetched while something else is computed."""

    array: Array
    where: list[str]
    size: int

    def fetcher(self, f: Fn, turns: int, part: tuple[str, int]) -> Callable[[str], None]:
        """fetch(turn) of a loop of so many turns. part: which of how many such loops it is, that
        fetch the block together.
        """
        number, parts = part
        each = -(-self.size // (turns * parts))
        per_line = ALIGN // STORAGE_BYTES[self.array.element]
        base = f.mul(number, f.index(turns))

        def fetch(turn: str) -> None:
            start = f.mul(f.add(base, turn), f.index(each))
            for offset in range(0, each, per_line):
                self.array.fetch(f, *self.where, f.index(0), f.offset(start, offset))

        return fetch


@dataclass(frozen=True)
class Seen:
    """Bounds over a set of queries: the positions that some query sees lie in [low, high], those
    in [all_low, all_high] every query sees (index values).
    """

    low: str
    high: str
    all_low: str
    all_high: str

    @staticmethod
    def nothing(f: Fn) -> list[tuple[str, str]]:
        """The bounds over no queries, as a loop's carried values."""
        far = f.index(2**31 - 1)
        return [(value, "index") for value in (far, f.index(-1), f.index(0), far)]


@dataclass(frozen=True)
class Step:
    """Consecutive blocks of keys, at most as many as the workspace was planned for.

    first: the first block (positions from 32 * first).  count: how many (index values).  fetches:
    whether memory is kept busy by fetching the step's values while it computes scores, and the next
    step's keys while it sums up values; a block is a page or less, where processors stop to look
    ahead by themselves.
    """

    first: str
    count: str
    seen: Seen
    blocks: Blocks
    fetches: bool = False


def plan_workspace(shape: AttentionShape, queries: int, blocks: int, lanes: int) -> ScratchPlan:
    """Scratch of `queries` query vectors and steps of `blocks` blocks."""
    queries = align(queries, lanes)
    plan = ScratchPlan()
    plan.add("query", (queries, shape.key_width))
    plan.add("score", (queries, blocks * KEY_BLOCK))
    plan.add("sum", (queries, shape.value_width))
    plan.add("total", (queries, lanes))
    for name in ("top", "fade"):
        plan.add(name, (queries,))
    for name in ("oldest", "newest"):
        plan.add(name, (queries,), "i32")
    return plan


class Workspace:
    """The query vectors' state in scratch.

    query [queries, D]: scaled queries.  score: the step's scores, then weights.  sum [queries, Dv]:
    weighted values.  top: running maximum.  total [queries, lanes]: running sum, a part in each
    lane.  fade: factor of the step for what was summed before it.  oldest, newest: first and last
    position that a query sees, i32.
    """

    def __init__(self, f: Fn, plan: ScratchPlan, shape: AttentionShape, lanes: int) -> None:
        self.f, self.shape, self.lanes = f, shape, lanes
        self.vector = vector_type(lanes)
        self.query = plan.view(f, "query")
        self.score = plan.view(f, "score")
        self.sum = plan.view(f, "sum")
        self.top, self.total = plan.view(f, "top"), plan.view(f, "total")
        self.fade = plan.view(f, "fade")
        self.oldest, self.newest = plan.view(f, "oldest"), plan.view(f, "newest")

    def begin(self, row: str, q: Array, at: Sequence[str], sink: str | None) -> None:
        """Load the query q[at] as query vector `row`. A sink counts as a score without value."""
        f, shape = self.f, self.shape
        factor = shape.scale / shape.softcap if shape.softcap else shape.scale
        for column, width in columns(f, shape.key_width, self.lanes):
            part = q.vload(f, width, *at, column)
            scaled = f.arith("mulf", part, f.splat(factor, width), type_=vector_type(width))
            self.query.vstore(f, scaled, width, row, column)
        for column, width in columns(f, shape.value_width, self.lanes):
            self.sum.vstore(f, f.splat(0.0, width), width, row, column)
        top, total = f.f32(MINUS_INFINITY), f.f32(0.0)
        if sink is not None:
            finite = f.op(f"arith.cmpf une, {sink}, {f.f32(MINUS_INFINITY)} : f32")
            top, total = sink, f.select(finite, f.f32(1.0), total, "f32")
        self.top.store(f, top, row)
        self.total.vstore(f, f.splat(0.0, self.lanes), self.lanes, row, f.index(0))
        self.total.store(f, total, row, f.index(0))

    def total_of(self, row: str) -> str:
        """The running sum of query vector `row`."""
        parts = self.total.vload(self.f, self.lanes, row, self.f.index(0))
        return horizontal(self.f, parts, self.lanes, vadd)

    def see(self, row: str, position: str, window: str, seen: Seen) -> tuple[str, str, str, str]:
        """Set what query vector `row` at `position` sees (index values; window 0: everything).

        Returns `seen` with this query. A query with a negative position sees nothing.
        """
        f = self.f
        start = f.max(f.offset(f.sub(position, window), 1), f.index(0))
        windowed = f.cmp("ne", window, f.index(0))
        oldest = f.select(windowed, start, f.index(0), "index")
        self.oldest.store(f, f.cast_index(oldest, "index", "i32"), row)
        self.newest.store(f, f.cast_index(position, "index", "i32"), row)
        empty = f.cmp("slt", position, f.index(0))
        return (
            f.select(empty, seen.low, f.min(seen.low, oldest), "index"),
            f.max(seen.high, position),
            f.max(seen.all_low, oldest),
            f.min(seen.all_high, position),
        )

    # --- scores ---------------------------------------------------------------------------------

    def scores(self, row: str, rows: int, vectors: int, block: str, step: Step) -> None:
        """Scores of query vectors [row, row + rows) against the step's block number `block`."""
        f = self.f
        where = step.blocks.locate(block)
        places = [f.offset(row, r) for r in range(rows)]
        base = f.mul(block, f.index(KEY_BLOCK))
        stripe = vectors * self.lanes
        for at, width in columns(f, KEY_BLOCK, stripe):
            parts = [f.offset(at, v * self.lanes) for v in range(width // self.lanes)]
            fetch = None
            if step.fetches:
                part = (f.div(at, f.index(stripe)), KEY_BLOCK // stripe)
                values = Fetched(step.blocks.values, where, KEY_BLOCK * self.shape.value_width)
                fetch = values.fetcher(f, self.shape.key_width, part)
            results = outer_product(
                f,
                (f.index(0), f.index(self.shape.key_width)),
                lambda d, r: self.query.load(f, places[r], d),
                partial(self._key_vector, step, where, parts),
                [[f.splat(0.0, self.lanes)] * len(parts)] * rows,
                [self.lanes] * len(parts),
                fetch,
            )
            for r, scores in zip(places, results, strict=True):
                for p, value in zip(parts, scores, strict=True):
                    self.score.vstore(f, value, self.lanes, r, f.add(base, p))

    def _key_vector(self, step: Step, where: list[str], parts: list[str], d: str, v: int) -> str:
        return step.blocks.keys.vload(self.f, self.lanes, *where, d, parts[v])

    def soften(self, rows: str, step: Step) -> None:
        """softcap * tanh(score / softcap); the division is in the scaled query."""
        f, cap = self.f, self.shape.softcap
        if not cap:
            return
        end = f.mul(step.count, f.index(KEY_BLOCK))
        with f.loop(f.index(0), rows) as row, f.loop(f.index(0), end, self.lanes) as at:
            value = self.score.vload(f, self.lanes, row.iv, at.iv)
            bent = f.arith("math.tanh", value, type_=self.vector)
            bent = f.arith("mulf", bent, f.splat(cap, self.lanes), type_=self.vector)
            self.score.vstore(f, bent, self.lanes, row.iv, at.iv)

    # --- softmax --------------------------------------------------------------------------------

    def softmax(self, rows: str, step: Step) -> None:
        """Scores become exp(score - top); top, total and fade advance by the step.

        A key outside of the query's [oldest, newest] has the score -inf. This is done where scores
        are read, and only in steps that need it: stored masked scores would become masked stores,
        which are slow on some CPUs.
        """
        f = self.f
        start = f.mul(step.first, f.index(KEY_BLOCK))
        end = f.add(start, f.mul(step.count, f.index(KEY_BLOCK)))
        late = f.cmp("sgt", end, f.offset(step.seen.all_high, 1))
        early = f.cmp("slt", start, step.seen.all_low)
        with f.when(f.op(f"arith.ori {late}, {early} : i1")):
            self._softmax(rows, step, f.cast_index(start, "index", "i32"))
        with f.otherwise():
            self._softmax(rows, step, None)

    def _softmax(self, rows: str, step: Step, start: str | None) -> None:
        """start: position of the step's first key (i32) where some query does not see them all."""
        f = self.f
        with f.loop(f.index(0), rows) as row:
            found = self._row_maximum(row.iv, step, start)
            self.fade.store(f, greater(f, found, self.top.load(f, row.iv)), row.iv)
        with f.loop(f.index(0), rows, self.lanes) as group:
            self._advance(group.iv)
        with f.loop(f.index(0), step.count) as block, f.loop(f.index(0), rows) as row:
            self._exponentials(row.iv, block.iv, start)

    def _reader(self, row: str, start: str | None) -> Callable[[str], str]:
        """The row's scores at a column of the step, hidden ones as -inf."""
        f, lanes = self.f, self.lanes
        if start is None:
            return lambda at: self.score.vload(f, lanes, row, at)
        ints, bits = vector_type(lanes, "i32"), vector_type(lanes, "i1")
        iota = f.constant(f"arith.constant dense<{list(range(lanes))}> : {ints}")
        first = f.add(f.broadcast(start, lanes, "i32"), iota, ints)
        oldest, newest = (
            f.broadcast(a.load(f, row), lanes, "i32") for a in (self.oldest, self.newest)
        )

        def read(at: str) -> str:
            column = f.broadcast(f.cast_index(at, "index", "i32"), lanes, "i32")
            position = f.add(first, column, ints)
            seen = f.op(f"arith.cmpi sle, {position}, {newest} : {ints}")
            recent = f.op(f"arith.cmpi sge, {position}, {oldest} : {ints}")
            both = f.op(f"arith.andi {seen}, {recent} : {bits}")
            value = self.score.vload(f, lanes, row, at)
            hidden = f.splat(MINUS_INFINITY, lanes)
            return f.select(both, value, hidden, f"{bits}, {self.vector}")

        return read

    def _row_maximum(self, row: str, step: Step, start: str | None) -> str:
        f, lanes = self.f, self.lanes
        read = self._reader(row, start)
        end = f.mul(step.count, f.index(KEY_BLOCK))
        parts = range(0, KEY_BLOCK, lanes)  # a chain for each vector of a block
        carried = [(f.splat(MINUS_INFINITY, lanes), self.vector) for _ in parts]
        with f.loop(f.index(0), end, KEY_BLOCK, carried) as loop:
            held = zip(parts, loop.args, strict=True)
            loop.carry(*(vgreater(f, read(f.offset(loop.iv, p)), v, lanes) for p, v in held))
        return horizontal(f, tree(f, loop.results, vgreater, lanes), lanes, vgreater)

    def _advance(self, row: str) -> None:
        """For `lanes` rows: top = the new maximum, which is in fade; fade = the step's factor.

        With all keys hidden so far top is -inf: 0 stands for it, so that every difference is -inf
        (or NaN where a score is NaN) and never -inf - -inf.
        """
        f, lanes = self.f, self.lanes
        old, top = self.top.vload(f, lanes, row), self.fade.vload(f, lanes, row)
        fade = f.arith("subf", old, safe_maximum(f, top, lanes), type_=self.vector)
        fade = exp_falling(f, fade, self.vector)
        self.top.vstore(f, top, lanes, row)
        self.fade.vstore(f, fade, lanes, row)

    def _exponentials(self, row: str, block: str, start: str | None) -> None:
        """Write the row's weights of a block, and add them to its sum lane by lane: sums over lanes
        would cost a third of the exponentials again. Blocks are outside rows, so that rows follow
        each other without a branch that waits for the exponentials.
        """
        f, lanes = self.f, self.lanes
        read = self._reader(row, start)
        top = safe_maximum(f, f.broadcast(self.top.load(f, row), lanes), lanes)
        first = f.mul(block, f.index(KEY_BLOCK))
        weights = []
        for part in range(0, KEY_BLOCK, lanes):
            at = f.offset(first, part)
            weight = exp_falling(f, f.arith("subf", read(at), top, type_=self.vector), self.vector)
            self.score.vstore(f, weight, lanes, row, at)
            weights.append(weight)
        begins = f.cmp("eq", block, f.index(0))
        fade = f.select(begins, self.fade.load(f, row), f.f32(1.0), "f32")
        held = self.total.vload(f, lanes, row, f.index(0))
        total = f.fma(held, f.broadcast(fade, lanes), tree(f, weights, vadd, lanes), lanes)
        self.total.vstore(f, total, lanes, row, f.index(0))

    # --- values ---------------------------------------------------------------------------------

    def weigh(self, row: str, rows: int, vectors: int, step: Step) -> None:
        """sum = fade * sum + weights @ values for query vectors [row, row + rows)."""
        places = [self.f.offset(row, r) for r in range(rows)]
        full = self.shape.value_width // self.lanes
        for at, count in columns(self.f, full, vectors):
            part = (self.f.div(at, self.f.index(vectors)), -(-full // vectors))
            widths = [self.lanes] * count
            self._weigh_columns(places, self._vectors_at(at, count), widths, step, part)
        tail = self.shape.value_width % self.lanes
        offset = full * self.lanes
        for at, width in columns(self.f, tail, self.lanes):
            self._weigh_columns(places, [self.f.offset(at, offset)], [width], step)

    def _vectors_at(self, vector: str, count: int) -> list[str]:
        first = self.f.mul(vector, self.f.index(self.lanes))
        return [self.f.offset(first, v * self.lanes) for v in range(count)]

    def _weigh_columns(
        self,
        places: list[str],
        at: list[str],
        widths: list[int],
        step: Step,
        part: tuple[str, int] | None = None,
    ) -> None:
        """part: which of how many stripes these columns are; None where nothing is to be fetched
        meanwhile.
        """
        f = self.f
        flat = [(r, c, w) for r in places for c, w in zip(at, widths, strict=True)]
        start = []
        for r, c, width in flat:
            fade = f.broadcast(self.fade.load(f, r), width)
            held = self.sum.vload(f, width, r, c)
            start.append(
                (f.arith("mulf", held, fade, type_=vector_type(width)), vector_type(width))
            )
        values = step.blocks.values
        with f.loop(f.index(0), step.count, 1, start) as loop:
            where = step.blocks.locate(loop.iv)
            base = f.mul(loop.iv, f.index(KEY_BLOCK))
            n = len(at)
            fetch = None
            if step.fetches and part is not None:
                following = step.blocks.locate(f.add(loop.iv, step.count))
                keys = Fetched(step.blocks.keys, following, KEY_BLOCK * self.shape.key_width)
                fetch = keys.fetcher(f, KEY_BLOCK, part)
            results = outer_product(
                f,
                self._visible(step, loop.iv),
                lambda key, r: self.score.load(f, places[r], f.add(base, key)),
                lambda key, v: values.vload(f, widths[v], *where, key, at[v]),
                [loop.args[i * n : (i + 1) * n] for i in range(len(places))],
                widths,
                fetch,
            )
            loop.carry(*(value for row in results for value in row))
        for (r, c, width), value in zip(flat, loop.results, strict=True):
            self.sum.vstore(f, value, width, r, c)

    def _visible(self, step: Step, block: str) -> tuple[str, str]:
        """Bounds of the keys in a block that some query sees."""
        f = self.f
        start = f.mul(f.add(step.first, block), f.index(KEY_BLOCK))
        size = f.index(KEY_BLOCK)
        low = f.max(f.sub(step.seen.low, start), f.index(0))
        high = f.min(f.offset(f.sub(step.seen.high, start), 1), size)
        return low, high


def safe_maximum(f: Fn, top: str, lanes: int) -> str:
    """top, with 0 in place of -inf."""
    vector = vector_type(lanes)
    lowest = f.op(f"arith.cmpf oeq, {top}, {f.splat(MINUS_INFINITY, lanes)} : {vector}")
    return f.select(lowest, f.splat(0.0, lanes), top, f"{vector_type(lanes, 'i1')}, {vector}")


def outer_product(
    f: Fn,
    bounds: tuple[str, str],
    left: Callable[[str, int], str],
    right: Callable[[str, int], str],
    start: Sequence[Sequence[str]],
    widths: Sequence[int],
    fetch: Callable[[str], None] | None = None,
) -> list[list[str]]:
    """start[r][v] + sum over k in bounds of left(k, r) * right(k, v), in registers.

    left gives scalars, right vectors of the given widths. Of the operands, the fewer are held and
    the others pass by one at a time, since the accumulators leave few registers.
    """
    types = [vector_type(w) for w in widths]
    carried = [(s, t) for row in start for s, t in zip(row, types, strict=True)]
    rows, n = range(len(start)), len(widths)
    with f.loop(*bounds, 1, carried) as loop:
        sums = list(loop.args)
        if fetch is not None:
            fetch(loop.iv)

        def spread(r: int) -> dict[int, str]:
            scalar = left(loop.iv, r)
            return {w: f.broadcast(scalar, w) for w in sorted(set(widths))}

        def advance(r: int, v: int, scalar: dict[int, str], vector: str) -> None:
            at = r * n + v
            sums[at] = f.fma(scalar[widths[v]], vector, sums[at], widths[v])

        if len(rows) < n:
            scalars = [spread(r) for r in rows]
            for v in range(n):
                vector = right(loop.iv, v)
                for r in rows:
                    advance(r, v, scalars[r], vector)
        else:
            vectors = [right(loop.iv, v) for v in range(n)]
            for r in rows:
                scalar = spread(r)
                for v in range(n):
                    advance(r, v, scalar, vectors[v])
        loop.carry(*sums)
    return [loop.results[i : i + n] for i in range(0, len(carried), n)]


def block_range(f: Fn, seen: Seen) -> tuple[str, str]:
    """Blocks [begin, end) that hold what some query sees; end is 0 when that is nothing."""
    size = f.index(KEY_BLOCK)
    return f.div(seen.low, size), f.div(f.add(seen.high, size), size)


def target_vectors(target: CodegenTarget, vectors: int) -> int:
    """Vectors per row of a tile, no more than a block of keys holds."""
    return min(vectors, KEY_BLOCK // target.lanes)
