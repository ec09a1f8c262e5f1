"""Compressed attention by plain loops: what the scheduled kernels are compared with, and a fallback
for them.

Groups with the operands and literals of the kernels `block_pool`, `index_topk` and
`compressed_attention`. One element at a time, in the order of the formulas; only where rows lie,
and how compressed rows are rounded and kept, is shared with the kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bessemer.artifact.layout import KEY_BLOCK
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.block_pool import Pool, closing_rows, round_row
from bessemer.codegen.kernels.compressed_attention import Given, Keys, keys_of
from bessemer.codegen.kernels.state_entry import (
    SECOND_OFFSET,
    SECOND_ROWS,
    StreamRows,
    open_entry,
)
from bessemer.codegen.kernels.vectors import Array, ScratchPlan, operand
from bessemer.codegen.payload.scalar import Scalars
from bessemer.graph.dtypes import DType

# --- pooling --------------------------------------------------------------------------------------


def emit_pool(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    pool = Pool.of(spec)
    stream = pool.open(f, target.kv_dtype)
    plan = _pool_plan(spec, target)
    row, turned = plan.view(f, "row"), plan.view(f, "turned")
    for closing in closing_rows(f, pool):
        with f.loop(f.index(0), f.index(pool.width)) as at:
            row.store(f, _pooled(f, pool, stream, closing.end, at.iv), at.iv)
        _finish_row(f, pool, row, closing.row)
        kept = round_row(f, pool, row, turned, target.lanes)
        stream.write(f, closing.block, kept, pool.width, target.lanes)


def _pooled(f: Fn, pool: Pool, stream: StreamRows, end: str, at: str) -> str:
    """One element of the weighted sum over the windows that end before position `end`."""
    s, overlap = Scalars(f, DType.F32), pool.spec.attr("overlap")
    rate, count = f.index(pool.rate), pool.rate * (2 if overlap else 1)
    start = f.sub(end, f.index(count))
    low = f.max(start, f.index(0))

    def place(position: str) -> tuple[str, str, str]:
        """Ring row, row of the bias, and element of the projected row."""
        column = at
        if overlap:
            own = f.cmp("sge", position, f.sub(end, rate))
            column = f.select(own, f.offset(at, pool.width), at, "index")
        return f.rem(position, stream.count), f.rem(position, rate), column

    def gate(ring: str, row: str, column: str) -> str:
        return s.add(
            stream.pending.load(f, ring, f.index(1), column), pool.bias.load(f, row, column)
        )

    with f.loop(low, end, 1, [(s.const(-math.inf), "f32")]) as i:
        i.carry(s.maximum(i.args[0], gate(*place(i.iv))))
    lowest = s.compare("eq", i.results[0], s.const(-math.inf))
    top = s.select(lowest, s.const(0), i.results[0])
    with f.loop(low, end, 1, [(s.const(0), "f32")] * 2) as i:
        ring, row, column = place(i.iv)
        weight = s.exp(s.sub(gate(ring, row, column), top))
        value = stream.pending.load(f, ring, f.index(0), column)
        i.carry(s.add(i.args[0], s.mul(weight, value)), s.add(i.args[1], weight))
    return s.div(*i.results)


def _finish_row(f: Fn, pool: Pool, row: Array, token: str) -> None:
    """RMS norm, and the rotation of the trailing pairs."""
    s = Scalars(f, DType.F32)
    width = f.index(pool.width)
    with f.loop(f.index(0), width, 1, [(s.const(0), "f32")]) as at:
        value = row.load(f, at.iv)
        at.carry(s.accumulate("sum", at.args[0], s.mul(value, value)))
    mean = s.div(at.results[0], s.const(float(pool.width)))
    root = s.op("math.sqrt", s.add(mean, s.const(float(pool.spec.attr("eps")))))
    with f.loop(f.index(0), width) as at:
        value = s.mul(s.div(row.load(f, at.iv), root), pool.norm.load(f, at.iv))
        row.store(f, value, at.iv)
    first = pool.width - 2 * pool.half
    with f.loop(f.index(0), f.index(pool.half)) as pair:
        even = f.offset(f.mul(pair.iv, f.index(2)), first)
        odd = f.offset(even, 1)
        a, b = row.load(f, even), row.load(f, odd)
        c, n = pool.cos.load(f, token, pair.iv), pool.sin.load(f, token, pair.iv)
        row.store(f, s.sub(s.mul(a, c), s.mul(b, n)), even)
        row.store(f, s.add(s.mul(b, c), s.mul(a, n)), odd)


def _pool_plan(spec: GroupSpec, target: CodegenTarget) -> ScratchPlan:
    plan = ScratchPlan()
    plan.add("row", (Pool.of(spec).width,))
    plan.add("turned", (Pool.of(spec).width,))
    return plan


# --- choosing -------------------------------------------------------------------------------------


def emit_topk(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """k times the best row that is not chosen yet; then the chosen ones in their order."""
    visible, out = operand(spec, 2), operand(spec, 5)
    plan = _topk_plan(spec, target)
    scores, chosen = plan.view(f, "scores"), plan.view(f, "chosen")
    k = f.index(int(spec.operands[5].shape[1]))
    with f.loop("%begin", "%end") as row:
        end = f.cast_index(visible.load(f, row.iv), "i64", "index")
        with f.loop(f.index(0), end) as i:
            scores.store(f, _score(f, spec, target, row.iv, i.iv), i.iv)
            chosen.store(f, f.i64(0), i.iv)
        with f.loop(f.index(0), f.min(k, end)):
            chosen.store(f, f.i64(1), _best(f, scores, chosen, end))
        with f.loop(f.index(0), k) as i:
            out.store(f, f.i64(-1), row.iv, i.iv)
        with f.loop(f.index(0), end, 1, [(f.index(0), "index")]) as i:
            (at,) = i.args
            taken = f.cast_index(chosen.load(f, i.iv), "i64", "index")
            with f.when(f.cmp("ne", taken, f.index(0))):
                out.store(f, f.cast_index(i.iv, "index", "i64"), row.iv, at)
            i.carry(f.add(at, taken))


def _score(f: Fn, spec: GroupSpec, target: CodegenTarget, row: str, number: str) -> str:
    """scale * sum over h of weights[h] * relu(q[h] . row); -inf in place of NaN."""
    s = Scalars(f, DType.F32)
    q, weights, slots, state = (operand(spec, i) for i in (0, 1, 3, 4))
    heads, width = (int(n) for n in spec.operands[0].shape[1:])
    entry = open_entry(f, state.name, slots, "%lit0")
    blocks = f.div(entry.word(SECOND_ROWS), f.index(KEY_BLOCK))
    shape: tuple[int | str, ...] = ("?", width, KEY_BLOCK)
    rows = entry.view(SECOND_OFFSET, shape, target.kv_dtype, blocks, "rows")
    block, within = f.div(number, f.index(KEY_BLOCK)), f.rem(number, f.index(KEY_BLOCK))
    with f.loop(f.index(0), f.index(heads), 1, [(s.const(0), "f32")]) as head:
        with f.loop(f.index(0), f.index(width), 1, [(s.const(0), "f32")]) as at:
            key = f.widen(rows.load(f, block, at.iv, within), target.kv_dtype)
            product = s.product(q.load(f, row, head.iv, at.iv), key)
            at.carry(s.accumulate("sum", at.args[0], product))
        relu = s.maximum(at.results[0], s.const(0))
        weighted = s.mul(weights.load(f, row, head.iv), relu)
        head.carry(s.add(head.args[0], weighted))
    score = s.mul(head.results[0], s.const(float(spec.attr("scale"))))
    return s.select(s.compare("eq", score, score), score, s.const(-math.inf))


def _best(f: Fn, scores: Array, chosen: Array, end: str) -> str:
    """The first of the best rows that are not chosen."""
    s = Scalars(f, DType.F32)
    none = f.index(-1)
    carried = [(s.const(-math.inf), "f32"), (none, "index")]
    with f.loop(f.index(0), end, 1, carried) as i:
        best, at = i.args
        score = scores.load(f, i.iv)
        free = f.cmp("eq", chosen.load(f, i.iv), f.i64(0), "i64")
        better = s.compare("gt", score, best)
        better = f.op(f"arith.ori {better}, {f.cmp('slt', at, f.index(0))} : i1")
        better = f.op(f"arith.andi {better}, {free} : i1")
        i.carry(s.select(better, score, best), f.select(better, i.iv, at, "index"))
    return i.results[1]


def _topk_plan(spec: GroupSpec, target: CodegenTarget) -> ScratchPlan:
    plan = ScratchPlan()
    plan.add("scores", (spec.attr("rows"),))
    plan.add("chosen", (spec.attr("rows"),), "i64")
    return plan


# --- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Head:
    """One query row and head over the row's keys."""

    f: Fn
    s: Scalars
    given: Given
    keys: Keys
    row: str
    head: str

    def key(self, number: str, at: str) -> str:
        """An element of key `number`, f32: it is read where it lies."""
        f, keys = self.f, self.keys
        ring = keys.ring.rows
        place = f.rem(f.add(keys.oldest, number), keys.ring.count)
        if keys.compressed is None:
            return f.widen(ring.load(f, place, at), ring.element)
        value = f.fresh("key")
        f.line(f"{value} = scf.if {f.cmp('slt', number, keys.window)} -> ({ring.element}) {{")
        f.line(f"scf.yield {ring.load(f, place, at)} : {ring.element}")
        f.line("} else {")
        older = f.sub(number, keys.window)
        if self.given.indices is not None:
            chosen = self.given.indices.load(f, self.row, older)
            older = f.cast_index(chosen, "i64", "index")
        f.line(f"scf.yield {keys.compressed.load(f, older, at)} : {ring.element}")
        f.line("}")
        return f.widen(value, ring.element)

    def score(self, number: str) -> str:
        """scale * (q . key)"""
        f, s = self.f, self.s
        with f.loop(f.index(0), f.index(self.given.width), 1, [(s.const(0), "f32")]) as at:
            query = self.given.q.load(f, self.row, self.head, at.iv)
            product = s.product(query, self.key(number, at.iv))
            at.carry(s.accumulate("sum", at.args[0], product))
        return s.mul(at.results[0], s.const(float(self.given.spec.attr("scale"))))

    def attend(self) -> None:
        f, s, out = self.f, self.s, self.given.out
        end, width = f.add(self.keys.window, self.keys.older), f.index(self.given.width)
        sink = None if self.given.sinks is None else self.given.sinks.load(f, self.head)
        lowest = s.const(-math.inf)
        with f.loop(f.index(0), end, 1, [(sink or lowest, "f32")]) as key:
            key.carry(s.maximum(key.args[0], self.score(key.iv)))
        top = s.select(s.compare("eq", key.results[0], lowest), s.const(0), key.results[0])
        with f.loop(f.index(0), width) as at:
            out.store(f, s.const(0), self.row, self.head, at.iv)
        start = s.exp(s.sub(sink, top)) if sink else s.const(0)
        with f.loop(f.index(0), end, 1, [(start, "f32")]) as key:
            p = s.exp(s.sub(self.score(key.iv), top))
            with f.loop(f.index(0), width) as at:
                held = out.load(f, self.row, self.head, at.iv)
                value = s.add(held, s.mul(p, self.key(key.iv, at.iv)))
                out.store(f, value, self.row, self.head, at.iv)
            key.carry(s.add(key.args[0], p))
        total = key.results[0]
        total = s.select(s.compare("eq", total, s.const(0)), s.const(1), total)
        with f.loop(f.index(0), width) as at:
            held = out.load(f, self.row, self.head, at.iv)
            out.store(f, s.div(held, total), self.row, self.head, at.iv)


def emit_attention(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    given, s = Given.of(spec), Scalars(f, DType.F32)
    with f.loop("%begin", "%end") as row:
        keys = keys_of(f, given, target, row.iv)
        with f.loop(f.index(0), f.index(given.heads)) as head:
            _Head(f, s, given, keys, row.iv, head.iv).attend()


register(
    Kernel(
        "generic_block_pool",
        "rows",
        emit_pool,
        thread_scratch=lambda spec, target: _pool_plan(spec, target).nbytes,
    )
)
register(
    Kernel(
        "generic_index_topk",
        "rows",
        emit_topk,
        thread_scratch=lambda spec, target: _topk_plan(spec, target).nbytes,
    )
)
register(Kernel("generic_compressed_attention", "rows", emit_attention))
