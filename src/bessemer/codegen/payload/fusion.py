"""Which values of a payload get memory, and which are computed inside the loops that read them.

Elementwise ops and views are inlined into their readers, so that a chain of them is one loop. A
value gets memory of its own where an op addresses it freely (a factor of a product, a table), where
two loops would compute it twice, or where a loop would compute it again for every element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bessemer.codegen.payload.elementwise import cost
from bessemer.codegen.payload.views import reshape_index, sample
from bessemer.graph.core import Node, Value
from bessemer.graph.dims import Dim
from bessemer.graph.schema import schema_of

VIEWS = ("reshape", "slice", "permute", "expand")
# A value is computed twice rather than stored up to this price, in additions.
_RECOMPUTE_COST = 1
_COST_LIMIT = 1000
# Rows that a symbolic size counts as when loops are compared.
_TYPICAL_ROWS = 64
# Operands that an op reads at places of its own choice; None: all of them.
_ADDRESSED: Mapping[str, Sequence[int] | None] = {
    "project": None,
    "expert_project": None,
    "matmul": None,
    "take": None,
    "gather": (0,),
    "topk": None,
    "cumsum": None,
    "sinkhorn": None,
    "scatter": (1, 2),
    "put": (1, 2),
}
# Among them those that read through an index map, so that any view can be a part of the map.
_MAPPED = ("matmul",)
# Ops that read all their operands in step with their own loops.
_FUSED_READERS = (
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "argmax",
    "concat",
    "pad",
    "constant",
)


def is_splat(node: Node) -> bool:
    """A constant whose elements are all equal: it needs no memory."""
    if node.op != "constant":
        return False
    value = np.asarray(node.attrs["value"])
    return value.size > 0 and value.tobytes() == value.reshape(-1)[:1].tobytes() * value.size


def is_elementwise(node: Node) -> bool:
    return node.op not in ("project", "expert_project") and schema_of(node.op).elementwise


def is_inline(node: Node) -> bool:
    """Ops that can be computed where they are read."""
    return node.op in VIEWS or node.op == "iota" or is_splat(node) or is_elementwise(node)


def has_static_bounds(node: Node) -> bool:
    return not isinstance(node.attrs["start"], Dim) and not isinstance(node.attrs["stop"], Dim)


Site = tuple[Any, int]  # a loop that reads a value, and its number of iterations


@dataclass
class Plan:
    """material: inlinable values that get memory all the same."""

    material: set[Value] = field(default_factory=set)


def plan(nodes: Sequence[Node], outputs: Iterable[Value]) -> Plan:
    """Decide for each value, readers before what they read."""
    found = Plan()
    wanted = set(outputs)
    users: dict[Value, list[tuple[Node, int]]] = {}
    for node in nodes:
        for at, value in enumerate(node.inputs):
            users.setdefault(value, []).append((node, at))
    costs = _costs(nodes)
    sites: dict[Value, set[Site]] = {}
    for node in reversed(nodes):
        if is_inline(node):
            value = node.out
            mine = sites[value] = _sites(value, users.get(value, []), sites, found)
            if value in wanted and node.op in VIEWS:
                mine.add((("output", value), _numel(value)))
            elif value in wanted or _too_dear(value, mine, costs[value]):
                found.material.add(value)
        _require(node, found)
    return found


def _numel(value: Value) -> int:
    total = 1
    for size in value.shape:
        total *= sample(size, _TYPICAL_ROWS)
    return total


def _costs(nodes: Sequence[Node]) -> dict[Value, int]:
    """What computing an inlined value costs per element, nothing stored."""
    costs: dict[Value, int] = {}
    for node in nodes:
        if is_inline(node):
            inside = sum(costs.get(v, 0) for v in node.inputs)
            own = cost(node.op) if is_elementwise(node) else 0
            costs[node.out] = 0 if _views_memory(node) else min(own + inside, _COST_LIMIT)
    return costs


def _sites(
    value: Value,
    users: Sequence[tuple[Node, int]],
    sites: Mapping[Value, set[Site]],
    found: Plan,
) -> set[Site]:
    """The loops that would compute this value if it had no memory."""
    result: set[Site] = set()
    for node, at in users:
        if is_inline(node) and node.out not in found.material:
            result |= sites[node.out]
        elif is_inline(node):
            result.add((node.out, _numel(node.out)))
        elif node.op in ("concat", "pad"):
            result.add(((node, at), _numel(value)))
        elif node.op in ("gather", "scatter", "put"):
            result.add((node, _numel(node.outputs[0])))
        else:
            result.add((node, _numel(value)))
    return result


def _too_dear(value: Value, sites: set[Site], price: int) -> bool:
    if price == 0:
        return False
    if len(sites) > 1 and price > _RECOMPUTE_COST:
        return True
    size = _numel(value)
    return any(iterations > size for _, iterations in sites)


def _views_memory(node: Node) -> bool:
    """Whether a reshape can't be a part of an index expression: what it views needs memory, and it
    is then a view of that.
    """
    if node.op != "reshape":
        return False
    names = [f"d{i}" for i in range(len(node.types[0].shape))]
    return reshape_index(node.inputs[0].shape, node.types[0].shape, names) is None


def _require(node: Node, found: Plan) -> None:
    """Mark the operands of `node` that must be in memory."""
    if node.op in _ADDRESSED:
        positions = _ADDRESSED[node.op]
        for at, value in enumerate(node.inputs):
            if positions is None or at in positions:
                _need_memory(value, node.op in _MAPPED, found)
    elif _views_memory(node) or (node.op == "slice" and not has_static_bounds(node)):
        _need_memory(node.inputs[0], False, found)
    elif not is_inline(node) and node.op not in _FUSED_READERS:
        for value in node.inputs:
            _need_memory(value, False, found)


def _need_memory(value: Value, mapped: bool, found: Plan) -> None:
    """Memory for a value, or for what it is a view of."""
    while value.op in ("reshape", "slice") or (mapped and value.op in ("permute", "expand")):
        value = value.node.inputs[0]
    if is_inline(value.node):
        found.material.add(value)
