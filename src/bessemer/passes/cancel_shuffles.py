"""attention(q[..., p], k[..., p], v) = attention(q, k, v): a score does not depend on the order of
the elements that it sums. DeepSeek takes rotary pairs apart on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bessemer.graph import Node, Value, emit
from bessemer.graph.schema import build_from
from bessemer.passes import views
from bessemer.passes.attributes import fixed
from bessemer.passes.base import RulePass, Uses
from bessemer.passes.linear_forms import linear_form


@dataclass(frozen=True)
class CancelShuffles(RulePass):
    """attention(q[..., p], k[..., p], v) = attention(q, k, v)."""

    name: ClassVar[str] = "cancel_shuffles"

    def rule(self, node: Node, uses: Uses) -> Value | None:
        if node.op != "attention":
            return None
        q, k, *rest = node.inputs
        plain_q, order_q = _unshuffled(q)
        plain_k, order_k = _unshuffled(k)
        if (order_q != order_k).any() or (order_q == np.arange(len(order_q))).all():
            return None
        return build_from("attention", (plain_q, plain_k, *rest), node.attrs, node.loc).out


def _unshuffled(x: Value) -> tuple[Value, np.ndarray]:
    """y and p with x = y[..., p]."""
    width = fixed(x.shape[-1])
    if x.op == "concat" and x.node.attrs["axis"] == -1:
        parts, orders, at = [], [], 0
        for part in x.node.inputs:
            plain, order = _unshuffled(part)
            parts.append(plain)
            orders.append(order + at)
            at += len(order)
        return views.concat(parts, -1), np.concatenate(orders)
    if x.op == "expand" and x.node.inputs[0].shape[-1] == width:
        plain, order = _unshuffled(x.node.inputs[0])
        return emit("expand", plain, shape=x.shape), order
    form = linear_form(x)
    if form is not None and len(form) == 1 and form[0].table is None:
        (term,) = form
        whole = (term.scale == 1).all() and sorted(term.index) == list(range(width))
        if whole and term.source.shape[-1] == width:
            return views.reshape(term.source, x.shape), term.index
    return x, np.arange(width)
