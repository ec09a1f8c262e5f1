"""out[t] = table[ids[t]]: rows of a weight that is stored in panels (it may be a tied head)."""

from __future__ import annotations

from bessemer.artifact.layout import PANEL_ROWS
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register


def emit(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """Operands: table panels [P, K, 32], ids[rows] i64, out[rows, K]. Ids are in range."""
    table, ids, out = spec.operands
    depth = table.shape[1]
    assert isinstance(depth, int)
    panel_rows = fn.index(PANEL_ROWS)
    with fn.loop("%begin", "%end") as rows:
        id_ = fn.cast_index(fn.load("%op1", [rows.iv], ids.type), "i64", "index")
        panel, lane = fn.div(id_, panel_rows), fn.rem(id_, panel_rows)
        with fn.loop(fn.index(0), fn.index(depth)) as k:
            value = fn.load("%op0", [panel, k.iv, lane], table.type)
            fn.store(fn.widen(value, table.element), "%op2", [rows.iv, k.iv], out.type)


register(Kernel("embedding", "rows", emit))
