"""Write the keys and values of the call's rows into the KV cache.

Operands: k[ROWS, Hkv, D], v[ROWS, Hkv, Dv] (f32, rows may be strided), positions[ROWS],
slots[ROWS] (i64), state. Literal: the layer's entry in the state header. Values are rounded to
the cache's element (nearest even). A row with a negative position is padding and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.artifact.layout import KEY_BLOCK
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.kv_address import KVCache, kv_cache
from bessemer.codegen.kernels.vectors import Array, columns, operand


@dataclass(frozen=True)
class Update:
    """The operands of a cache update, its sizes, and the layer's cache."""

    k: Array
    v: Array
    positions: Array
    heads: int
    key_width: int
    value_width: int
    cache: KVCache

    @staticmethod
    def open(f: Fn, spec: GroupSpec, target: CodegenTarget) -> Update:
        k, v, positions, slots, state = (operand(spec, i) for i in range(5))
        heads, key_width = (int(n) for n in spec.operands[0].shape[1:])
        value_width = int(spec.operands[1].shape[2])
        cache = kv_cache(
            f,
            state.name,
            slots,
            "%lit0",
            kv_heads=heads,
            key_width=key_width,
            value_width=value_width,
            element=target.kv_dtype,
        )
        return Update(k, v, positions, heads, key_width, value_width, cache)


def emit(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    update = Update.open(f, spec, target)
    cache, v = update.cache, update.v
    with f.loop("%begin", "%end") as row:
        position = f.cast_index(update.positions.load(f, row.iv), "i64", "index")
        with f.when(f.cmp("sge", position, f.index(0))):
            block = cache.block_of(f, f.div(position, f.index(KEY_BLOCK)))
            within = f.rem(position, f.index(KEY_BLOCK))
            with f.loop(f.index(0), f.index(update.heads)) as head:
                place = (head.iv, block, within)
                _write_keys(f, update.k, row.iv, cache, place, update.key_width, target.lanes)
                for at, width in columns(f, update.value_width, target.lanes):
                    part = v.vload(f, width, row.iv, head.iv, at)
                    cache.values.vstore(f, part, width, *place, at)


def _write_keys(
    f: Fn,
    k: Array,
    row: str,
    cache: KVCache,
    place: tuple[str, str, str],
    key_width: int,
    lanes: int,
) -> None:
    """One key: read as vectors, written 32 elements apart (a block is [key width][32])."""
    head, block, within = place
    element = cache.keys.element
    for at, width in columns(f, key_width, lanes):
        part = f.narrow(k.vload(f, width, row, head, at), element, width)
        for lane in range(width):
            one = f.op(f"vector.extract {part}[{lane}] : {element} from vector<{width}x{element}>")
            cache.keys.store(f, one, head, block, f.offset(at, lane), within)


register(Kernel("kv_update", "rows", emit))
