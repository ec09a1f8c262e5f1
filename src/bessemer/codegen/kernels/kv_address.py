"""Where keys and values lie: the one place that turns a slot and a layer into addresses.

The state memory (`bessemer.artifact.layout.StateLayout`) begins with a header of int64 words. A
layer's keys are [kv_heads][ring rows / 32][key width][32] and its values [kv_heads][ring rows]
[value width]; position p of the sequence is ring row p % ring rows. Ring rows are a multiple of
32, so the block of positions [32 b, 32 b + 32) is ring block b % (ring rows / 32), whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bessemer.artifact.layout import HEADER_WORDS, KEY_BLOCK, LAYER_WORDS
from bessemer.codegen.emit import Fn, memref_type
from bessemer.codegen.kernels.vectors import Array

# Words of the header, and of a layer's entry in it.
SLOT_BYTES, HEADER_BYTES = 2, 7
KEY_OFFSET, VALUE_OFFSET, RING_ROWS = 0, 1, 2


@dataclass(frozen=True)
class KVCache:
    """A layer's cache in one slot.

    keys: memref<kv_heads x blocks x key_width x 32>; values: memref<kv_heads x blocks x 32 x
    value_width>, both of the cache's element.  blocks: the ring's blocks of 32 rows (index).
    """

    keys: Array
    values: Array
    blocks: str

    def block_of(self, f: Fn, block: str) -> str:
        """The ring block that holds the positions [32 block, 32 block + 32)."""
        return f.rem(block, self.blocks)

    def blocks_from(self, f: Fn, first: str) -> Callable[[str], str]:
        """The ring blocks of first + j, for j less than the ring's blocks: one division for all."""
        start = self.block_of(f, first)

        def at(j: str) -> str:
            block = f.add(start, j)
            wrapped = f.cmp("sge", block, self.blocks)
            return f.select(wrapped, f.sub(block, self.blocks), block, "index")

        return at


def kv_cache(
    f: Fn,
    state: str,
    slots: Array,
    entry: str,
    *,
    kv_heads: int,
    key_width: int,
    value_width: int,
    element: str,
) -> KVCache:
    """The cache of the layer whose header entry is `entry` (an index value), in the slot of the
    call's first row (all rows of a call belong to one slot).

    state: memref<?xi8>; slots: memref of i64; element: "f16" or "f32".
    """
    first = f.offset(f.mul(entry, f.index(LAYER_WORDS)), HEADER_WORDS)
    header = Array(
        f.op(
            f"memref.view {state}[{f.index(0)}][{f.offset(first, LAYER_WORDS)}] "
            ": memref<?xi8> to memref<?xi64>",
            "header",
        ),
        "memref<?xi64>",
        "i64",
    )

    def word(at: str) -> str:
        return f.cast_index(header.load(f, at), "i64", "index")

    slot = f.cast_index(slots.load(f, f.index(0)), "i64", "index")
    base = f.add(word(f.index(HEADER_BYTES)), f.mul(slot, word(f.index(SLOT_BYTES))))
    blocks = f.div(word(f.offset(first, RING_ROWS)), f.index(KEY_BLOCK))

    def view(offset_word: int, widths: tuple[int, int], hint: str) -> Array:
        at = f.add(base, word(f.offset(first, offset_word)))
        type_ = memref_type((kv_heads, "?", *widths), element)
        text = f"memref.view {state}[{at}][{blocks}] : memref<?xi8> to {type_}"
        return Array(f.op(text, hint), type_, element)

    keys = view(KEY_OFFSET, (key_width, KEY_BLOCK), "keys")
    values = view(VALUE_OFFSET, (KEY_BLOCK, value_width), "values")
    return KVCache(keys, values, blocks)
