"""One norm for each head is one norm over all heads:
concat_h(norm(x[:, h], w[h], b[h])) = norm(x) * [w] + [b], with weights stacked to [H, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Node, Value, emit
from bessemer.passes import views
from bessemer.passes.base import RulePass, Uses

_NORMS = ("rms_norm", "layer_norm")


@dataclass(frozen=True)
class HeadNorms(RulePass):
    """concat_h(norm(x[:, h], w[h], b[h])) = norm(x) * [w] + [b]."""

    name: ClassVar[str] = "head_norms"

    def rule(self, node: Node, uses: Uses) -> Value | None:
        if node.op != "concat" or node.attrs["axis"] != -2 or len(node.inputs) < 2:
            return None
        norms = [v.node for v in node.inputs]
        x = _whole(norms)
        if x is None or x.type != node.types[0]:
            return None
        y = emit(norms[0].op, x, eps=norms[0].attrs["eps"], loc=node.loc)
        for operand, op in zip(range(1, len(norms[0].inputs)), ("mul", "add"), strict=False):
            y = emit(op, y, _stacked([n.inputs[operand] for n in norms]), loc=node.loc)
        return y


def _whole(norms: Sequence[Node]) -> Value | None:
    """x, if the norms are alike and take its heads one by one, in order."""
    first = norms[0]
    if first.op not in _NORMS or first.inputs[0].op != "slice":
        return None
    x = first.inputs[0].node.inputs[0]
    for head, norm in enumerate(norms):
        part = norm.inputs[0].node
        alike = norm.op == first.op and norm.attrs["eps"] == first.attrs["eps"]
        if not alike or len(norm.inputs) != len(first.inputs):
            return None
        at = {"axis": -2, "start": head, "stop": head + 1, "step": 1}
        if part.op != "slice" or part.inputs != (x,) or dict(part.attrs) != at:
            return None
    return x


def _stacked(rows: Sequence[Value]) -> Value:
    """Vectors [D] as rows of a matrix [H, D]."""
    return views.concat([views.reshape(r, (1, *r.shape)) for r in rows], -2)
