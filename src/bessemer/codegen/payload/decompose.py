"""Composite ops written as simpler ones, and equal nodes made one.

After it a payload consists of elementwise ops, views, and the few ops that have a loop of their
own: `reduce_*` without keepdims, `matmul`, `take`, `gather`, `concat`, `pad`, `topk`, `argmax`,
`cumsum`, `scatter`, `put`, `round_trip`, `sinkhorn`, and two that exist only here, on weights as
they are stored:

- `project`(x[..., K], w[lead, N, K]) {lead}: x @ w[lead].T, sums in f32.
- `expert_project`(x[..., (k,) K], indices[..., k], w[E, (2,) N, K]) {part}: the same with
  w[indices[..., j]], or with its half `part` when gated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bessemer.codegen.payload.attrs import integer, integers, number
from bessemer.codegen.payload.spec import PayloadSpec
from bessemer.errors import CompileError
from bessemer.graph.core import Node, TensorType, Value
from bessemer.graph.dims import Dim, Size
from bessemer.graph.ops.fused import CLAMPED
from bessemer.graph.schema import GraphError, constant, emit

WHOLE = -1  # `part` of an expert whose weights are one matrix

Rule = Callable[[Node], "Value | Sequence[Value]"]


def scalar(value: float, like: Value) -> Value:
    """A constant of the element type of `like`."""
    return constant(np.asarray(value, dtype=like.dtype.numpy))


def reshape(x: Value, shape: Sequence[Size]) -> Value:
    return x if x.shape == tuple(shape) else emit("reshape", x, shape=tuple(shape))


def slice_last(x: Value, start: int, stop: int, step: int = 1, axis: int = -1) -> Value:
    return emit("slice", x, axis=axis, start=start, stop=stop, step=step)


def reduced(op: str, x: Value, axes: Sequence[int], keepdims: bool) -> Value:
    """A reduction without keepdims, and the reshape that puts the dimensions back."""
    y = emit(op, x, axes=tuple(axes))
    if not keepdims:
        return y
    gone = {a % x.type.rank for a in axes}
    return reshape(y, [1 if i in gone else s for i, s in enumerate(x.shape)])


def count(x: Value, axes: Sequence[int]) -> Value:
    """How many elements a reduction over the axes sums up, as a scalar of x's type."""
    sizes = [x.shape[a] for a in axes]
    known = int(np.prod([s for s in sizes if isinstance(s, int)]))
    total = scalar(known, x)
    for size in sizes:
        if isinstance(size, Dim):
            ones = emit("expand", scalar(1, x), shape=(size,))
            total = emit("mul", total, emit("reduce_sum", ones, axes=(-1,)))
    return total


def mean(x: Value, axes: Sequence[int], keepdims: bool) -> Value:
    return emit("div", reduced("reduce_sum", x, axes, keepdims), count(x, axes))


def activate(x: Value, name: str) -> Value:
    return x if name == "none" else emit(name, x)


def gated(gate: Value, up: Value, attrs: Mapping[str, Any]) -> Value:
    """act(gate) * up, or a clamped form of it."""
    if attrs["activation"] not in CLAMPED:
        return emit("mul", activate(gate, attrs["activation"]), up)
    limit = scalar(attrs["limit"], gate)
    gate = emit("minimum", gate, limit)
    up = emit("minimum", emit("maximum", up, emit("neg", limit)), limit)
    if attrs["activation"] == "silu_clamped":
        return emit("mul", emit("silu", gate), up)
    wave = emit("sigmoid", emit("mul", scalar(attrs["alpha"], gate), gate))
    return emit("mul", emit("mul", emit("add", up, scalar(1, up)), gate), wave)


def project(x: Value, w: Value, lead: tuple[int, ...] = ()) -> Value:
    shape = (*x.shape[:-1], w.shape[-2])
    return Node("project", (x, w), {"lead": lead}, (TensorType(x.dtype, shape),)).out


def expert_project(x: Value, indices: Value, w: Value, part: int = WHOLE) -> Value:
    type_ = TensorType(x.dtype, (*indices.shape, w.shape[-2]))
    return Node("expert_project", (x, indices, w), {"part": part}, (type_,)).out


# --- rules -------------------------------------------------------------------------------------


def _softmax(node: Node) -> Value:
    (x,), axis = node.inputs, integer(node, "axis")
    top = reduced("reduce_max", x, [axis], True)
    masked = emit("eq", top, scalar(-np.inf, x))
    e = emit("exp", emit("sub", x, emit("where", masked, scalar(0, x), top)))
    total = reduced("reduce_sum", e, [axis], True)
    empty = emit("eq", total, scalar(0, x))
    return emit("div", e, emit("where", empty, scalar(1, x), total))


