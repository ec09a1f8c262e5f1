"""Only the rows whose logits are wanted are computed: f(x)[rows] = f(x[rows]) for ops that work on
each token row by itself. The selection moves up from the logits to the last op that mixes rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from bessemer.graph import Dim, DType, Graph, GraphError, Node, Value, emit, schema_of, topological
from bessemer.graph.schema import build_from
from bessemer.passes import views
from bessemer.passes.attributes import axes_of
from bessemer.passes.base import Pass

ROWS_INPUT = "output_rows"
LOGITS = "logits"
HIDDEN = "hidden"
# Row-wise whatever their attributes: each leading index gives one result.
_ROWWISE = frozenset(
    {"linear", "glu_linear", "rms_norm", "layer_norm", "rope", "moe", "expert_linear", "embedding"}
    | {"round_trip", "hadamard", "sinkhorn", "collapse_streams", "mix_streams"}
)
# Row-wise unless they work along the leading axis.
_ALONG = frozenset(
    {"reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod", "argmax", "softmax"}
    | {"cumsum", "topk", "slice", "concat", "gather", "scatter"}
)
_MIXING = frozenset(
    {"attention", "flash_attention", "gqa_decode_attention"}
    | {"compressed_attention", "block_compress", "index_topk"}
)


@dataclass(frozen=True)
class SelectRows(Pass):
    """f(x)[rows] = f(x[rows]); the result also has `hidden`, the input of the last linear layer."""

    token_symbol: str = "T"
    row_symbol: str = "R"

    name: ClassVar[str] = "select_rows"

    def apply(self, graph: Graph) -> Graph:
        if LOGITS not in graph.outputs:
            raise GraphError(f"the graph has no output {LOGITS!r} whose rows could be selected")
        whole = _ancestors(_needed_whole(graph))
        while True:
            sinking = _Sinking(self, whole)
            logits = sinking.selected(graph.outputs[LOGITS])
            more = _ancestors(v for v in sinking.stops if v.node not in whole)
            if more <= whole:
                break
            whole = whole | more
        outputs = {**graph.outputs, LOGITS: logits}
        hidden = _last_linear_input(logits)
        if hidden is not None:
            outputs[HIDDEN] = hidden
        return replace(graph, outputs=outputs)


def _needed_whole(graph: Graph) -> list[Value]:
    """Values that are needed for every token row, whichever logits are wanted."""
    operands = [v for n in graph.nodes() if n.op in _MIXING for v in n.inputs]
    others = [v for k, v in graph.outputs.items() if k not in (LOGITS, HIDDEN)]
    return [*operands, *graph.updates.values(), *others]


def _ancestors(values: Iterable[Value]) -> frozenset[Node]:
    return frozenset(topological(list(values)))


class _Sinking:
    """One attempt: values in `whole` are there anyway, so that their rows are picked from them."""

    def __init__(self, options: SelectRows, whole: frozenset[Node]) -> None:
        self._tokens = Dim.sym(options.token_symbol)
        self._wanted = Dim.sym(options.row_symbol)
        self._whole = whole
        self._done: dict[Value, Value] = {}
        self._rows = emit("input", name=ROWS_INPUT, dtype=DType.I64, shape=(self._wanted,))
        self.stops: list[Value] = []

    def selected(self, root: Value) -> Value:
        """The wanted rows of a value; itself where it has no token axis."""
        for node in topological([root]):
            for value in node.outputs:
                if self._has_rows(value):
                    self._select(value)
        return self._done.get(root, root)

    def _has_rows(self, value: Value) -> bool:
        return self._tokens in value.shape

    def _select(self, value: Value) -> None:
        if value in self._done:
            return
        node = value.node
        there = node in self._whole and not self._repeats_one_row(node)
        pushed = None if there else self._pushed(node)
        if pushed is not None:
            self._done.update(zip(node.outputs, pushed.outputs, strict=True))
            return
        self.stops.append(value)
        axes = [i for i, s in enumerate(value.shape) if s == self._tokens]
        if len(axes) == 1:
            axis = axes[0] - len(value.shape)
            self._done[value] = emit("select_rows", value, self._rows, axis=axis, loc=node.loc)

    def _pushed(self, node: Node) -> Node | None:
        """The op on selected rows, if it works on each row by itself."""
        if not node.inputs or not self._is_rowwise(node):
            return None
        operands = []
        for value in node.inputs:
            if not self._has_rows(value):
                operands.append(value)
            elif value in self._done and self._leads(value):
                if node.op in views.VIEWS and value in self.stops:
                    return None  # A view is free: pick rows of the view.
                operands.append(self._done[value])
            else:
                return None
        attrs = dict(node.attrs)
        if "shape" in attrs:
            attrs["shape"] = self._row_shape(node.types[0].shape)
        new = build_from(node.op, operands, attrs, node.loc)
        expected = tuple(self._row_shape(t.shape) for t in node.types)
        return new if tuple(t.shape for t in new.types) == expected else None

    def _leads(self, value: Value) -> bool:
        return value.shape[0] == self._tokens and self._tokens not in value.shape[1:]

    def _row_shape(self, shape: tuple) -> tuple:
        return (self._wanted, *shape[1:]) if shape[0] == self._tokens else shape

    def _repeats_one_row(self, node: Node) -> bool:
        return node.op == "expand" and not self._has_rows(node.inputs[0])

    def _is_rowwise(self, node: Node) -> bool:
        if not all(self._leads(v) for v in node.outputs):
            return False
        rank = len(node.types[0].shape)
        if schema_of(node.op).elementwise:
            return all(len(v.shape) == rank for v in node.inputs if self._has_rows(v))
        if node.op in _ALONG:
            return -len(node.inputs[0].shape) not in axes_of(node)
        if node.op == "permute":
            return views.perm_of(node.out)[0] == 0
        if self._repeats_one_row(node):
            return True
        if node.op in ("reshape", "expand"):
            return self._leads(node.inputs[0])
        if node.op == "matmul":
            return not self._has_rows(node.inputs[1])
        return node.op in _ROWWISE


def _last_linear_input(logits: Value) -> Value | None:
    """The input of the linear layer that the logits are a function of, element by element."""
    value = logits
    while value.op != "linear":
        wide = [v for v in value.node.inputs if v.shape == value.shape]
        if not schema_of(value.op).elementwise or len(wide) != 1:
            return None
        value = wide[0]
    return value.node.inputs[0]
