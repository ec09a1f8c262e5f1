"""Attention by plain loops: what the scheduled kernels are compared with, and a fallback for them.

Two groups with the operands and literals of the kernels `kv_update` and `flash_attention` (also for
decode, where there is one row). Each query row and head is treated by itself: one pass over the
visible keys for the largest score, one for the sums, which are kept in the result; no scratch
memory. Keys and values are read at their absolute positions; nothing is skipped or blocked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bessemer.artifact.layout import KEY_BLOCK
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.kv_address import KVCache, kv_cache
from bessemer.codegen.kernels.kv_update import Update
from bessemer.codegen.kernels.vectors import Array, operand
from bessemer.codegen.payload.scalar import Scalars
from bessemer.graph.dtypes import DType


def emit_kv_update(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """k[ROWS, Hkv, D], v[ROWS, Hkv, Dv], positions, slots, state: one element at a time."""
    update = Update.open(f, spec, target)
    cache = update.cache
    with f.loop("%begin", "%end") as row:
        position = f.cast_index(update.positions.load(f, row.iv), "i64", "index")
        with (
            f.when(f.cmp("sge", position, f.index(0))),
            f.loop(f.index(0), f.index(update.heads)) as head,
        ):
            block, within = _place(f, cache, position)
            with f.loop(f.index(0), f.index(update.key_width)) as at:
                one = f.narrow(update.k.load(f, row.iv, head.iv, at.iv), cache.keys.element)
                cache.keys.store(f, one, head.iv, block, at.iv, within)
            with f.loop(f.index(0), f.index(update.value_width)) as at:
                one = f.narrow(update.v.load(f, row.iv, head.iv, at.iv), cache.values.element)
                cache.values.store(f, one, head.iv, block, within, at.iv)


def _place(f: Fn, cache: KVCache, position: str) -> tuple[str, str]:
    """The ring block of a position, and its place in the block."""
    block = cache.block_of(f, f.div(position, f.index(KEY_BLOCK)))
    return block, f.rem(position, f.index(KEY_BLOCK))


@dataclass(frozen=True)
class _Head:
    """One query row and head: what its loops over keys need."""

    f: Fn
    s: Scalars
    spec: GroupSpec
    q: Array
    cache: KVCache
    row: str
    head: str
    kv_head: str

    def score(self, position: str) -> str:
        """scale * (q . k), soft-capped."""
        f, s = self.f, self.s
        block, within = _place(f, self.cache, position)
        width = int(self.spec.attr("key_width"))
        with f.loop(f.index(0), f.index(width), 1, [(s.const(0), "f32")]) as at:
            key = self.cache.keys.load(f, self.kv_head, block, at.iv, within)
            query = self.q.load(f, self.row, self.head, at.iv)
            product = s.product(query, f.widen(key, self.cache.keys.element))
            at.carry(s.accumulate("sum", at.args[0], product))
        score = s.mul(at.results[0], s.const(float(self.spec.attr("scale"))))
        cap = float(self.spec.attr("softcap"))
        if not cap:
            return score
        bound = s.const(cap)
        return s.mul(s.op("math.tanh", s.div(score, bound)), bound)


def emit_attention(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """q, positions, slots, state, [sinks], out. Rows without a visible key give zeros."""
    q, positions, slots, state, *sinks, out = (operand(spec, i) for i in range(len(spec.operands)))
    heads, kv_heads = int(spec.operands[0].shape[1]), int(spec.attr("kv_heads"))
    cache = kv_cache(
        f,
        state.name,
        slots,
        "%lit0",
        kv_heads=kv_heads,
        key_width=int(spec.attr("key_width")),
        value_width=int(spec.attr("value_width")),
        element=target.kv_dtype,
    )
    s = Scalars(f, DType.F32)
    with f.loop("%begin", "%end") as row:
        position = f.cast_index(positions.load(f, row.iv), "i64", "index")
        end = f.max(f.offset(position, 1), f.index(0))
        first = f.max(f.sub(end, "%lit1"), f.index(0))
        is_full = f.cmp("eq", "%lit1", f.index(0))
        low = f.select(is_full, f.index(0), first, "index")
        with f.loop(f.index(0), f.index(heads)) as head:
            kv_head = f.div(head.iv, f.index(heads // kv_heads))
            one = _Head(f, s, spec, q, cache, row.iv, head.iv, kv_head)
            _attend(one, low, end, sinks[0] if sinks else None, out)


def _attend(one: _Head, low: str, end: str, sinks: Array | None, out: Array) -> None:
    """Softmax over the keys [low, end), and the sum of values, of one query row and head."""
    f, s = one.f, one.s
    sink = sinks.load(f, one.head) if sinks else None
    lowest = s.const(-math.inf)
    with f.loop(low, end, 1, [(sink or lowest, "f32")]) as key:
        key.carry(s.maximum(key.args[0], one.score(key.iv)))
    # Without any key the maximum is -inf; 0 in its place keeps NaN away.
    top = s.select(s.compare("eq", key.results[0], lowest), s.const(0), key.results[0])
    width = f.index(int(one.spec.attr("value_width")))
    with f.loop(f.index(0), width) as at:
        out.store(f, s.const(0), one.row, one.head, at.iv)
    start = s.exp(s.sub(sink, top)) if sink else s.const(0)
    with f.loop(low, end, 1, [(start, "f32")]) as key:
        p = s.exp(s.sub(one.score(key.iv), top))
        block, within = _place(f, one.cache, key.iv)
        with f.loop(f.index(0), width) as at:
            value = one.cache.values.load(f, one.kv_head, block, within, at.iv)
            value = f.widen(value, one.cache.values.element)
            held = out.load(f, one.row, one.head, at.iv)
            out.store(f, s.add(held, s.mul(p, value)), one.row, one.head, at.iv)
        key.carry(s.add(key.args[0], p))
    total = key.results[0]
    total = s.select(s.compare("eq", total, s.const(0)), s.const(1), total)
    with f.loop(f.index(0), width) as at:
        held = out.load(f, one.row, one.head, at.iv)
        out.store(f, s.div(held, total), one.row, one.head, at.iv)


register(Kernel("generic_kv_update", "rows", emit_kv_update))
register(Kernel("generic_attention", "rows", emit_attention))
