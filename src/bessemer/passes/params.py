"""Which values are arithmetic on parameters alone, and building such expressions."""

from __future__ import annotations

from collections.abc import Sequence

from bessemer.graph import Node, Value, emit
from bessemer.passes import views

_LEAVES = frozenset({"param", "constant", "iota"})
_RUNTIME = frozenset({"input", "state"})


class ParamExpressions:
    """Tells whether a value depends on parameters and constants alone. Remembers answers."""

    def __init__(self) -> None:
        # node -> whether it depends on params, or None if it depends on a call's inputs
        self._kind: dict[Node, bool | None] = {}

    def __call__(self, value: Value) -> bool:
        """Whether the value is a parameter or computed from parameters and constants."""
        return bool(self._classify(value.node))

    def is_static(self, value: Value) -> bool:
        """Whether the value is the same in every call: constants count too."""
        return self._classify(value.node) is not None

    def _classify(self, root: Node) -> bool | None:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in self._kind:
                stack.pop()
                continue
            waiting = [v.node for v in node.inputs if v.node not in self._kind]
            if waiting:
                stack += waiting
                continue
            self._kind[node] = self._from_operands(node)
            stack.pop()
        return self._kind[root]

    def _from_operands(self, node: Node) -> bool | None:
        if node.op in _RUNTIME or not all(t.is_static for t in node.types):
            return None
        if not node.inputs:
            return node.op == "param" if node.op in _LEAVES else None
        kinds = [self._kind[v.node] for v in node.inputs]
        return None if None in kinds else any(kinds)


def rows(w: Value, start: int, stop: int) -> Value:
    """Rows start:stop of a matrix [N, K], or elements of a vector [N]."""
    axis = -len(w.shape)
    if (start, stop) == (0, w.shape[0]):
        return w
    return emit("slice", w, axis=axis, start=start, stop=stop)


def stack_rows(parts: Sequence[Value]) -> Value:
    """Matrices [Ni, K] (or vectors) one below the other."""
    return views.concat(parts, -len(parts[0].shape))
