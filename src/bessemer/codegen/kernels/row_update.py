"""Keep the rows of a call in the rings of compressed attention.

`row_update`: kv[ROWS, D] (f32, rows may be strided), positions[ROWS], slots[ROWS] (i64), state;
position p becomes row p % ring rows of the layer's window, rounded to the cache's element.

`pending_update`: kv[ROWS, W], gate[ROWS, W], positions, slots, state; the projected rows of a
compressed stream, in f32, from which compressed rows are pooled (`block_pool`).

Literal: the entry in the state header. A row with a negative position is padding and writes
nothing.
"""

from __future__ import annotations

from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.state_entry import FIRST_OFFSET, FIRST_ROWS, SharedRows, open_entry
from bessemer.codegen.kernels.vectors import Array, columns, operand


def emit_rows(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    kv, positions, slots, state = (operand(spec, i) for i in range(4))
    width = int(spec.operands[0].shape[1])
    ring = SharedRows.open(f, state.name, slots, "%lit0", width=width, element=target.kv_dtype)
    with f.loop("%begin", "%end") as row:
        position = f.cast_index(positions.load(f, row.iv), "i64", "index")
        with f.when(f.cmp("sge", position, f.index(0))):
            at = f.rem(position, ring.count)
            for column, lanes in columns(f, width, target.lanes):
                value = kv.vload(f, lanes, row.iv, column)
                ring.rows.vstore(f, value, lanes, at, column)


def emit_pending(f: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    kv, gate, positions, slots, state = (operand(spec, i) for i in range(5))
    width = int(spec.operands[0].shape[1])
    entry = open_entry(f, state.name, slots, "%lit0")
    count = entry.word(FIRST_ROWS)
    pending = entry.view(FIRST_OFFSET, ("?", 2, width), "f32", count, "pending")
    with f.loop("%begin", "%end") as row:
        position = f.cast_index(positions.load(f, row.iv), "i64", "index")
        with f.when(f.cmp("sge", position, f.index(0))):
            at = f.rem(position, count)
            for part, source in enumerate((kv, gate)):
                _copy(f, source, row.iv, pending, (at, f.index(part)), width, target.lanes)


def _copy(
    f: Fn, source: Array, row: str, to: Array, place: tuple[str, str], width: int, lanes: int
) -> None:
    for column, piece in columns(f, width, lanes):
        to.vstore(f, source.vload(f, piece, row, column), piece, *place, column)


register(Kernel("row_update", "rows", emit_rows))
register(Kernel("pending_update", "rows", emit_pending))
