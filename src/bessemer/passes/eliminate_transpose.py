"""Transposes of weights are done when the weights are stored, and those in front of a product
become an attribute of it: x @ w = x @ (w.T).T, where w.T is arithmetic on parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Graph, Node, Value, emit
from bessemer.passes import views
from bessemer.passes.base import Pass, Uses, rewrite
from bessemer.passes.params import ParamExpressions


@dataclass(frozen=True)
class EliminateTranspose(Pass):
    """x @ w = x @ (w.T).T for weights w[K, N]; a @ b.T without a transposed copy of b."""

    name: ClassVar[str] = "eliminate_transpose"

    def apply(self, graph: Graph) -> Graph:
        is_weight = ParamExpressions()

        def rule(node: Node, uses: Uses) -> Value | None:
            if node.op != "matmul":
                return None
            b = node.inputs[1]
            of_weights = len(b.shape) == 2 and is_weight(b)
            return _of_weights(node) if of_weights else _of_activations(node)

        return rewrite(graph, rule)


def _of_weights(node: Node) -> Value | None:
    """x @ w[K, N] = x @ (w.T).T: the side that `linear` wants, [N, K]."""
    x, w = node.inputs
    if node.attrs["transpose_b"]:
        return None
    return emit("matmul", x, views.permute(w, (1, 0)), transpose_b=True)


def _of_activations(node: Node) -> Value | None:
    """a @ b.T without the transpose."""
    a, b = node.inputs
    rank = len(b.shape)
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    if b.op != "permute" or views.perm_of(b) != swapped:
        return None
    return emit("matmul", a, b.node.inputs[0], transpose_b=not node.attrs["transpose_b"])
