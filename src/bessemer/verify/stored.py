"""The numbers that an artifact really stores, as the checkpoint tensors they came from.

A stored weight is an expression over checkpoint tensors: several one below the other, transposed,
1 + w. Undoing it gives each tensor as the compiled code sees it, rounding included, so that the
reference model gets the very weights of the artifact under the checkpoint's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bessemer.artifact.layout import PANEL_ROWS, StoredWeight
from bessemer.artifact.packing import unpack
from bessemer.artifact.reader import Artifact
from bessemer.graph import Node, Value, evaluate_value, topological

# Numbers unpacked at a time, so that a large matrix takes little more than its own memory.
BLOCK_NUMBERS = 1 << 22


def read_weight(artifact: Artifact, weight: StoredWeight) -> np.ndarray:
    """A stored weight in its logical shape, float types as float32."""
    return _unpacked(artifact.stored(weight.name), weight)


def _unpacked(data: np.ndarray, weight: StoredWeight) -> np.ndarray:
    if weight.layout == "plain" or weight.nbytes == 0:
        return np.array(unpack(data, weight))
    *lead, rows, depth = weight.shape
    out = np.empty((math.prod(lead), rows, depth), np.float32)
    panel_bytes = _panel_bytes(weight)
    step = PANEL_ROWS * max(1, BLOCK_NUMBERS // max(1, PANEL_ROWS * depth))
    per_matrix = -(-rows // PANEL_ROWS) * panel_bytes
    for i, matrix in enumerate(out):
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            at = i * per_matrix + start // PANEL_ROWS * panel_bytes
            part = StoredWeight.place("", (stop - start, depth), weight.dtype, "panels", 0)
            matrix[start:stop] = unpack(data[at : at + part.nbytes], part)
    return out.reshape(weight.shape)


def _panel_bytes(weight: StoredWeight) -> int:
    shape = (PANEL_ROWS, weight.shape[-1])
    return StoredWeight.place("", shape, weight.dtype, "panels", 0).nbytes


@dataclass(frozen=True)
class StoredParts:
    """A stored weight of which only the parts that are asked for are read: the rows of a table, or
    the matrices of chosen experts. Indexed as the array would be that it stands for.
    """

    artifact: Artifact
    weight: StoredWeight

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def ndim(self) -> int:
        return len(self.weight.shape)

    def __getitem__(self, index: np.ndarray | int) -> np.ndarray:
        """What `index` picks of the first axis, float types as float32."""
        at = np.asarray(index)
        pick = self._row if self.ndim == 2 else self._matrix
        parts = [pick(int(i)) for i in at.reshape(-1)]
        if not parts:
            return np.empty((*at.shape, *self.shape[1:]), np.float32)
        return np.stack(parts).reshape(*at.shape, *self.shape[1:])

    def _row(self, row: int) -> np.ndarray:
        data, weight = self.artifact.stored(self.weight.name), self.weight
        if weight.layout == "plain":
            return self._matrix(row)
        count = min(PANEL_ROWS, weight.shape[0] - row // PANEL_ROWS * PANEL_ROWS)
        at = row // PANEL_ROWS * _panel_bytes(weight)
        panel = StoredWeight.place("", (count, weight.shape[1]), weight.dtype, "panels", 0)
        return unpack(data[at : at + panel.nbytes], panel)[row % PANEL_ROWS]

    def _matrix(self, i: int) -> np.ndarray:
        """Entries of the first axis have the same number of bytes."""
        weight = self.weight
        part = StoredWeight.place("", weight.shape[1:], weight.dtype, weight.layout, 0)
        data = self.artifact.stored(weight.name)
        return _unpacked(data[i * part.nbytes : (i + 1) * part.nbytes], part)


class NotInvertibleError(Exception):
    """An expression can't be undone for a tensor; says which op is in the way."""


@dataclass
class StoredTensors:
    """Checkpoint tensors by name, read out of an artifact.

    expressions: stored weight -> how it is made of checkpoint tensors.
    fallback: reads a tensor that can't be read out of the artifact; None where there is none.
    """

    artifact: Artifact
    expressions: Mapping[str, Value]
    fallback: Callable[[str], np.ndarray] | None = None
    fallen_back: dict[str, str] = field(default_factory=dict)
    _found_in: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for stored, expression in self.expressions.items():
            for node in topological([expression]):
                if node.op == "param":
                    self._found_in.setdefault(str(node.attrs["name"]), []).append(stored)

    def read(self, name: str) -> np.ndarray:
        """A checkpoint tensor as the artifact stores it, float32.

        Raises KeyError when neither the artifact nor the fallback has it.
        """
        weights = {w.name: w for w in self.artifact.manifest.weights}
        reason, found = "it is in no stored weight", None
        for stored in self._found_in.get(name, []):
            if stored not in weights:
                continue
            try:
                value = read_weight(self.artifact, weights[stored])
                found = undone(self.expressions[stored], name, value).joined(found)
            except NotInvertibleError as error:
                reason = str(error)
                continue
            if found.known is None:
                return np.ascontiguousarray(found.value)
            reason = _PARTLY
        if self.fallback is None:
            raise KeyError(f"tensor {name}: {reason}")
        self.fallen_back[name] = reason
        return self.fallback(name)


_PARTLY = "only a part of it is stored"


def undo(expression: Value, name: str, value: np.ndarray) -> np.ndarray:
    """The tensor `name` that makes `expression` have this value.

    Raises NotInvertibleError when the value doesn't determine it.
    """
    found = undone(expression, name, value)
    if found.known is not None:
        raise NotInvertibleError(_PARTLY)
    return np.ascontiguousarray(found.value)