def _rms_norm(node: Node) -> Value:
    x, *w = node.inputs
    square = mean(emit("mul", x, x), [-1], True)
    scale = emit("rsqrt", emit("add", square, scalar(number(node, "eps"), x)))
    y = emit("mul", x, scale)
    return emit("mul", y, w[0]) if w else y


def _layer_norm(node: Node) -> Value:
    x, *weights = node.inputs
    centred = emit("sub", x, mean(x, [-1], True))
    variance = mean(emit("mul", centred, centred), [-1], True)
    scale = emit("rsqrt", emit("add", variance, scalar(number(node, "eps"), x)))
    y = emit("mul", centred, scale)
    if weights:
        y = emit("mul", y, weights[0])
    return emit("add", y, weights[1]) if len(weights) > 1 else y


def _linear(node: Node) -> Value:
    x, w, *rest = node.inputs
    a = node.attrs
    y = project(x, w)
    if a["has_bias"]:
        y = emit("add", y, rest.pop(0))
    y = activate(y, str(a["activation"]))
    if a["scale"] != 1.0:
        y = emit("mul", y, scalar(number(node, "scale"), y))
    return emit("add", y, rest.pop(0)) if a["has_residual"] else y


def _glu_linear(node: Node) -> Value:
    x, w, *bias = node.inputs
    halves = [project(x, w, (part,)) for part in (0, 1)]
    if bias:
        halves = [emit("add", y, _half(bias[0], part)) for part, y in enumerate(halves)]
    return gated(halves[0], halves[1], node.attrs)


def _half(x: Value, part: int) -> Value:
    """x[..., part, :] of x[..., 2, N]."""
    return reshape(slice_last(x, part, part + 1, axis=-2), (*x.shape[:-2], x.shape[-1]))


def _expert_linear(node: Node) -> Value:
    x, indices, w, *bias = node.inputs
    chosen = [emit("take", bias[0], indices, axis=-bias[0].type.rank)] if bias else []
    if not node.attrs["gated"]:
        y = expert_project(x, indices, w)
        y = emit("add", y, chosen[0]) if chosen else y
        return activate(y, str(node.attrs["activation"]))
    halves = [expert_project(x, indices, w, part) for part in (0, 1)]
    if chosen:
        halves = [emit("add", y, _half(chosen[0], part)) for part, y in enumerate(halves)]
    return gated(halves[0], halves[1], node.attrs)


def _moe(node: Node) -> Value:
    x, indices, scores, gate_up, down, *rest = node.inputs
    a = node.attrs
    bias = [[rest.pop(0)] if a[f"has_{n}_bias"] else [] for n in ("gate_up", "down")]
    same: dict[str, Any] = {k: a[k] for k in ("activation", "alpha", "limit")}
    hidden = emit(
        "expert_linear", x, indices, gate_up, *bias[0], **same, gated=True, has_bias=bool(bias[0])
    )
    each = emit("expert_linear", hidden, indices, down, *bias[1], has_bias=bool(bias[1]))
    weight = reshape(scores, (*scores.shape, 1))
    return emit("reduce_sum", emit("mul", each, weight), axes=(-2,))


def _rope(node: Node) -> Value:
    x, cos, sin = node.inputs
    half, width, start = cos.shape[-1], x.shape[-1], integer(node, "offset")
    if not isinstance(half, int) or not isinstance(width, int):
        raise CompileError(f"rope of a symbolic width {x.type}")
    table, end = (*cos.shape[:-1], 1, half), start + 2 * half
    c, s = reshape(cos, table), reshape(sin, table)
    interleaved = node.attrs["style"] == "interleaved"
    if interleaved:
        a, b = slice_last(x, start, end - 1, 2), slice_last(x, start + 1, end, 2)
    else:
        a, b = slice_last(x, start, start + half), slice_last(x, start + half, end)
    first = emit("sub", emit("mul", a, c), emit("mul", b, s))
    second = emit("add", emit("mul", b, c), emit("mul", a, s))
    if interleaved:
        pairs = [reshape(y, (*y.shape, 1)) for y in (first, second)]
        parts = [reshape(emit("concat", *pairs, axis=-1), (*x.shape[:-1], 2 * half))]
    else:
        parts = [first, second]
    if start:
        parts.insert(0, slice_last(x, 0, start))
    if end < width:
        parts.append(slice_last(x, end, width))
    return parts[0] if len(parts) == 1 else emit("concat", *parts, axis=-1)


def _collapse_streams(node: Node) -> Value:
    x, pre = node.inputs
    return emit("reduce_sum", emit("mul", reshape(pre, (*pre.shape, 1)), x), axes=(-2,))


