"""Where the keys and values of a layer lie.

A layer's keys are [kv_heads][ring rows / 32][key width][32] and its values [kv_heads][ring rows]
[value width]; position p of the sequence is ring row p % ring rows. Ring rows are a multiple of
32, so the block of positions [32 b, 32 b + 32) is ring block b % (ring rows / 32), whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bessemer.artifact.layout import KEY_BLOCK
from bessemer.codegen.emit import Fn
from bessemer.codegen.kernels.state_entry import (
    FIRST_OFFSET,
    FIRST_ROWS,
    SECOND_OFFSET,
    open_entry,
)
from bessemer.codegen.kernels.vectors import Array


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
    found = open_entry(f, state, slots, entry)
    blocks = f.div(found.word(FIRST_ROWS), f.index(KEY_BLOCK))
    keys = found.view(FIRST_OFFSET, (kv_heads, "?", key_width, KEY_BLOCK), element, blocks, "keys")
    values = found.view(
        SECOND_OFFSET, (kv_heads, "?", KEY_BLOCK, value_width), element, blocks, "values"
    )
    return KVCache(keys, values, blocks)
