"""Transposes move down to where they cancel: f(x.permute(p)) = f(x).permute(p).

The heads-first layout of attention modules disappears this way: the transpose of q, k and v passes
slices, norms and rotary arithmetic, and meets its inverse in front of the attention op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Graph, Node, Value, emit, schema_of
from bessemer.graph.schema import build_from
from bessemer.passes import views
from bessemer.passes.attributes import int_of, ints_of
from bessemer.passes.base import Pass, Result, Uses, settle
from bessemer.passes.canonicalize_views import CanonicalizeViews

# Ops along one axis, or a set of axes, which the permutation renames.
_ALONG = frozenset(
    {"reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod", "argmax", "slice"}
    | {"softmax", "cumsum", "concat"}
)
# Ops on the rows of their first operand: the last axis stays last, the rest are rows.
_ROWS = frozenset({"rms_norm", "layer_norm", "linear", "glu_linear", "topk"})

Perm = tuple[int, ...]


@dataclass(frozen=True)
class SinkTransposes(Pass):
    """f(x.permute(p)) = f(x).permute(p), until the transposes cancel."""

    name: ClassVar[str] = "sink_transposes"

    def apply(self, graph: Graph) -> Graph:
        views_first = CanonicalizeViews().rule

        def rule(node: Node, uses: Uses) -> Result:
            found = views_first(node, uses)
            return _sink(node, uses) if found is None else found

        return settle(graph, rule, self.name)


def _sink(node: Node, uses: Uses) -> Value | Sequence[Value] | None:
    perms = [v for v in node.inputs if v.op == "permute"]
    if not perms:
        return None
    perm = views.perm_of(perms[0])
    if node.op == "permute":
        return views.permute(node.inputs[0], views.perm_of(node.out))
    if node.op == "reshape":
        return _through_reshape(node, perm)
    if schema_of(node.op).elementwise or node.op == "concat":
        return _sink_joined(node, perm)
    if node.op in _ALONG and len(node.inputs) == 1:
        return _sink_along(node, perm)
    if node.op in _ROWS and perm[-1] == len(perm) - 1 and not node.attrs.get("has_residual"):
        return _sink_rows(node, perm)
    if node.op == "expand" and len(perm) == len(node.types[0].shape):
        shape = node.types[0].shape
        source = emit(
            "expand",
            node.inputs[0].node.inputs[0],
            shape=tuple(shape[i] for i in views.inverse(perm)),
        )
        return views.permute(source, perm)
    return None


def _through_reshape(node: Node, perm: Perm) -> Value | None:
    """x.permute(p).reshape(s) = x.reshape(s').permute(p') where s splits or merges axes that lie
    side by side in x as well.
    """
    (x,) = node.inputs
    source, shape = x.node.inputs[0], node.types[0].shape
    units = [p for p in perm if source.shape[p] == 1]
    if units:
        kept = [p for p in perm if p not in units]
        source = views.reshape(source, tuple(s for s in source.shape if s != 1))
        perm = tuple(sorted(kept).index(p) for p in kept)
    groups = views.reshape_groups(tuple(source.shape[p] for p in perm), shape)
    if groups is None:
        return None
    placed = []
    for inside, outside in groups:
        axes = [perm[i] for i in inside]
        if axes != list(range(axes[0], axes[0] + len(axes))):
            return None
        placed.append((axes[0], outside))
    in_source = sorted(placed)
    source_shape = [shape[i] for _, outside in in_source for i in outside]
    where = [i for _, outside in in_source for i in outside]
    order = tuple(where.index(i) for i in range(len(shape)))
    return views.permute(views.reshape(source, source_shape), order)


def _sink_joined(node: Node, perm: Perm) -> Value | None:
    """Ops that line up the axes of several operands: all must be seen through the permutation."""
    rank = len(node.types[0].shape)
    if rank != len(perm):
        return None
    operands = []
    for value in node.inputs:
        inner = _unpermuted(value, perm)
        if inner is None:
            return None
        operands.append(inner)
    attrs = dict(node.attrs)
    if node.op == "concat":
        attrs["axis"] = _renamed(int_of(node, "axis"), perm)
    return views.permute(build_from(node.op, operands, attrs, node.loc).out, perm)


def _unpermuted(value: Value, perm: Perm) -> Value | None:
    """A value u, at no cost, with u.permute(perm) = value as broadcasting sees it."""
    if len(views.without_units(value.shape)) == 0:
        return value
    if value.op == "permute" and len(value.shape) == len(perm):
        source = views.permute(value, views.inverse(perm))
        same = views.perm_of(value) == perm
        return source if same or source.op != "permute" else None
    whole = views.full_rank(value, len(perm))
    back = views.inverse(perm)
    if views.moves_only_units(whole.shape, back):
        return views.reshape(whole, tuple(whole.shape[i] for i in back))
    if value.op == "expand":
        inner = _unpermuted(value.node.inputs[0], perm)
        shape = tuple(whole.shape[i] for i in back)
        return None if inner is None else emit("expand", inner, shape=shape)
    return None


def _renamed(axis: int, perm: Perm) -> int:
    """The axis of the source that `axis` of the permuted value is; both negative."""
    return perm[axis] - len(perm)


def _sink_along(node: Node, perm: Perm) -> Value | None:
    attrs = dict(node.attrs)
    if "axes" in attrs:
        axes = ints_of(node, "axes")
        attrs["axes"] = tuple(_renamed(a, perm) for a in axes)
        if not attrs["keepdims"]:
            gone = {perm[a] for a in axes}
            left = [p for p in perm if p not in gone]
            perm = tuple(sorted(left).index(p) for p in left)
    else:
        attrs["axis"] = _renamed(int_of(node, "axis"), perm)
    inner = build_from(node.op, (node.inputs[0].node.inputs[0],), attrs, node.loc).out
    return views.permute(inner, perm)


def _sink_rows(node: Node, perm: Perm) -> Sequence[Value] | None:
    x, *rest = node.inputs
    if x.op != "permute" or any(v.op == "permute" and len(v.shape) > 2 for v in rest):
        return None
    inner = build_from(node.op, (x.node.inputs[0], *rest), node.attrs, node.loc)
    return [views.permute(v, perm) for v in inner.outputs]
