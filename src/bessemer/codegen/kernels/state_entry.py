"""Where a session's state lies: the one place that turns a slot and an entry into addresses.

The state memory (`bessemer.artifact.layout.StateLayout`) begins with a header of int64 words. An
entry describes a part of a layer's state by two offsets and two numbers of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bessemer.artifact.layout import HEADER_WORDS, KEY_BLOCK, LAYER_WORDS
from bessemer.codegen.emit import Fn, memref_type
from bessemer.codegen.kernels.vectors import Array, columns

# Words of the header, and of an entry in it.
SLOT_BYTES, HEADER_BYTES = 2, 7
FIRST_OFFSET, SECOND_OFFSET, FIRST_ROWS, SECOND_ROWS = 0, 1, 2, 3


@dataclass(frozen=True)
class StateEntry:
    """One entry of the header in one slot. base: bytes from the state's start to the slot."""

    f: Fn
    state: str
    header: Array
    first: str
    base: str

    def word(self, which: int) -> str:
        """A word of the entry, as an index."""
        f = self.f
        return f.cast_index(self.header.load(f, f.offset(self.first, which)), "i64", "index")

    def view(
        self, offset: int, shape: Sequence[int | str], element: str, count: str, hint: str
    ) -> Array:
        """What lies at one of the entry's offsets; its only unknown size "?" is `count`."""
        f = self.f
        at = f.add(self.base, self.word(offset))
        type_ = memref_type(shape, element)
        text = f"memref.view {self.state}[{at}][{count}] : memref<?xi8> to {type_}"
        return Array(f.op(text, hint), type_, element)


def open_entry(f: Fn, state: str, slots: Array, entry: str) -> StateEntry:
    """The entry number `entry` (an index value), in the slot of the call's first row (all rows of
    a call belong to one slot). state: memref<?xi8>; slots: memref of i64.
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

    def word(at: int) -> str:
        return f.cast_index(header.load(f, f.index(at)), "i64", "index")

    slot = f.cast_index(slots.load(f, f.index(0)), "i64", "index")
    base = f.add(word(HEADER_BYTES), f.mul(slot, word(SLOT_BYTES)))
    return StateEntry(f, state, header, first, base)


@dataclass(frozen=True)
class SharedRows:
    """A layer's ring of rows that are keys and values at once: memref<? x width>."""

    rows: Array
    count: str

    @staticmethod
    def open(
        f: Fn, state: str, slots: Array, entry: str, *, width: int, element: str
    ) -> SharedRows:
        found = open_entry(f, state, slots, entry)
        count = found.word(FIRST_ROWS)
        return SharedRows(found.view(FIRST_OFFSET, ("?", width), element, count, "ring"), count)


@dataclass(frozen=True)
class StreamRows:
    """A compressed stream. pending: memref<? x 2 x projected x f32>, a ring of `count` rows of
    values and gates.  rows: the compressed rows, memref<? x width> of "kv", and of "index" blocks
    memref<? x width x 32>.
    """

    pending: Array
    count: str
    rows: Array
    stream: str

    @staticmethod
    def open(
        f: Fn,
        state: str,
        slots: Array,
        entry: str,
        *,
        stream: str,
        width: int,
        projected: int,
        element: str,
    ) -> StreamRows:
        found = open_entry(f, state, slots, entry)
        count, more = found.word(FIRST_ROWS), found.word(SECOND_ROWS)
        pending = found.view(FIRST_OFFSET, ("?", 2, projected), "f32", count, "pending")
        shape: tuple[int | str, ...] = ("?", width)
        if stream == "index":
            shape, more = ("?", width, KEY_BLOCK), f.div(more, f.index(KEY_BLOCK))
        rows = found.view(SECOND_OFFSET, shape, element, more, "rows")
        return StreamRows(pending, count, rows, stream)

    def write(self, f: Fn, row: str, source: Array, width: int, lanes: int) -> None:
        """Keep source[width] (f32) as compressed row `row`, rounded to the cache's element."""
        if self.stream == "kv":
            for at, piece in columns(f, width, lanes):
                self.rows.vstore(f, source.vload(f, piece, at), piece, row, at)
            return
        block, within = f.div(row, f.index(KEY_BLOCK)), f.rem(row, f.index(KEY_BLOCK))
        with f.loop(f.index(0), f.index(width)) as loop:
            value = f.narrow(source.load(f, loop.iv), self.rows.element)
            self.rows.store(f, value, block, loop.iv, within)
