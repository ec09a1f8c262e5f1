"""Values as sums of products, element by element of the last axis.

Rotary embeddings are spelt in many ways: rotate_half, chunks, strided slices and stacks, repeated
tables. All of them say that each element of the result is a sum of terms `c * x[i] * table[k]`.
`linear_form` reads those terms off the graph, so that one equation recognises every spelling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from bessemer.graph import Node, Value
from bessemer.graph.dims import Size
from bessemer.passes import views
from bessemer.passes.attributes import fixed, int_of
from bessemer.passes.pattern import scalar_of

# Sums with more terms, or expressions with more ops, are not rotary embeddings.
MAX_TERMS = 16
MAX_NODES = 64


@dataclass(frozen=True)
class Term:
    """`scale * source[..., index] * table[..., table_index]`, one per element of the trailing axes.

    Arrays have the shape of these axes. A scale of 0 says that an element lacks this term. Indices
    count along the last axis of `source` and `table`.
    """

    scale: np.ndarray
    source: Value
    index: np.ndarray
    table: Value | None = None
    table_index: np.ndarray | None = None

    def arrays(self, fn: Callable[[np.ndarray], np.ndarray], scale: float = 1.0) -> Term:
        """The same term with its arrays moved by `fn`."""
        at = None if self.table_index is None else fn(self.table_index)
        return Term(fn(self.scale) * scale, self.source, fn(self.index), self.table, at)


Form = tuple[Term, ...]


def linear_form(value: Value) -> Form | None:
    """Terms of each element of the last axis; None where the value is not such a sum."""
    width = value.shape[-1] if value.shape else None
    if not isinstance(width, int) or width == 0:
        return None
    try:
        return _Tracer().trace(value, (width,))
    except _NotLinearError:
        return None


class _NotLinearError(Exception):
    """The expression is too large, or not a sum of products."""


class _Tracer:
    def __init__(self) -> None:
        self._nodes = 0
        self._in_product = False

    def trace(self, value: Value, trailing: tuple[int, ...]) -> Form:
        """Terms of the elements of the last `len(trailing)` axes of a value."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _NotLinearError
        rule = _RULES.get(value.op)
        form = rule(self, value.node, trailing) if rule else None
        if form is None:
            form = self._leaf(value, trailing)
        if len(form) > MAX_TERMS:
            raise _NotLinearError
        return form

    def _leaf(self, value: Value, trailing: tuple[int, ...]) -> Form:
        if len(trailing) != 1:
            raise _NotLinearError
        return (Term(np.ones(trailing), value, np.arange(trailing[0])),)

    def neg(self, node: Node, trailing: tuple[int, ...]) -> Form:
        return tuple(t.arrays(_same, -1.0) for t in self.trace(node.inputs[0], trailing))

    def add(self, node: Node, trailing: tuple[int, ...]) -> Form | None:
        if any(v.shape != node.types[0].shape for v in node.inputs):
            return None
        a, b = (self.trace(v, trailing) for v in node.inputs)
        return a + (tuple(t.arrays(_same, -1.0) for t in b) if node.op == "sub" else b)

    def mul(self, node: Node, trailing: tuple[int, ...]) -> Form | None:
        for value, other in (node.inputs, node.inputs[::-1]):
            number = scalar_of(other)
            if number is not None and value.shape == node.types[0].shape:
                return tuple(t.arrays(_same, float(number)) for t in self.trace(value, trailing))
        for x, table in (node.inputs, node.inputs[::-1]):
            if x.shape == node.types[0].shape and x.shape[-1:] == table.shape[-1:]:
                return self._product(x, table, trailing)
        return None

    def _product(self, x: Value, table: Value, trailing: tuple[int, ...]) -> Form | None:
        """Sums times sums; a product inside a factor (a norm's weight, say) is a leaf of it."""
        if self._in_product:
            return None
        self._in_product = True
        a, b = self.trace(x, trailing), self.trace(table, trailing)
        self._in_product = False
        return tuple(
            Term(t.scale * u.scale, t.source, t.index, u.source, u.index) for t in a for u in b
        )

    def reshape(self, node: Node, trailing: tuple[int, ...]) -> Form | None:
        (x,) = node.inputs
        lead = node.types[0].shape[: len(node.types[0].shape) - len(trailing)]
        inner = _trailing_of(x, math.prod(trailing), lead)
        if inner is None:
            return None
        return tuple(t.arrays(lambda a: a.reshape(trailing)) for t in self.trace(x, inner))

    def permute(self, node: Node, trailing: tuple[int, ...]) -> Form | None:
        perm = views.perm_of(node.out)
        fixed = len(perm) - len(trailing)
        if perm[:fixed] != tuple(range(fixed)):
            return None
        order = [p - fixed for p in perm[fixed:]]
        inner = tuple(trailing[i] for i in views.inverse(order))
        return tuple(
            t.arrays(lambda a: a.transpose(order)) for t in self.trace(node.inputs[0], inner)
        )

    def expand(self, node: Node, trailing: tuple[int, ...]) -> Form | None:
        (x,) = node.inputs
        fixed = len(node.types[0].shape) - len(trailing)
        if (
            len(x.shape) != len(node.types[0].shape)
            or x.shape[:fixed] != node.types[0].shape[:fixed]
        ):
            return None
        inner = _static(x.shape[fixed:])
        if inner is None:
            return None
        return tuple(t.arrays(lambda a: np.broadcast_to(a, trailing)) for t in self.trace(x, inner))

    def slice(self, node: Node, trailing: tuple[int, ...]) -> Form | None:
        (x,) = node.inputs
        axis, step = int_of(node, "axis"), int_of(node, "step")
        inner = _static(x.shape[len(x.shape) - len(trailing) :])
        if -axis > len(trailing) or inner is None:
            return None
        where = [slice(None)] * len(inner)
        where[axis] = slice(int_of(node, "start"), int_of(node, "stop"), step)
        return tuple(t.arrays(lambda a: a[tuple(where)]) for t in self.trace(x, inner))

    def concat(self, node: Node, trailing: tuple[int, ...]) -> Form | None:
        axis = int_of(node, "axis")
        if -axis > len(trailing):
            return None
        at, terms = 0, []
        for part in node.inputs:
            size = fixed(part.shape[axis])
            inner = list(trailing)
            inner[axis] = size
            widths = [(0, 0)] * len(trailing)
            widths[axis] = (at, trailing[axis] - at - size)
            padded = partial(np.pad, pad_width=widths)
            terms += [term.arrays(padded) for term in self.trace(part, tuple(inner))]
            at += size
        return tuple(terms)


def _same(a: np.ndarray) -> np.ndarray:
    return a


def _static(sizes: Sequence[Size]) -> tuple[int, ...] | None:
    fixed = tuple(s for s in sizes if isinstance(s, int))
    return fixed if len(fixed) == len(sizes) else None


def _trailing_of(x: Value, count: int, lead: Sequence[Size]) -> tuple[int, ...] | None:
    """The trailing axes of x that hold `count` elements below the leading axes `lead`."""
    wanted = views.without_units(tuple(lead))
    for axes in range(len(x.shape) + 1):
        split = len(x.shape) - axes
        sizes = _static(x.shape[split:])
        if sizes is None or math.prod(sizes) > count:
            return None
        if sizes and math.prod(sizes) == count and views.without_units(x.shape[:split]) == wanted:
            return sizes
    return None


_RULES: dict[str, Callable[[_Tracer, Node, tuple[int, ...]], Form | None]] = {
    "neg": _Tracer.neg,
    "add": _Tracer.add,
    "sub": _Tracer.add,
    "mul": _Tracer.mul,
    "reshape": _Tracer.reshape,
    "permute": _Tracer.permute,
    "expand": _Tracer.expand,
    "slice": _Tracer.slice,
    "concat": _Tracer.concat,
}
