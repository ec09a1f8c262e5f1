"""The compressed rows that a query chooses: scores against the index rows, and the k best.

`index_topk`: q[ROWS, H, D], weights[ROWS, H], visible[ROWS], slots[ROWS] (i64), state,
out[ROWS, k] (i64); a thread takes rows. For one row the scores are shared out over blocks of index
rows: `index_scores` has `keys` (i32[rows]) in place of out, and `index_select`: keys, visible, out,
makes the choice on one thread. Literal: the entry of the index stream in the state header.
Attributes: scale, rows (how many a full context has, in whole blocks).

A score is scale * sum over h of weights[h] * relu(q[h] . row). Index rows lie in blocks of 32,
[D][32], so that scores are outer products, the 32 rows in vector lanes. Scores become integers of
the same order. The k-th best is found bit by bit, then rows are taken in their order: all that are
better, and the first of those that are equal. So the lowest row wins a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bessemer.artifact.layout import KEY_BLOCK
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.attention_steps import outer_product, target_vectors
from bessemer.codegen.kernels.state_entry import SECOND_OFFSET, SECOND_ROWS, open_entry
from bessemer.codegen.kernels.tile import tile_shape
from bessemer.codegen.kernels.vectors import (
    Array,
    ScratchPlan,
    operand,
    vadd,
    vector_type,
)

# Parts that the blocks of one query are cut into: enough to occupy many cores evenly.
PARTS = 64
_LEAST = -(2**31)
_MINUS_INFINITY_BITS = -8388608  # 0xFF800000
_LOW_BITS = 0x7FFFFFFF


@dataclass(frozen=True)
class Scorer:
    """What the scores of a call are made of. widened: a block of index rows in f32."""

    f: Fn
    spec: GroupSpec
    target: CodegenTarget
    q: Array
    weights: Array
    rows: Array
    widened: Array

    @staticmethod
    def open(f: Fn, spec: GroupSpec, target: CodegenTarget) -> Scorer:
        q, weights, slots, state = (operand(spec, i) for i in (0, 1, 3, 4))
        width = int(spec.operands[0].shape[2])
        entry = open_entry(f, state.name, slots, "%lit0")
        blocks = f.div(entry.word(SECOND_ROWS), f.index(KEY_BLOCK))
        shape: tuple[int | str, ...] = ("?", width, KEY_BLOCK)
        rows = entry.view(SECOND_OFFSET, shape, target.kv_dtype, blocks, "rows")
        widened = _plan(spec, target).view(f, "block")
        return Scorer(f, spec, target, q, weights, rows, widened)

    @property
    def heads(self) -> int:
        return int(self.spec.operands[0].shape[1])

    @property
    def width(self) -> int:
        return int(self.spec.operands[0].shape[2])

    def score(self, row: str, blocks: tuple[str, str], visible: str, keys: Array) -> None:
        """keys[32 b + j] for the blocks b in a range; the least integer for rows not visible."""
        f, lanes = self.f, self.target.lanes
        vectors = target_vectors(self.target, tile_shape(self.target).vectors)
        with f.loop(*blocks) as block:
            for part in (f.index(i) for i in range(0, KEY_BLOCK, lanes)):
                with f.loop(f.index(0), f.index(self.width)) as d:
                    value = self.rows.vload(f, lanes, block.iv, d.iv, part)
                    self.widened.vstore(f, value, lanes, d.iv, part)
            first = f.mul(block.iv, f.index(KEY_BLOCK))
            with f.loop(f.index(0), f.index(KEY_BLOCK), vectors * lanes) as at:
                places = [f.offset(at.iv, v * lanes) for v in range(vectors)]
                totals = self._totals(row, places)
                for place, total in zip(places, totals, strict=True):
                    number = f.add(first, place)
                    self._keep(number, total, visible, keys)

    def _totals(self, row: str, places: Sequence[str]) -> list[str]:
        """Weighted sums over all heads, for the index rows at some places of the block."""
        f, tall = self.f, tile_shape(self.target).rows
        type_ = vector_type(self.target.lanes)
        full = self.heads // tall * tall
        start = [f.splat(0.0, self.target.lanes)] * len(places)
        with f.loop(f.index(0), f.index(full), tall, [(s, type_) for s in start]) as head:
            head.carry(*self._add_heads(row, head.iv, tall, places, head.args))
        if full == self.heads:
            return head.results
        return self._add_heads(row, f.index(full), self.heads - full, places, head.results)

    def _add_heads(
        self, row: str, head: str, count: int, places: Sequence[str], totals: Sequence[str]
    ) -> list[str]:
        f, lanes = self.f, self.target.lanes
        heads = [f.offset(head, r) for r in range(count)]
        products = outer_product(
            f,
            (f.index(0), f.index(self.width)),
            lambda d, r: self.q.load(f, row, heads[r], d),
            lambda d, v: self.widened.vload(f, lanes, d, places[v]),
            [[f.splat(0.0, lanes)] * len(places)] * count,
            [lanes] * len(places),
        )
        now = list(totals)
        for place, values in zip(heads, products, strict=True):
            weight = f.broadcast(self.weights.load(f, row, place), lanes)
            for v, value in enumerate(values):
                relu = f.arith("maximumf", value, f.splat(0.0, lanes), type_=vector_type(lanes))
                now[v] = f.fma(weight, relu, now[v], lanes)
        return now

    def _keep(self, number: str, total: str, visible: str, keys: Array) -> None:
        """Store scores as integers of the same order."""
        f, lanes = self.f, self.target.lanes
        floats, ints = vector_type(lanes), vector_type(lanes, "i32")
        bits = vector_type(lanes, "i1")

        def const(value: int) -> str:
            return f.constant(f"arith.constant dense<{value}> : {ints}")

        score = f.arith("mulf", total, f.splat(self.spec.attr("scale"), lanes), type_=floats)
        score = vadd(f, score, f.splat(0.0, lanes), lanes)  # -0 becomes 0
        raw = f.op(f"arith.bitcast {score} : {floats} to {ints}")
        is_nan = f.op(f"arith.cmpf uno, {score}, {score} : {floats}")
        raw = f.select(is_nan, const(_MINUS_INFINITY_BITS), raw, f"{bits}, {ints}")
        negative = f.op(f"arith.cmpi slt, {raw}, {const(0)} : {ints}")
        flipped = f.op(f"arith.xori {raw}, {const(_LOW_BITS)} : {ints}")
        key = f.select(negative, flipped, raw, f"{bits}, {ints}")
        iota = f.constant(f"arith.constant dense<{list(range(lanes))}> : {ints}")
        place = f.broadcast(f.cast_index(number, "index", "i32"), lanes, "i32")
        end = f.broadcast(f.cast_index(visible, "index", "i32"), lanes, "i32")
        seen = f.op(f"arith.cmpi slt, {f.add(place, iota, ints)}, {end} : {ints}")
        key = f.select(seen, key, const(_LEAST), f"{bits}, {ints}")
        f.line(f"vector.store {key}, {keys.name}[{number}] : {keys.type}, {ints}")


def _blocks(f: Fn, visible: str) -> str:
    return f.op(f"arith.ceildivsi {visible}, {f.index(KEY_BLOCK)} : index")


def select(f: Fn, keys: Array, visible: str, out: Array, row: str, k: int, lanes: int) -> None:
    """out[row] = the k best rows in ascending order, then -1."""
    with f.when(f.cmp("sle", visible, f.index(k))):
        _take_all(f, visible, out, row, k)
    with f.otherwise():
        threshold = _threshold(f, keys, visible, k, lanes)
        _take(f, keys, visible, out, row, k, threshold, lanes)


def _take_all(f: Fn, visible: str, out: Array, row: str, k: int) -> None:
    with f.loop(f.index(0), f.index(k)) as i:
        there = f.cmp("slt", i.iv, visible)
        number = f.cast_index(i.iv, "index", "i64")
        out.store(f, f.select(there, number, f.i64(-1), "i64"), row, i.iv)


def _count(f: Fn, keys: Array, visible: str, predicate: str, bound: str, lanes: int) -> str:
    """How many keys are `predicate` (sge, sgt) than a bound, as i32."""
    ints = vector_type(lanes, "i32")
    wide = f.broadcast(bound, lanes, "i32")
    zero = f.constant(f"arith.constant dense<0> : {ints}")
    end = f.mul(_blocks(f, visible), f.index(KEY_BLOCK))
    parts = range(0, KEY_BLOCK, lanes)
    with f.loop(f.index(0), end, KEY_BLOCK, [(zero, ints)] * len(parts)) as at:
        now = []
        for part, held in zip(parts, at.args, strict=True):
            place = f.offset(at.iv, part)
            key = f.op(f"vector.load {keys.name}[{place}] : {keys.type}, {ints}")
            hit = f.op(f"arith.cmpi {predicate}, {key}, {wide} : {ints}")
            one = f.op(f"arith.extui {hit} : {vector_type(lanes, 'i1')} to {ints}")
            now.append(f.add(held, one, ints))
        at.carry(*now)
    total = at.results[0]
    for other in at.results[1:]:
        total = f.add(total, other, ints)
    return f.op(f"vector.reduction <add>, {total} : {ints} into i32")


def _threshold(f: Fn, keys: Array, visible: str, k: int, lanes: int) -> str:
    """The k-th largest key (i32): the largest number that k keys reach, from its highest bit."""
    wanted = f.constant(f"arith.constant {k} : i32")

    def advance(held: str, candidate: str) -> str:
        enough = f.cmp("sge", _count(f, keys, visible, "sge", candidate, lanes), wanted, "i32")
        return f.select(enough, candidate, held, "i32")

    least, zero = (f.constant(f"arith.constant {n} : i32") for n in (_LEAST, 0))
    start = advance(least, zero)
    top = f.constant(f"arith.constant {1 << 30} : i32")
    one = f.constant("arith.constant 1 : i32")
    carried = [(start, "i32"), (top, "i32")]
    with f.loop(f.index(0), f.index(31), 1, carried) as turn:
        held, bit = turn.args
        found = advance(held, f.add(held, bit, "i32"))
        turn.carry(found, f.op(f"arith.shrui {bit}, {one} : i32"))
    return turn.results[0]


def _take(
    f: Fn,
    keys: Array,
    visible: str,
    out: Array,
    row: str,
    k: int,
    threshold: str,
    lanes: int,
) -> None:
    """The rows above the threshold, and the first of those at it, until there are k."""
    better = _count(f, keys, visible, "sgt", threshold, lanes)
    wanted = f.constant(f"arith.constant {k} : i32")
    spare = f.cast_index(f.sub(wanted, better, "i32"), "i32", "index")
    carried = [(f.index(0), "index"), (spare, "index")]
    with f.loop(f.index(0), visible, 1, carried) as i:
        at, left = i.args
        key = keys.load(f, i.iv)
        above = f.cmp("sgt", key, threshold, "i32")
        equal = f.cmp("eq", key, threshold, "i32")
        room = f.cmp("sgt", left, f.index(0))
        equal = f.op(f"arith.andi {equal}, {room} : i1")
        chosen = f.op(f"arith.ori {above}, {equal} : i1")
        with f.when(chosen):
            out.store(f, f.cast_index(i.iv, "index", "i64"), row, at)
        step = f.op(f"arith.index_castui {chosen} : i1 to index")
        used = f.op(f"arith.index_castui {equal} : i1 to index")
        i.carry(f.add(at, step), f.sub(left, used))


def _visible(f: Fn, visible: Array, row: str) -> str:
    return f.cast_index(visible.load(f, row), "i64", "index")


def emit_rows(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    scorer = Scorer.open(f, spec, target)
    visible, out = operand(spec, 2), operand(spec, 5)
    keys = _plan(spec, target).view(f, "keys")
    k = int(spec.operands[5].shape[1])
    with f.loop("%begin", "%end") as row:
        count = _visible(f, visible, row.iv)
        with f.when(f.cmp("sgt", count, f.index(k))):  # else all are chosen
            scorer.score(row.iv, (f.index(0), _blocks(f, count)), count, keys)
        select(f, keys, count, out, row.iv, k, target.lanes)


def emit_scores(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    scorer = Scorer.open(f, spec, target)
    row = f.index(0)
    count = _visible(f, operand(spec, 2), row)
    blocks, parts = _blocks(f, count), f.index(PARTS)
    begin, end = (f.div(f.mul(unit, blocks), parts) for unit in ("%begin", "%end"))
    with f.when(f.cmp("sgt", count, f.index(spec.attr("k")))):
        scorer.score(row, (begin, end), count, operand(spec, 5))


def emit_select(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    keys, visible, out = (operand(spec, i) for i in range(3))
    k = int(spec.operands[2].shape[1])
    with f.loop("%begin", "%end"):
        row = f.index(0)
        select(f, keys, _visible(f, visible, row), out, row, k, target.lanes)


def _plan(spec: GroupSpec, target: CodegenTarget) -> ScratchPlan:
    plan = ScratchPlan()
    plan.add("block", (int(spec.operands[0].shape[2]), KEY_BLOCK))
    if spec.kind == "index_topk":
        plan.add("keys", (spec.attr("rows"),), "i32")
    return plan


def thread_scratch(spec: GroupSpec, target: CodegenTarget) -> int:
    return _plan(spec, target).nbytes


register(Kernel("index_topk", "rows", emit_rows, thread_scratch=thread_scratch))
register(Kernel("index_scores", "heads", emit_scores, lambda spec: PARTS, thread_scratch))
register(Kernel("index_select", "single", emit_select, lambda spec: 1))
