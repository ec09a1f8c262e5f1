"""Which groups treat each row by itself, so that threads may share out the rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bessemer.codegen.payload.attrs import integer, integers
from bessemer.graph.core import Node, Value
from bessemer.graph.dims import Dim, Shape
from bessemer.graph.schema import schema_of

# Ops that never mix rows, whatever their attributes, as long as rows stay the leading dimension.
_ALWAYS = (
    *("reshape", "expand", "rms_norm", "layer_norm", "topk", "iota", "constant"),
    *("round_trip", "hadamard"),
)
# Ops that work on the matrices, or vectors, of the last axes: rows lie before these.
_TRAILING = {"sinkhorn": 2, "collapse_streams": 2, "mix_streams": 2}
_AXIS = ("softmax", "cumsum", "slice", "concat")
_AXES = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod", "argmax")
_FIRST_OPERAND = ("linear", "glu_linear")


def row_symbol(nodes: Iterable[Node]) -> str | None:
    """The only symbol in the results' sizes; None when there is none or several."""
    names = {
        name
        for node in nodes
        for value in node.outputs
        for size in value.shape
        if isinstance(size, Dim)
        for name, _ in size.terms
    }
    return names.pop() if len(names) == 1 else None


def is_rows(shape: Shape, symbol: str) -> bool:
    """Whether the leading dimension, and no other one, is a multiple of the symbol."""
    return bool(shape) and _is_multiple(shape[0], symbol) and not has_symbol(shape[1:], symbol)


def has_symbol(shape: Shape, symbol: str) -> bool:
    return any(isinstance(s, Dim) and any(n == symbol for n, _ in s.terms) for s in shape)


def _is_multiple(size: object, symbol: str) -> bool:
    return isinstance(size, Dim) and size.const == 0 and [n for n, _ in size.terms] == [symbol]


def row_wise(nodes: Sequence[Node], outputs: Iterable[Value] = ()) -> bool:
    """Whether every op computes a row of its result from the same row of its operands alone.

    The rows are the leading dimension, a multiple of one symbol; operands without the symbol are
    read whole. outputs: what is wanted of the nodes, by default what none of them uses.
    """
    symbol = row_symbol(nodes)
    if symbol is None:
        return False
    used = {v for node in nodes for v in node.inputs}
    wanted = list(outputs) or [v for node in nodes for v in node.outputs if v not in used]
    if not all(is_rows(v.shape, symbol) for v in wanted):
        return False
    return all(_is_row_wise(node, symbol) for node in nodes)


def _is_row_wise(node: Node, symbol: str) -> bool:
    for value in (*node.inputs, *node.outputs):
        if has_symbol(value.shape, symbol) and not is_rows(value.shape, symbol):
            return False
    if not any(has_symbol(v.shape, symbol) for v in node.outputs):
        # Computed whole, for each row again; it must not be a sum over the rows.
        return not any(has_symbol(v.shape, symbol) for v in node.inputs)
    return _keeps_rows(node, symbol)


def _keeps_rows(node: Node, symbol: str) -> bool:
    op, inputs = node.op, node.inputs
    rank = node.inputs[0].type.rank if node.inputs else 1
    rows = [has_symbol(v.shape, symbol) for v in inputs]
    if op in _TRAILING:
        return all(rows) and rank > _TRAILING[op]
    if op in _ALWAYS or schema_of(op).elementwise:
        return op != "topk" or rank > 1
    if op in _AXIS:
        return integer(node, "axis") != -rank
    if op in _AXES:
        return -rank not in integers(node, "axes")
    if op == "permute":
        return integers(node, "perm")[0] == 0
    if op == "pad":
        return integers(node, "low")[0] == integers(node, "high")[0] == 0
    if op in ("take", "embedding", "select_rows"):
        axis = -2 if op == "embedding" else integer(node, "axis")
        if rows[0]:
            return not rows[1] and axis != -rank
        return axis == -rank
    if op == "gather":
        axis = integer(node, "axis")
        return rows[1] and (not rows[0] or axis != -rank)
    if op == "scatter":
        return all(rows) and integer(node, "axis") != -rank
    if op == "put":
        return rows == [True, False, True] and integer(node, "axis") != -rank
    if op == "matmul":
        # A matrix of rows times a whole matrix, or a batch of products.
        return rows[0] or (rows[1] and inputs[1].type.rank == node.types[0].rank > 2)
    if op in _FIRST_OPERAND:
        return rows[0] and not rows[1] and inputs[0].type.rank > 1
    if op == "rope":
        return rows == [True, True, True]
    if op == "expert_linear":
        return rows[:3] == [True, True, False]
    return op == "moe" and rows[:5] == [True, True, True, False, False]
