"""Attention over a window of rows and over compressed rows, one row being key and value of every
head.

Operands: q[ROWS, H, D] (may be strided), positions[ROWS], slots[ROWS] (i64), state, [sinks[H]],
[visible[ROWS]], [indices[ROWS, k]] (i64), out[ROWS, H, D]. Literals: the layer's entry in the state
header, the window, and with visible the entry of the compressed stream.

The keys of a query row are those of its window, oldest first, then its compressed rows: the first
`visible` ones, or those that `indices` names (k of them, or `visible` where these are fewer). They
are fetched in blocks, gathered and widened into scratch once for all heads, and met with all heads
by register tiles: scores are dot products along D, whose horizontal sums are cheap beside D;
weighted sums of the rows go into `out`, which is rescaled as the running maximum moves (online
softmax).

`compressed_attention` shares out rows, `decode_compressed_attention` the heads of one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.activation import FloatOps
from bessemer.codegen.kernels.attention_steps import MINUS_INFINITY, outer_product
from bessemer.codegen.kernels.state_entry import (
    SECOND_OFFSET,
    SECOND_ROWS,
    SharedRows,
    open_entry,
)
from bessemer.codegen.kernels.tile import tile_shape
from bessemer.codegen.kernels.vectors import (
    Array,
    ScratchPlan,
    columns,
    exp_falling,
    greater,
    horizontal,
    operand,
    pieces,
    row_sums,
    tree,
    vadd,
    vector_type,
    vgreater,
)

# Keys of a block: with D = 512 they are 64 KiB in f32, which stay in a 256 KiB L2 beside the
# queries; the running sums are loaded and stored once a block.
BLOCK = 32
# Keys of a score tile: its accumulators become one vector of sums, see `row_sums`.
KEY_TILE = 4
# Elements behind a row in scratch: rows that are a power of two apart would share few cache sets.
PAD = 16


@dataclass(frozen=True)
class Given:
    """The group's operands and sizes."""

    spec: GroupSpec
    q: Array
    positions: Array
    slots: Array
    state: Array
    sinks: Array | None
    visible: Array | None
    indices: Array | None
    out: Array

    @staticmethod
    def of(spec: GroupSpec) -> Given:
        found = [operand(spec, i) for i in range(len(spec.operands))]
        rest = iter(found[4:-1])
        optional = {
            name: next(rest) if spec.attr(f"has_{name}") else None
            for name in ("sinks", "visible", "indices")
        }
        q, positions, slots, state = found[:4]
        return Given(spec, q, positions, slots, state, out=found[-1], **optional)

    @property
    def heads(self) -> int:
        return int(self.spec.operands[0].shape[1])

    @property
    def width(self) -> int:
        return int(self.spec.operands[0].shape[2])


@dataclass(frozen=True)
class Keys:
    """The keys of a query row: `window` ones from position `oldest`, then `older` compressed ones
    (index values).
    """

    ring: SharedRows
    compressed: Array | None
    oldest: str
    window: str
    older: str