def undone(expression: Value, name: str, value: np.ndarray) -> Part:
    """What the value of an expression says of the tensor `name`. Raises NotInvertibleError."""
    order = topological([expression])
    depends = _depending(order, name)
    parts: dict[Node, Part] = {expression.node: Part(value)}
    for node in reversed(order):
        if node not in depends or node not in parts or node.op == "param":
            continue
        if node.op not in _UNDO:
            raise NotInvertibleError(f"{node.op} can't be undone")
        whole = parts.pop(node)
        for i, operand in enumerate(node.inputs):
            if operand.node in depends:
                part = _UNDO[node.op](node, i, whole, depends)
                parts[operand.node] = part.joined(parts.get(operand.node))
    found, *others = parts.values()
    for other in others:  # the tensor is named by several nodes
        found = found.joined(other)
    return found


def _depending(order: Sequence[Node], name: str) -> set[Node]:
    """The nodes that the tensor goes into, itself included."""
    found: set[Node] = set()
    for node in order:
        is_target = node.op == "param" and node.attrs["name"] == name
        if is_target or any(v.node in found for v in node.inputs):
            found.add(node)
    return found


@dataclass(frozen=True)
class Part:
    """What is known of a value. known: which elements; None when all are."""

    value: np.ndarray
    known: np.ndarray | None = None

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> Part:
        return Part(move(self.value), None if self.known is None else move(self.known))

    def joined(self, other: Part | None) -> Part:
        """What both know together."""
        if other is None or self.known is None:
            return self
        if other.known is None:
            return other
        known = self.known | other.known
        value = np.where(self.known, self.value, other.value)
        return Part(value, None if known.all() else known)


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(int(str(s)) for s in value.shape)


def _undo_reshape(node: Node, i: int, whole: Part, depends: set[Node]) -> Part:
    return whole.moved(lambda a: a.reshape(_shape(node.inputs[0])))


def _undo_permute(node: Node, i: int, whole: Part, depends: set[Node]) -> Part:
    inverse = np.argsort(_ints(node.attrs["perm"]))
    return whole.moved(lambda a: np.transpose(a, inverse))


def _undo_concat(node: Node, i: int, whole: Part, depends: set[Node]) -> Part:
    axis = _ints(node.attrs["axis"])[0]
    sizes = [_shape(v)[axis] for v in node.inputs]
    start = sum(sizes[:i])
    index = [slice(None)] * whole.value.ndim
    index[axis] = slice(start, start + sizes[i])
    return whole.moved(lambda a: a[tuple(index)])


def _undo_slice(node: Node, i: int, whole: Part, depends: set[Node]) -> Part:
    axis, start, stop, step = (_ints(node.attrs[k])[0] for k in ("axis", "start", "stop", "step"))
    shape = _shape(node.inputs[0])
    index = [slice(None)] * len(shape)
    index[axis] = slice(start, stop, step)
    value, known = np.zeros(shape, whole.value.dtype), np.zeros(shape, bool)
    value[tuple(index)] = whole.value
    known[tuple(index)] = True if whole.known is None else whole.known
    return Part(value, None if known.all() else known)


def _undo_expand(node: Node, i: int, whole: Part, depends: set[Node]) -> Part:
    shape = _shape(node.inputs[0])
    index: list[int | slice] = [0] * (whole.value.ndim - len(shape))
    index += [slice(0, s) for s in shape]
    return whole.moved(lambda a: a[tuple(index)])


def _undo_neg(node: Node, i: int, whole: Part, depends: set[Node]) -> Part:
    return Part(-whole.value, whole.known)


def _undo_arithmetic(node: Node, i: int, whole: Part, depends: set[Node]) -> Part:
    """The other operand must be numbers, not another tensor."""
    other = node.inputs[1 - i]
    if other.node in depends or any(n.op == "param" for n in topological([other])):
        raise NotInvertibleError(f"{node.op} of two tensors can't be undone")
    if _shape(node.inputs[i]) != whole.value.shape:
        raise NotInvertibleError(f"a broadcast in {node.op} can't be undone")
    known = evaluate_value(other, _no_tensor).astype(np.float64)
    wide = whole.value.astype(np.float64)
    with np.errstate(all="ignore"):
        found = _INVERSE[node.op][i](wide, known)
    if not np.isfinite(found[np.isfinite(wide)]).all():
        raise NotInvertibleError(f"{node.op} with 0 can't be undone")
    return Part(found.astype(whole.value.dtype), whole.known)


def _no_tensor(name: str) -> np.ndarray:
    raise AssertionError(f"{name} is no constant")


def _ints(value: object) -> list[int]:
    items: Sequence[object] = value if isinstance(value, (tuple, list)) else [value]
    return [int(str(v)) for v in items]


_Inverse = Callable[[np.ndarray, np.ndarray], np.ndarray]
# y = x op c for the left operand, y = c op x for the right one: x from y and c.
_INVERSE: dict[str, tuple[_Inverse, _Inverse]] = {
    "add": (lambda y, c: y - c, lambda y, c: y - c),
    "sub": (lambda y, c: y + c, lambda y, c: c - y),
    "mul": (lambda y, c: y / c, lambda y, c: y / c),
    "div": (lambda y, c: y * c, lambda y, c: c / y),
}
_UNDO: dict[str, Callable[[Node, int, Part, set[Node]], Part]] = {
    "reshape": _undo_reshape,
    "permute": _undo_permute,
    "concat": _undo_concat,
    "slice": _undo_slice,
    "expand": _undo_expand,
    "neg": _undo_neg,
    **dict.fromkeys(_INVERSE, _undo_arithmetic),
}
