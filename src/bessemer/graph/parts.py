"""Rows of a weight expression by themselves: a stack of experts is gigabytes, one expert megabytes.

Rows are those of the leading axis. Each op that weights are made of says which rows of its operands
some rows of its result need, so that of the checkpoint only these are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from bessemer.graph.core import Node, Value
from bessemer.graph.evaluate import evaluate_value
from bessemer.graph.schema import Env, schema_of


class ReadRows(Protocol):
    """Reads a checkpoint tensor by name, or some rows of it."""

    def __call__(self, name: str, rows: range | None = None, /) -> np.ndarray: ...


# Gives rows of an operand, or all of it.
Get = Callable[[Value, "range | None"], np.ndarray]


def evaluate_rows(root: Value, read: ReadRows, rows: range) -> np.ndarray:
    """Some rows of a weight expression: of what `evaluate_value` gives, [len(rows), ...]. What
    doesn't split (see `splits`) is evaluated whole on the way.
    """

    def get(value: Value, rows: range | None) -> np.ndarray:
        node = value.node
        if rows is None:
            return evaluate_value(value, read)
        if node.op == "param" and len(value.shape) > 1:
            return read(str(node.attrs["name"]), rows)
        if not node.inputs or _least(node) is None:
            return evaluate_value(value, read)[rows.start : rows.stop]
        with np.errstate(all="ignore"):
            result = _RULES.get(node.op, _elementwise)(node, rows, get)
        return np.asarray(result, dtype=node.types[0].dtype.numpy)

    return get(root, rows)


def splits(root: Value, most: int) -> bool:
    """Whether rows of a weight expression can be computed without much more than they need: no
    operand on the way is read in larger pieces than `most` numbers.
    """
    waiting, seen = [root.node], set()
    while waiting:
        node = waiting.pop()
        if node in seen or not node.inputs:
            continue
        seen.add(node)
        least = _least(node)
        if least is None or max(least) > most:
            return False
        waiting += [v.node for v in node.inputs]
    return bool(root.shape)


def _sizes(value: Value) -> tuple[int, ...]:
    return tuple(int(str(size)) for size in value.shape)


def _least(node: Node) -> list[int] | None:
    """How many numbers of each operand are read at least; None for an op that doesn't split."""
    if len(node.types) != 1 or not node.types[0].shape:
        return None
    if node.op not in _RULES and not schema_of(node.op).elementwise:
        return None
    if node.op == "permute" and _attr(node, "perm")[0] != 0:
        return None
    if node.op == "reshape" and not node.inputs[0].shape:
        return None
    return [math.prod(_sizes(v)[1:] if _by_rows(node, v) else _sizes(v)) for v in node.inputs]


def _by_rows(node: Node, operand: Value) -> bool:
    """Whether rows of the result need rows of the operand, and not all of it."""
    if node.op in _RULES and node.op != "expand":
        return bool(operand.shape)
    shape = node.types[0].shape
    return len(operand.shape) == len(shape) and operand.shape[0] == shape[0]


def _attr(node: Node, name: str) -> Any:
    return node.attrs[name]


def _reference(node: Node, operands: list[np.ndarray], attrs: Mapping[str, Any]) -> np.ndarray:
    schema = schema_of(node.op)
    extra = (attrs, Env()) if schema.needs_env else (attrs,)
    return schema.reference(*operands, *extra)


def _elementwise(node: Node, rows: range, get: Get) -> np.ndarray:
    operands = [get(v, rows if _by_rows(node, v) else None) for v in node.inputs]
    return _reference(node, operands, node.attrs)


def _expand(node: Node, rows: range, get: Get) -> np.ndarray:
    (x,) = node.inputs
    values = get(x, rows if _by_rows(node, x) else None)
    return np.broadcast_to(values, (len(rows), *_sizes(node.out)[1:]))


def _permute(node: Node, rows: range, get: Get) -> np.ndarray:
    return _reference(node, [get(node.inputs[0], rows)], node.attrs)


def _leads(node: Node) -> bool:
    """Whether an op's axis is the leading one."""
    return _attr(node, "axis") == -len(node.types[0].shape)


def _slice(node: Node, rows: range, get: Get) -> np.ndarray:
    (x,) = node.inputs
    if not _leads(node):
        return _reference(node, [get(x, rows)], node.attrs)
    held = range(_attr(node, "start"), _attr(node, "stop"), _attr(node, "step"))
    wanted = held[rows.start : rows.stop]
    return get(x, range(wanted[0], wanted[-1] + 1))[:: wanted.step]


def _concat(node: Node, rows: range, get: Get) -> np.ndarray:
    if not _leads(node):
        return _reference(node, [get(v, rows) for v in node.inputs], node.attrs)
    parts, at = [], 0
    for value in node.inputs:
        size = _sizes(value)[0]
        start, stop = max(rows.start - at, 0), min(rows.stop - at, size)
        if start < stop:
            parts.append(get(value, range(start, stop)))
        at += size
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _reshape(node: Node, rows: range, get: Get) -> np.ndarray:
    """The rows of the operand that hold the wanted numbers, less what is too much at the ends."""
    (x,) = node.inputs
    inner, wide = math.prod(_sizes(node.out)[1:]), math.prod(_sizes(x)[1:])
    first, last = rows.start * inner, rows.stop * inner
    held = range(first // wide, -(-last // wide))
    at = held.start * wide
    flat = get(x, held).reshape(-1)[first - at : last - at]
    return flat.reshape(len(rows), *_sizes(node.out)[1:])


_RULES: dict[str, Callable[[Node, range, Get], np.ndarray]] = {
    "concat": _concat,
    "expand": _expand,
    "permute": _permute,
    "reshape": _reshape,
    "slice": _slice,
}
