"""glu(x) = act(x g.T + bg) * (x u.T + bu), SwiGLU and GeGLU, as one op with weights [g, u].

The projections may be clamped first: silu(min(x g.T, L)) * clip(x u.T, -L, L) is `silu_clamped`.

The two projections arrive as the halves of one linear layer: merged by the checkpoint or by
`merge_gate_up`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Graph, Node, Value, emit
from bessemer.passes import views
from bessemer.passes.attributes import fixed
from bessemer.passes.base import Pass, substitute, use_counts
from bessemer.passes.merge_gate_up import GatedProduct, gate_and_up
from bessemer.passes.merge_qkv import is_plain_linear
from bessemer.passes.params import ParamExpressions, rows, stack_rows


@dataclass(frozen=True)
class Glu(Pass):
    """act(y[:F]) * y[F:] with y = x w.T + b is glu_linear(x, [g, u], [bg, bu])."""

    name: ClassVar[str] = "glu"

    def apply(self, graph: Graph) -> Graph:
        counts, is_weight = use_counts(graph), ParamExpressions()
        replacements: dict[Value, Value] = {}
        for node in graph.nodes():
            product = gate_and_up(node, counts)
            if product and all(views.is_last_slice(v) for v in (product.gate, product.up)):
                fused = _glu(node, product, counts, is_weight)
                if fused is not None:
                    replacements[node.out] = fused
        return substitute(graph, replacements)


def _glu(
    node: Node, product: GatedProduct, counts: dict[Value, int], is_weight: ParamExpressions
) -> Value | None:
    gate, up = product.gate, product.up
    y = gate.node.inputs[0]
    if up.node.inputs[0] != y or counts[y] != 2 or not is_plain_linear(y.node, is_weight):
        return None
    width = fixed(gate.shape[-1])
    ranges = [views.bounds(gate), views.bounds(up)]
    if y.shape[-1] != 2 * width or sorted(ranges) != [(0, width), (width, 2 * width)]:
        return None
    x, *weights = y.node.inputs
    stacked = []
    for w in weights:
        ordered = w if ranges[0][0] == 0 else stack_rows([rows(w, *r) for r in ranges])
        stacked.append(views.reshape(ordered, (2, width, *w.shape[1:])))
    limit = {} if product.limit is None else {"limit": product.limit}
    return emit(
        "glu_linear",
        *(x, *stacked),
        activation=product.activation,
        has_bias=len(stacked) == 2,
        loc=node.loc,
        **limit,
    )
