"""Token rows must stay apart outside attention and state.

A call may hold a whole prompt, a chunk of it or one token; only attention (by its cache) and named
state carry anything from token to token. A module that mixes rows in any other way (a convolution,
a cumulative sum, a softmax over tokens) would give other results for every split of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from bessemer.errors import UnsupportedError
from bessemer.graph import Graph, Node
from bessemer.graph.dims import Dim, Size


def _symbolic(size: Size) -> bool:
    return isinstance(size, Dim)


def _list(node: Node, name: str) -> tuple:
    value = node.attrs[name]
    return value if isinstance(value, tuple) else (value,)


def _axes(node: Node) -> tuple:
    """The axes of the first operand along which a node relates elements to each other."""
    return _list(node, "axes" if "axes" in node.attrs else "axis")


def _along(node: Node) -> bool:
    return any(_symbolic(node.inputs[0].shape[a]) for a in _axes(node))


def _topk(node: Node) -> bool:
    return _symbolic(node.inputs[0].shape[-1])


def _matmul(node: Node) -> bool:
    return _symbolic(node.inputs[0].shape[-1])


def _pad(node: Node) -> bool:
    sides = zip(_list(node, "low"), _list(node, "high"), node.inputs[0].shape, strict=True)
    return any(_symbolic(size) and (low or high) for low, high, size in sides)


def _iota(node: Node) -> bool:
    return _symbolic(node.types[0].shape[0])


def _reshape(node: Node) -> bool:
    """Rows that are merged with other elements lose their identity."""
    before = [s for s in node.inputs[0].shape if _symbolic(s)]
    after = [s for s in node.types[0].shape if _symbolic(s)]
    return before != after


_MIXES: dict[str, Callable[[Node], bool]] = {
    **dict.fromkeys(
        (
            "reduce_sum",
            "reduce_mean",
            "reduce_max",
            "reduce_min",
            "reduce_prod",
            "argmax",
            "softmax",
            "cumsum",
            "slice",
            "concat",
            "take",
            "gather",
            "scatter",
            "put",
        ),
        _along,
    ),
    "topk": _topk,
    "matmul": _matmul,
    "pad": _pad,
    "iota": _iota,
    "reshape": _reshape,
}


def check_rows(graph: Graph) -> None:
    """Raises UnsupportedError that lists every op which relates tokens of a call to each other."""
    mixing = [n for n in graph.nodes() if n.op in _MIXES and _MIXES[n.op](n)]
    if mixing:
        lines = [
            f"  {n.op}({', '.join(str(v.type) for v in n.inputs)}) at {n.loc or 'no source line'}"
            for n in mixing
        ]
        raise UnsupportedError(
            f"{graph.name}: {len(mixing)} operation{'s' * (len(mixing) > 1)} mix the tokens of a "
            "call outside attention and state, so that chunks of a prompt would differ from the "
            "whole prompt:\n" + "\n".join(lines)
        )