def _mix_streams(node: Node) -> Value:
    x, y, post, comb = node.inputs
    order = list(range(comb.type.rank))
    turned = emit("permute", comb, perm=(*order[:-2], order[-1], order[-2]))
    row = reshape(y, (*y.shape[:-1], 1, y.shape[-1]))
    new = emit("mul", reshape(post, (*post.shape, 1)), row)
    return emit("add", new, emit("matmul", turned, x))


def _hadamard(node: Node) -> Value:
    """Rounds of sums and differences of elements that are `half` apart."""
    (x,) = node.inputs
    width, half = x.shape[-1], 1
    if not isinstance(width, int):
        raise CompileError(f"a Hadamard rotation of a symbolic width {x.type}")
    shape, result = x.shape, x
    while half < width:
        pairs = reshape(result, (*shape[:-1], width // (2 * half), 2, half))
        a, b = (slice_last(pairs, i, i + 1, axis=-2) for i in (0, 1))
        parts = emit("concat", emit("add", a, b), emit("sub", a, b), axis=-2)
        result = reshape(parts, shape)
        half *= 2
    return emit("mul", result, scalar(width**-0.5, x))


def _take(node: Node) -> Value:
    x, index = node.inputs
    axis = -2 if node.op == "embedding" else integer(node, "axis")
    return emit("take", x, index, axis=axis)


def _reduce(node: Node) -> Value:
    (x,), keepdims = node.inputs, bool(node.attrs["keepdims"])
    if node.op == "reduce_mean":
        return mean(x, integers(node, "axes"), keepdims)
    return reduced(node.op, x, integers(node, "axes"), keepdims)


_RULES: dict[str, Rule] = {
    "softmax": _softmax,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "linear": _linear,
    "glu_linear": _glu_linear,
    "expert_linear": _expert_linear,
    "moe": _moe,
    "rope": _rope,
    "collapse_streams": _collapse_streams,
    "mix_streams": _mix_streams,
    "hadamard": _hadamard,
    "embedding": _take,
    "select_rows": _take,
    "reduce_mean": _reduce,
}


def _rule(node: Node) -> Rule | None:
    if node.attrs.get("keepdims"):
        return _reduce
    if node.op == "concat" and len(node.inputs) == 1:
        return lambda n: n.inputs[0]
    return _RULES.get(node.op)


class _Rebuilder:
    """Rebuilds nodes one by one, composite ops replaced and equal nodes shared."""

    def __init__(self, inputs: Sequence[Value]) -> None:
        self.leaves = set(inputs)
        self.done: dict[Value, Value] = {v: v for v in inputs}
        self.nodes: list[Node] = []
        self._seen: dict[Any, Node] = {}

    def value(self, value: Value) -> Value:
        """The rebuilt form of a value, its node rebuilt first where necessary."""
        stack = [value]
        while stack:
            top = stack[-1]
            missing = [v for v in top.node.inputs if v not in self.done]
            if top in self.done or not missing:
                stack.pop()
                if top not in self.done:
                    self._rebuild(top.node)
            else:
                stack.extend(missing)
        return self.done[value]

    def _rebuild(self, node: Node) -> None:
        inputs = tuple(self.done[v] for v in node.inputs)
        new = (
            node
            if inputs == node.inputs
            else Node(node.op, inputs, node.attrs, node.types, node.loc)
        )
        rule = _rule(new)
        if rule is not None:
            result = rule(new)
            values = [result] if isinstance(result, Value) else list(result)
            self.done.update(zip(node.outputs, [self.value(v) for v in values], strict=True))
            return
        key = (new.op, new.inputs, _key(new.attrs), new.types)
        shared = self._seen.setdefault(key, new)
        if shared is new:
            self.nodes.append(new)
            self.done.update((v, v) for v in new.outputs)
        self.done.update(zip(node.outputs, shared.outputs, strict=True))


def _key(attrs: Mapping[str, Any]) -> tuple:
    return tuple(
        (k, (v.tobytes(), v.shape, str(v.dtype)) if isinstance(v, np.ndarray) else (type(v), v))
        for k, v in attrs.items()
    )


def decompose(spec: PayloadSpec) -> tuple[list[Node], dict[Value, Value]]:
    """Primitive nodes in order, and the primitive value of each of the spec's outputs.

    Raises CompileError when a node needs a value that is neither computed nor an input.
    """
    known = set(spec.inputs) | {v for n in spec.nodes for v in n.outputs}
    for node in spec.nodes:
        for value in node.inputs:
            if value not in known and value.op != "constant":
                raise CompileError(f"{node.op} needs {value}, which the group does not have")
    rebuilder = _Rebuilder(spec.inputs)
    try:
        outputs = {v: rebuilder.value(v) for v in spec.outputs}
    except GraphError as error:
        raise CompileError(f"A group can't be lowered: {error}") from error
    return rebuilder.nodes, outputs
