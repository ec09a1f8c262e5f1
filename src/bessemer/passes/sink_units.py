"""Leading axes of one move down: f(x.view(1, ...)) = f(x).view(1, ...) for every op that works on
each leading index by itself. `drop_batch` rests on it; alone it removes the heads axis of models
with one head from norms and rotary arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Graph, Node, Value, schema_of
from bessemer.graph.schema import build_from
from bessemer.passes import views
from bessemer.passes.attributes import axes_of, ints_of
from bessemer.passes.base import Pass, Uses, settle
from bessemer.passes.canonicalize_views import CanonicalizeViews


@dataclass(frozen=True)
class SinkUnits(Pass):
    """f(x.view(1, ...)) = f(x).view(1, ...)."""

    name: ClassVar[str] = "sink_units"

    def apply(self, graph: Graph) -> Graph:
        return CanonicalizeViews().apply(settle(graph, sink, self.name))


def is_lifted(x: Value) -> bool:
    """Whether x is a reshape whose leading axis is one."""
    return x.op == "reshape" and len(x.shape) >= 2 and x.shape[0] == 1


def strip(x: Value) -> Value:
    """x without its leading axis of one."""
    return views.reshape(x, x.shape[1:])


def lift(x: Value) -> Value:
    return views.reshape(x, (1, *x.shape))


def sink(node: Node, uses: Uses) -> Value | tuple[Value, ...] | None:
    """One step: a lifted operand's axis moves from above this op to below it."""
    if node.op == "reshape":
        (x,) = node.inputs
        return views.reshape(x, node.types[0].shape) if x.op == "reshape" else None
    if not any(is_lifted(v) for v in node.inputs):
        return None
    if schema_of(node.op).elementwise:
        return _sink_elementwise(node)
    operands = _operands_without_batch(node)
    if operands is None:
        return None
    attrs = dict(node.attrs)
    if node.op == "expand":
        attrs["shape"] = node.types[0].shape[1:]
    elif node.op == "permute":
        attrs["perm"] = tuple(p - 1 for p in views.perm_of(node.out)[1:])
    elif node.op == "pad":
        attrs.update({side: ints_of(node, side)[1:] for side in ("low", "high")})
    inner = build_from(node.op, operands, attrs, node.loc)
    return tuple(lift(v) for v in inner.outputs)


def _sink_elementwise(node: Node) -> Value | None:
    """Strip operands of the result's rank; lift the result if its leading axis was one."""
    shape = node.types[0].shape
    whole = [len(v.shape) == len(shape) and v.shape[0] == 1 for v in node.inputs]
    if shape[:1] == (1,) and len(shape) >= 2:
        operands = [strip(v) if w else v for v, w in zip(node.inputs, whole, strict=True)]
        return lift(build_from(node.op, operands, node.attrs, node.loc).out)
    # Another operand gives the leading axis: this one broadcasts along it as well without its own.
    operands = [
        strip(v) if w and is_lifted(v) else v for v, w in zip(node.inputs, whole, strict=True)
    ]
    if tuple(operands) == node.inputs:
        return None
    return build_from(node.op, operands, node.attrs, node.loc).out


Operands = list[Value] | None


def _strip_ranked(node: Node, least: dict[int, int]) -> Operands:
    """Strip the operands at some places, if each has at least that rank and a leading one."""
    operands = list(node.inputs)
    for place, rank in least.items():
        x = operands[place]
        if len(x.shape) < rank or x.shape[0] != 1:
            return None
        operands[place] = strip(x)
    return operands


def _along_axis(node: Node) -> Operands:
    """Ops along negative axes: all operands, unless the leading axis is one of these."""
    if -len(node.inputs[0].shape) in axes_of(node):
        return None
    return _strip_ranked(node, dict.fromkeys(range(len(node.inputs)), 2))


