"""out[t] = table[ids[t]]: rows of a weight that is stored in panels (it may be a tied head)."""

from __future__ import annotations

from bessemer.artifact.layout import PANEL_ROWS
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register
from bessemer.codegen.kernels.panel import Panel


def emit(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """Operands: table panels, ids[rows] i64, out[rows, K]. Ids are in range."""
    table, ids, out = spec.operands
    depth = out.shape[1]
    assert isinstance(depth, int)
    panel_rows = fn.index(PANEL_ROWS)
    with fn.loop("%begin", "%end") as rows:
        id_ = fn.cast_index(fn.load("%op1", [rows.iv], ids.type), "i64", "index")
        panel, lane = fn.div(id_, panel_rows), fn.rem(id_, panel_rows)
        weights = Panel(fn, target.lanes, "%op0", table, (panel,))
        with fn.loop(fn.index(0), fn.index(depth)) as k:
            fn.store(weights.element(k.iv, lane), "%op2", [rows.iv, k.iv], out.type)


register(Kernel("embedding", "rows", emit))
