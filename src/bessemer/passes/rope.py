"""rope(x, cos, sin): with pairs (i, l) of elements of a head,
y[i] = x[i] cos[k] - x[l] sin[k] and y[l] = x[l] cos[k] + x[i] sin[k];
l = i + half (style half) or l = i + 1 (style interleaved), and elements beyond the pairs as they
are (partial rotary).

Every spelling is recognised by the terms of its elements (`linear_forms`), not by its ops.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bessemer.graph import Node, Shape, Value, constant, emit
from bessemer.passes import views
from bessemer.passes.attributes import fixed
from bessemer.passes.base import RulePass, Uses
from bessemer.passes.linear_forms import Form, Term, linear_form

_ROOTS = frozenset({"add", "sub", "concat", "reshape"})


@dataclass(frozen=True)
class Rope(RulePass):
    """rope(x)[i] = x[i] cos - x[l] sin, rope(x)[l] = x[l] cos + x[i] sin, in every spelling."""

    name: ClassVar[str] = "rope"

    def rule(self, node: Node, uses: Uses) -> Value | None:
        if node.op == "concat" and node.attrs["axis"] == -1:
            return _with_rest(node) or _rotated(node.out) or _rotated_parts(node)
        return _rotated(node.out) if node.op in _ROOTS else None


def _rotated(value: Value) -> Value | None:
    """The value as a rope of something, if its elements are that."""
    form = linear_form(value)
    if form is None or not any(t.table is not None for t in form):
        return None
    rotation = _rotation(form, fixed(value.shape[-1]))
    return _emit_rope(rotation, value.shape) if rotation else None


def _rotated_parts(node: Node) -> Value | None:
    """concat(x, y1, y2) = concat(x, rope(y)), where parts side by side are the rotated halves."""
    parts = node.inputs
    for i in range(len(parts) - 1):
        if parts[i].op not in ("add", "sub") or len(parts) == 2:
            continue
        turned = _rotated(views.concat(parts[i : i + 2], -1))
        if turned is not None:
            return views.concat([*parts[:i], turned, *parts[i + 2 :]], -1)
    return None


def _with_rest(node: Node) -> Value | None:
    """concat(rope(x[:w]), x[w:]) = rope(x)."""
    if len(node.inputs) != 2 or node.attrs["axis"] != -1 or node.inputs[0].op != "rope":
        return None
    turned, rest = node.inputs
    x, cos, sin = turned.node.inputs
    if not (views.is_last_slice(x) and views.is_last_slice(rest)):
        return None
    (start, middle), (again, stop) = views.bounds(x), views.bounds(rest)
    if x.node.inputs != rest.node.inputs or middle != again:
        return None
    whole = views.slice_last(x.node.inputs[0], start, stop)
    return emit("rope", whole, cos, sin, style=turned.node.attrs["style"])


@dataclass(frozen=True)
class _Rotation:
    """y = rope(x[start:start + width])[order], with columns of factor * table by pair."""

    x: Value
    start: int
    width: int
    cos: Value
    cos_columns: np.ndarray
    sin: Value
    sin_columns: np.ndarray
    factor: float
    style: str
    order: np.ndarray


def _rotation(form: Form, width: int) -> _Rotation | None:
    products = [t for t in form if t.table is not None]
    first = products[0]
    for x in (first.source, first.table):
        assert x is not None
        oriented = [_oriented(t, x) for t in form]
        tables = {t.table for t in oriented if t is not None and t.table is not None}
        if None in oriented or len(tables) != 2:
            continue
        terms = [t for t in oriented if t is not None]
        a, b = sorted(tables, key=lambda v: [t.table for t in terms].index(v))
        for cos, sin in ((a, b), (b, a)):
            found = _with_tables(terms, x, cos, sin, width)
            if found is not None:
                return found
    return None


def _oriented(term: Term, x: Value) -> Term | None:
    """The term with x as its source and the other factor as its table."""
    if term.source == x:
        return term
    if term.table != x or term.table_index is None:
        return None
    return Term(term.scale, x, term.table_index, term.source, term.index)


@dataclass(frozen=True)
class _Column:
    """One factor of every element: its scale (0: absent), x index and table index."""

    scale: np.ndarray
    index: np.ndarray
    column: np.ndarray


def _gather(terms: list[Term], table: Value | None, width: int) -> _Column | None:
    """The terms with one table, of which each element has at most one."""
    scale, index, column = np.zeros(width), np.zeros(width, int), np.zeros(width, int)
    for term in terms:
        if term.table != table:
            continue
        here = term.scale != 0
        if (scale[here] != 0).any():
            return None
        scale[here], index[here] = term.scale[here], term.index[here]
        if term.table_index is not None:
            column[here] = term.table_index[here]
    return _Column(scale, index, column)


def _with_tables(
    terms: list[Term], x: Value, cos: Value, sin: Value, width: int
) -> _Rotation | None:
    c, s, rest = (_gather(terms, table, width) for table in (cos, sin, None))
    if c is None or s is None or rest is None:
        return None
    count = int((c.scale != 0).sum())
    turned, kept = slice(0, count), slice(count, width)
    factor = float(c.scale[0])
    scales_fit = (
        factor > 0
        and (c.scale[turned] == factor).all()
        and (np.abs(s.scale[turned]) == factor).all()
        and not s.scale[kept].any()
        and not rest.scale[turned].any()
        and (rest.scale[kept] == 1).all()
    )
    if not count or count % 2 or not scales_fit:
        return None
    start = int(c.index[turned].min())
    order = c.index[turned] - start
    if sorted(order) != list(range(count)):
        return None
    if (rest.index[kept] != start + np.arange(count, width)).any():
        return None
    pairs = _pairs(c, s, count, start)
    if pairs is None:
        return None
    style, cos_columns, sin_columns = pairs
    return _Rotation(x, start, width, cos, cos_columns, sin, sin_columns, factor, style, order)


def _pairs(
    c: _Column, s: _Column, count: int, start: int
) -> tuple[str, np.ndarray, np.ndarray] | None:
    """The style of the pairs and the table columns of each pair, if they are rotations."""
    half = count // 2
    at = {int(c.index[j]) - start: j for j in range(count)}
    columns: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for style, step, span in (("half", 1, half), ("interleaved", 2, 1)):
        for pair in range(half):
            low, high = pair * step, pair * step + span
            j, k = at[low], at[high]
            signs = s.scale[j] < 0 < s.scale[k]
            partners = (int(s.index[j]) - start, int(s.index[k]) - start) == (high, low)
            tables = c.column[j] == c.column[k] and s.column[j] == s.column[k]
            if not (signs and partners and tables):
                break
            columns[style].append((int(c.column[j]), int(s.column[j])))
        if len(columns[style]) == half:
            chosen = np.array(columns[style])
            return style, chosen[:, 0], chosen[:, 1]
    return None


def _emit_rope(rotation: _Rotation, shape: Shape) -> Value | None:
    cos = _columns(rotation.cos, rotation.cos_columns, rotation.factor)
    sin = _columns(rotation.sin, rotation.sin_columns, rotation.factor)
    x = views.slice_last(rotation.x, rotation.start, rotation.start + rotation.width)
    rows = views.without_units(cos.shape[:-1])
    lead = x.shape[:-1]
    if len(rows) > 1 or cos.shape[:-1] != sin.shape[:-1] or len(rows) > len(lead):
        return None
    half = cos.shape[-1]
    tables = [views.reshape(t, (*rows, half)) for t in (cos, sin)] if rows else []
    if lead == rows:
        y = emit("rope", views.reshape(x, (*rows, 1, x.shape[-1])), *tables, style=rotation.style)
    elif rows and len(lead) == 2 and lead[0] == rows[0] and lead[1] != rows[0]:
        y = emit("rope", x, *tables, style=rotation.style)
    elif rows and len(lead) == 2 and lead[1] == rows[0] and lead[0] != rows[0]:
        turned = emit("rope", views.permute(x, (1, 0, 2)), *tables, style=rotation.style)
        y = views.permute(turned, (1, 0, 2))
    else:
        return None
    return views.reshape(_ordered(y, rotation.order), shape)


def _columns(table: Value, columns: np.ndarray, factor: float) -> Value:
    """The table's columns in the order of the pairs, times a factor (YaRN's, longrope's)."""
    if factor != 1:
        table = emit("mul", table, constant(factor))
    start, count = int(columns[0]), len(columns)
    if (columns == np.arange(start, start + count)).all():
        return views.slice_last(table, start, start + count)
    return emit("take", table, constant(columns.astype(np.int64)), axis=-1)


def _ordered(y: Value, order: np.ndarray) -> Value:
    """y[..., order] for the first elements of y; views where the order splits odd from even."""
    count, width = len(order), fixed(y.shape[-1])
    if (order == np.arange(count)).all():
        return y
    lead = y.shape[:-1]
    if count == width and (order == np.arange(width).reshape(-1, 2).T.reshape(-1)).all():
        rank = len(lead)
        pairs = views.reshape(y, (*lead, width // 2, 2))
        return views.reshape(views.permute(pairs, (*range(rank), rank + 1, rank)), y.shape)
    whole = np.concatenate([order, np.arange(count, width)]).astype(np.int64)
    return emit("take", y, constant(whole), axis=-1)
