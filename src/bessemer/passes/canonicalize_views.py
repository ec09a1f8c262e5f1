"""Views in one form: x.view(a).view(b) = x.view(b), x.permute(p).permute(q) = x.permute(p[q]),
and whatever does nothing is gone.

Also: a permute that moves only axes of one is a reshape; a slice of a concat is a slice of one
part; an expand below an op that broadcasts anyway is dropped; a reduction followed by a reshape
that puts the reduced axes back keeps its axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Node, Shape, Value, emit, schema_of
from bessemer.graph.ops.elementwise import broadcast
from bessemer.graph.schema import build_from
from bessemer.passes import views
from bessemer.passes.attributes import fixed, int_of, ints_of, size_of
from bessemer.passes.base import RulePass, Uses


@dataclass(frozen=True)
class CanonicalizeViews(RulePass):
    """view(view(x)) = view(x); views that do nothing are removed."""

    name: ClassVar[str] = "canonicalize_views"
    repeat: ClassVar[bool] = True

    def rule(self, node: Node, uses: Uses) -> Value | None:
        if node.op in _RULES:
            return _RULES[node.op](node)
        if schema_of(node.op).elementwise:
            return _elementwise(node)
        return None


def _reshape(node: Node) -> Value | None:
    (x,) = node.inputs
    if x.shape == node.types[0].shape:
        return x
    if x.op == "reshape":
        return views.reshape(x, node.types[0].shape)
    return _keep_reduced_axes(node)


def _keep_reduced_axes(node: Node) -> Value | None:
    """reduce(x).reshape([..., 1]) = reduce(x, keepdims)."""
    (x,) = node.inputs
    if "keepdims" not in schema_of(x.op).attrs or x.node.attrs["keepdims"]:
        return None
    axes, source = ints_of(x.node, "axes"), x.node.inputs[0]
    kept = tuple(1 if i - len(source.shape) in axes else s for i, s in enumerate(source.shape))
    if kept != node.types[0].shape:
        return None
    return build_from(x.op, x.node.inputs, {**x.node.attrs, "keepdims": True}, x.node.loc).out


def _permute(node: Node) -> Value | None:
    (x,) = node.inputs
    perm = views.perm_of(node.out)
    if perm == tuple(range(len(perm))):
        return x
    if x.op == "permute":
        return views.permute(x, perm)
    if views.moves_only_units(x.shape, perm):
        return views.reshape(x, node.types[0].shape)
    if x.op == "expand":
        inner = views.full_rank(x.node.inputs[0], len(perm))
        if views.moves_only_units(inner.shape, perm):
            thin = views.reshape(inner, tuple(inner.shape[p] for p in perm))
            return emit("expand", thin, shape=node.types[0].shape)
    return None


def _expand(node: Node) -> Value | None:
    (x,) = node.inputs
    if x.shape == node.types[0].shape:
        return x
    if views.without_units(x.shape) == views.without_units(node.types[0].shape):
        return views.reshape(x, node.types[0].shape)
    if x.op == "expand":
        return emit("expand", x.node.inputs[0], shape=node.types[0].shape)
    return None


def _slice(node: Node) -> Value | None:
    (x,) = node.inputs
    if x.shape == node.types[0].shape and node.attrs["step"] == 1:
        return x
    if x.op == "slice" and x.node.attrs["axis"] == node.attrs["axis"]:
        return _slice_of_slice(node, x)
    if x.op == "concat" and x.node.attrs["axis"] == node.attrs["axis"]:
        return _slice_of_concat(node, x)
    return None


def _slice_of_slice(node: Node, x: Value) -> Value | None:
    if x.node.attrs["step"] != 1:
        return None
    base = size_of(x.node, "start")
    moved = {**node.attrs, **{k: size_of(node, k) + base for k in ("start", "stop")}}
    return build_from("slice", x.node.inputs, moved, node.loc).out


def _slice_of_concat(node: Node, x: Value) -> Value | None:
    """The part that holds the whole range, if one does."""
    axis = int_of(node, "axis")
    sizes = [part.shape[axis] for part in x.node.inputs]
    if not all(isinstance(s, int) for s in (*sizes, node.attrs["start"], node.attrs["stop"])):
        return None
    start, stop, at = int_of(node, "start"), int_of(node, "stop"), 0
    for part, size in zip(x.node.inputs, map(fixed, sizes), strict=True):
        if at <= start and stop <= at + size:
            moved = {**node.attrs, "start": start - at, "stop": stop - at}
            return build_from("slice", (part,), moved, node.loc).out
        at += size
    return None


def _concat(node: Node) -> Value | None:
    axis = int_of(node, "axis")
    parts: list[Value] = []
    for part in node.inputs:
        if part.shape[axis] == 0:
            continue
        flat = part.op == "concat" and part.node.attrs["axis"] == axis
        for piece in part.node.inputs if flat else (part,):
            joined = _adjoin(parts[-1], piece, axis) if parts else None
            if joined is None:
                parts.append(piece)
            else:
                parts[-1] = joined
    if not parts or tuple(parts) == node.inputs:
        return None
    return views.concat(parts, axis)


def _adjoin(a: Value, b: Value, axis: int) -> Value | None:
    """concat(x[i:j], x[j:k]) = x[i:k]."""
    if a.op != "slice" or b.op != "slice" or a.node.inputs != b.node.inputs:
        return None
    one, two = a.node.attrs, b.node.attrs
    if (one["axis"], two["axis"], one["step"], two["step"]) != (axis, axis, 1, 1):
        return None
    if one["stop"] != two["start"]:
        return None
    (x,) = a.node.inputs
    if one["start"] == 0 and two["stop"] == x.shape[axis]:
        return x
    return emit("slice", x, axis=axis, start=one["start"], stop=two["stop"], loc=a.node.loc)


def _elementwise(node: Node) -> Value | None:
    """f(x.expand(s), y) = f(x, y) and f(x, y.view(1, s)) = f(x, y) by broadcasting."""
    shape = node.types[0].shape
    operands = list(node.inputs)
    for i, value in enumerate(operands):
        thin = _thinner(value, shape)
        if thin is None:
            continue
        others = [v.shape for j, v in enumerate(operands) if j != i]
        if broadcast(thin.shape, *others) == shape:
            operands[i] = thin
    if tuple(operands) == node.inputs:
        return None
    return build_from(node.op, operands, node.attrs, node.loc).out


def _thinner(value: Value, result: Shape) -> Value | None:
    """The value before an expand, or before a reshape that put axes of one in front of it."""
    if value.op == "expand":
        return value.node.inputs[0]
    if value.op == "reshape" and value.shape[:1] == (1,) and result[:1] != (1,):
        lead = next((i for i, s in enumerate(value.shape) if s != 1), len(value.shape))
        return views.reshape(value, value.shape[lead:])
    return None


_RULES: dict[str, Callable[[Node], Value | None]] = {
    "reshape": _reshape,
    "permute": _permute,
    "expand": _expand,
    "slice": _slice,
    "concat": _concat,
}