class Workspace:
    """A thread's scratch.

    key [BLOCK, D + PAD]: the block's keys.  score [H, BLOCK]: scores, then weights.  top, total:
    running maximum and sum of each head.  fade: the block's factor for what was summed before it.
    """

    def __init__(self, f: Fn, given: Given, plan: ScratchPlan, target: CodegenTarget) -> None:
        self.f, self.given, self.target, self.lanes = f, given, target, target.lanes
        self.vector = vector_type(target.lanes)
        self.key, self.score = plan.view(f, "key"), plan.view(f, "score")
        self.top, self.total = plan.view(f, "top"), plan.view(f, "total")
        self.fade = plan.view(f, "fade")

    def attend(self, row: str, keys: Keys, heads: tuple[str, str]) -> None:
        """out[row, heads] for the heads in a range."""
        f = self.f
        self._begin(row, heads)
        end = f.add(keys.window, keys.older)
        with f.loop(f.index(0), end, BLOCK) as block:
            count = f.min(f.sub(end, block.iv), f.index(BLOCK))
            self._fetch(row, keys, block.iv, count)
            self._scores(row, heads, count)
            self._softmax(heads, count)
            self._weigh(row, heads, count)
        self._finish(row, heads)

    def _begin(self, row: str, heads: tuple[str, str]) -> None:
        """A sink counts as a score without a value."""
        f, given = self.f, self.given
        with f.loop(*heads) as head:
            top, total = f.f32(MINUS_INFINITY), f.f32(0.0)
            if given.sinks is not None:
                top = given.sinks.load(f, head.iv)
                finite = f.op(f"arith.cmpf une, {top}, {f.f32(MINUS_INFINITY)} : f32")
                total = f.select(finite, f.f32(1.0), total, "f32")
            self.top.store(f, top, head.iv)
            self.total.store(f, total, head.iv)
            for column, width in columns(f, given.width, self.lanes):
                given.out.vstore(f, f.splat(0.0, width), width, row, head.iv, column)

    def _fetch(self, row: str, keys: Keys, first: str, count: str) -> None:
        """The block's keys, widened, in scratch."""
        f = self.f
        with f.loop(f.index(0), count) as i:
            number = f.add(first, i.iv)
            with f.when(f.cmp("slt", number, keys.window)):
                at = f.rem(f.add(keys.oldest, number), keys.ring.count)
                self._copy(keys.ring.rows, at, i.iv)
            if keys.compressed is not None:
                with f.otherwise():
                    at = f.sub(number, keys.window)
                    if self.given.indices is not None:
                        chosen = self.given.indices.load(f, row, at)
                        at = f.cast_index(chosen, "i64", "index")
                    self._copy(keys.compressed, at, i.iv)

    def _copy(self, source: Array, at: str, to: str) -> None:
        f = self.f
        for column, width in columns(f, self.given.width, self.lanes):
            self.key.vstore(f, source.vload(f, width, at, column), width, to, column)

    # --- scores -----------------------------------------------------------------------------------

    def _scores(self, row: str, heads: tuple[str, str], count: str) -> None:
        """score[h, j] = scale * q[h] . key[j]. Tiles that pass the end repeat the last head or key
        and write the same numbers again; columns behind `count` hold such repeats.
        """
        f, tall = self.f, self._score_rows
        last_head, last_key = f.sub(heads[1], f.index(1)), f.sub(count, f.index(1))
        with f.loop(f.index(0), count, KEY_TILE) as key:
            keys = [f.min(f.offset(key.iv, j), last_key) for j in range(KEY_TILE)]
            with f.loop(*heads, tall) as head:
                rows = [f.min(f.offset(head.iv, r), last_head) for r in range(tall)]
                for r, sums in zip(rows, self._dots(row, rows, keys), strict=True):
                    scale = f.splat(self.given.spec.attr("scale"), KEY_TILE)
                    value = f.arith("mulf", sums, scale, type_=vector_type(KEY_TILE))
                    self.score.vstore(f, value, KEY_TILE, r, key.iv)

    @property
    def _score_rows(self) -> int:
        """Heads of a score tile: accumulators, the heads' vectors and one of a key fit the
        registers.
        """
        return max(1, (self.target.registers - 1) // (KEY_TILE + 1))

    def _dots(self, row: str, heads: Sequence[str], keys: Sequence[str]) -> list[str]:
        """For each head the vector of q[head] . key[j]."""
        f, q, width, lanes = self.f, self.given.q, self.given.width, self.lanes
        count, n = width // lanes * lanes, len(keys)

        def step(at: str, size: int, sums: Sequence[str]) -> list[str]:
            queries = [q.vload(f, size, row, h, at) for h in heads]
            now = list(sums)
            for j, key in enumerate(keys):
                part = self.key.vload(f, size, key, at)
                for r, query in enumerate(queries):
                    now[r * n + j] = f.fma(query, part, now[r * n + j], size)
            return now

        start = [(f.splat(0.0, lanes), self.vector)] * (len(heads) * n)
        with f.loop(f.index(0), f.index(count), lanes, start) as at:
            at.carry(*step(at.iv, lanes, at.args))
        found = [row_sums(f, at.results[i : i + n], lanes) for i in range(0, len(start), n)]
        if count < width:
            rest = self._tail_dots(row, heads, keys, count)
            found = [vadd(f, a, b, n) for a, b in zip(found, rest, strict=True)]
        return found

    def _tail_dots(
        self, row: str, heads: Sequence[str], keys: Sequence[str], first: int
    ) -> list[str]:
        """The part of the dot products from element `first`, one element at a time."""
        f, q, n = self.f, self.given.q, len(keys)
        start = [(f.splat(0.0, n), vector_type(n))] * len(heads)
        with f.loop(f.index(first), f.index(self.given.width), 1, start) as at:
            loaded = [self.key.load(f, key, at.iv) for key in keys]
            part = f.op(f"vector.from_elements {', '.join(loaded)} : {vector_type(n)}")
            sums = []
            for head, held in zip(heads, at.args, strict=True):
                query = f.broadcast(q.load(f, row, head, at.iv), n)
                sums.append(f.fma(query, part, held, n))
            at.carry(*sums)
        return at.results

    # --- softmax ----------------------------------------------------------------------------------

    def _softmax(self, heads: tuple[str, str], count: str) -> None:
        """Scores become exp(score - top), 0 behind the last key; top, total and fade advance."""
        f, lanes = self.f, self.lanes
        bits = vector_type(lanes, "i1")
        parts = [f.index(at) for at in range(0, BLOCK, lanes)]
        masks = [self._mask(at, count) for at in range(0, BLOCK, lanes)]
        hidden = f.splat(MINUS_INFINITY, lanes)
        with f.loop(*heads) as head:
            scores = [
                f.select(
                    mask,
                    self.score.vload(f, lanes, head.iv, at),
                    hidden,
                    f"{bits}, {self.vector}",
                )
                for at, mask in zip(parts, masks, strict=True)
            ]
            found = horizontal(f, tree(f, scores, vgreater, lanes), lanes, vgreater)
            old = self.top.load(f, head.iv)
            top = greater(f, found, old)
            o = FloatOps(f, 0)
            none = f.op(f"arith.cmpf oeq, {top}, {f.f32(MINUS_INFINITY)} : f32")
            safe = f.select(none, f.f32(0.0), top, "f32")
            fade = o("math.exp", o("subf", old, safe))
            wide = f.broadcast(safe, lanes)
            weights = []
            for at, score in zip(parts, scores, strict=True):
                value = f.arith("subf", score, wide, type_=self.vector)
                value = exp_falling(f, value, self.vector)
                self.score.vstore(f, value, lanes, head.iv, at)
                weights.append(value)
            added = horizontal(f, tree(f, weights, vadd, lanes), lanes, vadd)
            total = o("addf", o("mulf", self.total.load(f, head.iv), fade), added)
            self.total.store(f, total, head.iv)
            self.top.store(f, top, head.iv)
            self.fade.store(f, fade, head.iv)

    def _mask(self, at: int, count: str) -> str:
        """Which of the columns [at, at + lanes) are keys."""
        f, lanes = self.f, self.lanes
        ints = vector_type(lanes, "i32")
        number = f.constant(f"arith.constant dense<{list(range(at, at + lanes))}> : {ints}")
        end = f.broadcast(f.cast_index(count, "index", "i32"), lanes, "i32")
        return f.op(f"arith.cmpi slt, {number}, {end} : {ints}")

    # --- values -----------------------------------------------------------------------------------

    def _weigh(self, row: str, heads: tuple[str, str], count: str) -> None:
        """out[row, h] = fade * out[row, h] + weights @ keys. A tile that passes the last head
        repeats it: all of its rows are read before any is written.
        """
        f, shape = self.f, tile_shape(self.target)
        last = f.sub(heads[1], f.index(1))
        for at, widths in _stripes(f, self.given.width, self.lanes, shape.vectors):
            with f.loop(*heads, shape.rows) as head:
                rows = [f.min(f.offset(head.iv, r), last) for r in range(shape.rows)]
                self._weigh_tile(row, rows, at, widths, count)

    def _weigh_tile(
        self, row: str, heads: Sequence[str], at: list[str], widths: list[int], count: str
    ) -> None:
        f, out = self.f, self.given.out
        start: list[list[str]] = []
        for head in heads:
            fade = self.fade.load(f, head)
            start.append([])
            for column, width in zip(at, widths, strict=True):
                held = out.vload(f, width, row, head, column)
                by = f.broadcast(fade, width)
                start[-1].append(f.arith("mulf", held, by, type_=vector_type(width)))
        sums = outer_product(
            f,
            (f.index(0), count),
            lambda j, r: self.score.load(f, heads[r], j),
            lambda j, v: self.key.vload(f, widths[v], j, at[v]),
            start,
            widths,
        )
        for head, values in zip(heads, sums, strict=True):
            for column, width, value in zip(at, widths, values, strict=True):
                out.vstore(f, value, width, row, head, column)

    def _finish(self, row: str, heads: tuple[str, str]) -> None:
        """out / total; zeros for a query that saw no key."""
        f, out = self.f, self.given.out
        with f.loop(*heads) as head:
            total = self.total.load(f, head.iv)
            none = f.op(f"arith.cmpf oeq, {total}, {f.f32(0.0)} : f32")
            total = f.select(none, f.f32(1.0), total, "f32")
            share = f.arith("divf", f.f32(1.0), total, type_="f32")
            for column, width in columns(f, self.given.width, self.lanes):
                value = out.vload(f, width, row, head.iv, column)
                value = f.arith("mulf", value, f.broadcast(share, width), type_=vector_type(width))
                out.vstore(f, value, width, row, head.iv, column)


def _stripes(f: Fn, width: int, lanes: int, vectors: int) -> Iterator[tuple[list[str], list[int]]]:
    """Cover a row's elements by stripes of a few vectors: their places and widths. As with
    `columns`, the body of the Python `for` is emitted once for a loop and once for each rest.
    """
    full = width // lanes
    for vector, count in columns(f, full, vectors):
        first = f.mul(vector, f.index(lanes))
        yield [f.offset(first, v * lanes) for v in range(count)], [lanes] * count
    for at, rest in pieces(width - full * lanes, lanes):
        yield [f.index(full * lanes + at)], [rest]


def keys_of(f: Fn, given: Given, target: CodegenTarget, row: str) -> Keys:
    """What a query row attends to."""
    ring = SharedRows.open(
        f, given.state.name, given.slots, "%lit0", width=given.width, element=target.kv_dtype
    )
    position = f.cast_index(given.positions.load(f, row), "i64", "index")
    end = f.max(f.offset(position, 1), f.index(0))
    window = f.min(end, "%lit1")
    oldest = f.sub(end, window)
    if given.visible is None:
        return Keys(ring, None, oldest, window, f.index(0))
    entry = open_entry(f, given.state.name, given.slots, "%lit2")
    rows = entry.view(
        SECOND_OFFSET, ("?", given.width), target.kv_dtype, entry.word(SECOND_ROWS), "older"
    )
    older = f.cast_index(given.visible.load(f, row), "i64", "index")
    if given.indices is not None:
        older = f.min(older, f.index(int(given.spec.operands[-2].shape[1])))
    return Keys(ring, rows, oldest, window, older)


def emit_rows(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    given = Given.of(spec)
    work = Workspace(f, given, _plan(spec, target), target)
    with f.loop("%begin", "%end") as row:
        keys = keys_of(f, given, target, row.iv)
        work.attend(row.iv, keys, (f.index(0), f.index(given.heads)))


def emit_heads(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    given = Given.of(spec)
    work = Workspace(f, given, _plan(spec, target), target)
    row = f.index(0)
    with f.when(f.cmp("slt", "%begin", "%end")):
        work.attend(row, keys_of(f, given, target, row), ("%begin", "%end"))


def _plan(spec: GroupSpec, target: CodegenTarget) -> ScratchPlan:
    given = Given.of(spec)
    plan = ScratchPlan()
    plan.add("key", (BLOCK, given.width + PAD))
    plan.add("score", (given.heads, BLOCK))
    for name in ("top", "total", "fade"):
        plan.add(name, (given.heads,))
    return plan


def thread_scratch(spec: GroupSpec, target: CodegenTarget) -> int:
    return _plan(spec, target).nbytes


register(Kernel("compressed_attention", "rows", emit_rows, thread_scratch=thread_scratch))
register(
    Kernel(
        "decode_compressed_attention",
        "heads",
        emit_heads,
        lambda spec: Given.of(spec).heads,
        thread_scratch,
    )
)
