"""Arithmetic on parameters is done when the weights are stored: every expression over parameters
becomes one stored weight, and equal expressions become the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from bessemer.graph import Graph, Node, Value, param, topological
from bessemer.passes.base import Pass, Uses, rewrite, substitute
from bessemer.passes.common_subexpressions import CommonSubexpressions
from bessemer.passes.params import ParamExpressions

# The word that a weight made from a single parameter gets after the parameter's name.
_DERIVED = {"permute": "transposed", "reshape": "stacked", "slice": "part"}
# Up to so many names are joined to one; more are named by the first and the last.
MAX_JOINED = 3


@dataclass(frozen=True)
class FoldWeights(Pass):
    """f(w1, w2) = w3 for parameters: w3 is stored, `graph.weights` says how it is made."""

    name: ClassVar[str] = "fold_weights"

    def apply(self, graph: Graph) -> Graph:
        graph = CommonSubexpressions().apply(_inlined(graph))
        is_weight = ParamExpressions()
        folded = _folded_values(graph, is_weight)
        taken = {str(n.attrs["name"]) for n in graph.nodes() if n.op == "param"}
        names: dict[Value, str] = {}
        for value in folded:
            names[value] = _unique(derived_name(value), taken)
            taken.add(names[value])
        stored = {v: param(n, v.type) for v, n in names.items()}
        return replace(substitute(graph, stored), weights={n: v for v, n in names.items()})


def _inlined(graph: Graph) -> Graph:
    """Stored weights that an earlier stage has defined, back as the expressions that make them."""
    if not graph.weights:
        return graph

    def rule(node: Node, uses: Uses) -> Value | None:
        return graph.weights.get(str(node.attrs["name"])) if node.op == "param" else None

    return replace(rewrite(graph, rule), weights={})


def _folded_values(graph: Graph, is_weight: ParamExpressions) -> list[Value]:
    """Values that depend on parameters alone and that something else uses, in graph order."""
    found: dict[Value, None] = {}
    for node in graph.nodes():
        if not is_weight.is_static(node.outputs[0]):
            found.update(dict.fromkeys(v for v in node.inputs if is_weight(v)))
    found.update(dict.fromkeys(v for v in graph.roots if is_weight(v)))
    return [v for v in found if v.op != "param"]


def derived_name(value: Value) -> str:
    """A readable name: what the parameters' names share, and what tells them apart in between."""
    names = [str(n.attrs["name"]) for n in topological([value]) if n.op == "param"]
    if len(names) == 1:
        return f"{names[0]}.{_DERIVED.get(value.op, 'folded')}"
    parts = [n.split(".") for n in names]
    head = _shared(parts, lambda p: p)
    tail = _shared([p[len(head) :] for p in parts], lambda p: p[::-1])[::-1]
    middles = [p[len(head) : len(p) - len(tail)] for p in parts]
    if len({len(m) for m in middles}) == 1:
        middle = [_joined(column) for column in zip(*middles, strict=True)]
    else:
        middle = [_joined(["_".join(m) for m in middles])]
    return ".".join([*head, *middle, *tail])


def _shared(
    parts: Sequence[Sequence[str]], order: Callable[[Sequence[str]], Sequence[str]]
) -> list[str]:
    """The leading words (in an order) that all have, leaving each at least one word."""
    words: list[str] = []
    for column in zip(*(order(p)[:-1] for p in parts), strict=False):
        if len(set(column)) > 1:
            break
        words.append(column[0])
    return words


def _joined(words: Sequence[str]) -> str:
    """q_proj, k_proj, v_proj -> qkv;  gate_proj, up_proj -> gate_up;  0, 1, .., 7 -> 0_to_7."""
    distinct = list(dict.fromkeys(words))
    if len(distinct) == 1:
        return distinct[0]
    if len(distinct) > MAX_JOINED:
        return f"{distinct[0]}_to_{distinct[-1]}"
    pieces = [w.split("_") for w in distinct]
    ending = _shared(pieces, lambda p: p[::-1])
    short = ["_".join(p[: len(p) - len(ending)]) for p in pieces]
    return ("" if all(len(w) == 1 for w in short) else "_").join(short)


def _unique(name: str, taken: set[str]) -> str:
    if name not in taken:
        return name
    count = 2
    while f"{name}.{count}" in taken:
        count += 1
    return f"{name}.{count}"
