"""out[r] = x[rows[r]]: the token rows whose logits are wanted."""

from __future__ import annotations

from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, register


def emit(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """Operands: x[tokens, K], rows[R] i64, out[R, K]."""
    x, index, out = spec.operands
    width = out.shape[-1]
    assert isinstance(width, int)
    with fn.loop("%begin", "%end") as rows:
        source = fn.cast_index(fn.load("%op1", [rows.iv], index.type), "i64", "index")
        with fn.loop(fn.index(0), fn.index(width)) as k:
            value = fn.load("%op0", [source, k.iv], x.type)
            fn.store(value, "%op2", [rows.iv, k.iv], out.type)


register(Kernel("select_rows", "rows", emit))