def _take(node: Node) -> Operands:
    """take(x, index): the leading axis belongs to x, or to the index when it takes the first."""
    first = node.attrs["axis"] == -len(node.inputs[0].shape)
    return _strip_ranked(node, {1: 1} if first else {0: 2})


def _put(node: Node) -> Operands:
    if node.attrs["axis"] == -len(node.inputs[0].shape):
        return None
    return _strip_ranked(node, {0: 2, 2: 2})


def _matmul(node: Node) -> Operands:
    a, b = node.inputs
    if len(a.shape) >= 3 and len(b.shape) >= 3 and a.shape[0] == b.shape[0] == 1:
        return _strip_ranked(node, {0: 3, 1: 3}) if len(a.shape) == len(b.shape) else None
    if len(b.shape) == 2:
        return _strip_ranked(node, {0: 3})
    return None


def _permute(node: Node) -> Operands:
    return _strip_ranked(node, {0: 2}) if views.perm_of(node.out)[0] == 0 else None


def _expand(node: Node) -> Operands:
    if len(node.inputs[0].shape) != len(node.types[0].shape) or node.types[0].shape[0] != 1:
        return None
    return _strip_ranked(node, {0: 2})


def _pad(node: Node) -> Operands:
    untouched = ints_of(node, "low")[0] == ints_of(node, "high")[0] == 0
    return _strip_ranked(node, {0: 2}) if untouched else None


def _linear(node: Node) -> Operands:
    places = {0: 3}
    if node.attrs.get("has_residual"):
        places[len(node.inputs) - 1] = 3
    return _strip_ranked(node, places)


def _compressed_attention(node: Node) -> Operands:
    first = 4 if node.attrs["has_sinks"] else 3  # the sinks have no token axis
    ranks = {0: 4, 1: 3, 2: 2}
    if node.attrs["has_visible"]:
        ranks[first] = 2
    if node.attrs["has_indices"]:
        ranks[first + 1] = 3
    return _strip_ranked(node, ranks)


_BATCHED: dict[str, Callable[[Node], Operands]] = {
    **dict.fromkeys(("reduce_sum", "reduce_mean", "reduce_max", "reduce_min"), _along_axis),
    **dict.fromkeys(("reduce_prod", "argmax", "softmax", "cumsum", "topk"), _along_axis),
    **dict.fromkeys(("slice", "concat", "gather", "scatter"), _along_axis),
    **dict.fromkeys(("rms_norm", "layer_norm"), lambda n: _strip_ranked(n, {0: 2})),
    **dict.fromkeys(("linear", "glu_linear"), _linear),
    "take": _take,
    "put": _put,
    "matmul": _matmul,
    "permute": _permute,
    "expand": _expand,
    "pad": _pad,
    "embedding": lambda n: _strip_ranked(n, {1: 2}),
    "rope": lambda n: _strip_ranked(n, {0: 4, 1: 3, 2: 3}),
    "attention": lambda n: _strip_ranked(n, {0: 4, 1: 4, 2: 4, 3: 2}),
    "moe": lambda n: _strip_ranked(n, {0: 3, 1: 3, 2: 3}),
    **dict.fromkeys(("round_trip", "hadamard"), lambda n: _strip_ranked(n, {0: 3})),
    "sinkhorn": lambda n: _strip_ranked(n, {0: 4}),
    "collapse_streams": lambda n: _strip_ranked(n, {0: 4, 1: 3}),
    "mix_streams": lambda n: _strip_ranked(n, {0: 4, 1: 3, 2: 3, 3: 4}),
    "block_compress": lambda n: _strip_ranked(n, {0: 3, 1: 3, 4: 3, 5: 3, 6: 2}),
    "index_topk": lambda n: _strip_ranked(n, {0: 4, 1: 3, 2: 2}),
    "compressed_attention": _compressed_attention,
}


def _operands_without_batch(node: Node) -> Operands:
    along = _BATCHED.get(node.op)
    return along(node) if along else None
