"""Helpers on views: building them in canonical form, and reading chains of them.

The builders return their operand when there is nothing to do, and merge with a view below.
"""

from __future__ import annotations

from collections.abc import Sequence

from bessemer.graph import Dim, Shape, Size, Value, emit
from bessemer.graph.dims import product
from bessemer.passes.attributes import int_of, ints_of

VIEWS = frozenset({"reshape", "permute", "expand", "slice"})


def reshape(x: Value, shape: Sequence[Size]) -> Value:
    """x in another shape; a chain of reshapes is one."""
    shape = tuple(shape)
    while x.op == "reshape":
        x = x.node.inputs[0]
    return x if x.shape == shape else emit("reshape", x, shape=shape)


def permute(x: Value, perm: Sequence[int]) -> Value:
    """x with its axes in another order; a chain of permutes is one."""
    perm = tuple(perm)
    if x.op == "permute":
        inner = perm_of(x)
        x, perm = x.node.inputs[0], tuple(inner[p] for p in perm)
    return x if perm == tuple(range(len(perm))) else emit("permute", x, perm=perm)


def slice_last(x: Value, start: int, stop: int) -> Value:
    """x[..., start:stop]; a slice of a slice is one."""
    if x.op == "slice" and x.node.attrs["axis"] == -1 and x.node.attrs["step"] == 1:
        base = x.node.attrs["start"]
        if isinstance(base, int):
            return slice_last(x.node.inputs[0], base + start, base + stop)
    if (start, stop) == (0, x.shape[-1]):
        return x
    return emit("slice", x, axis=-1, start=start, stop=stop)


def concat(parts: Sequence[Value], axis: int) -> Value:
    """The parts along a negative axis; a single part is itself."""
    return parts[0] if len(parts) == 1 else emit("concat", *parts, axis=axis)


def perm_of(x: Value) -> tuple[int, ...]:
    """The permutation of a permute."""
    return ints_of(x.node, "perm")


def inverse(perm: Sequence[int]) -> tuple[int, ...]:
    order = [0] * len(perm)
    for to, source in enumerate(perm):
        order[source] = to
    return tuple(order)


def without_units(shape: Shape) -> Shape:
    """The sizes that are not 1."""
    return tuple(s for s in shape if s != 1)


def moves_only_units(shape: Shape, perm: Sequence[int]) -> bool:
    """Whether the axes longer than 1 keep their order, so that the permute is a reshape."""
    moved = [p for p in perm if shape[p] != 1]
    return moved == sorted(moved)


def full_rank(x: Value, rank: int) -> Value:
    """x with leading axes of one, as broadcasting to `rank` sees it."""
    return reshape(x, (1,) * (rank - len(x.shape)) + x.shape)


def reshape_groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]] | None:
    """The smallest groups of axes that a reshape maps to each other, in order. `before` has no axis
    of one; those of `after` belong to the group in front, as repeated heads have it: [H, 1, T, D].
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before):
        inside, outside = [i], list[int]()
        i += 1
        while True:
            have = product(tuple(before[k] for k in inside))
            got = product(tuple(after[k] for k in outside))
            if have == got:
                break
            if _estimate(got) < _estimate(have) and j < len(after):
                outside.append(j)
                j += 1
            elif i < len(before):
                inside.append(i)
                i += 1
            else:
                return None
        while j < len(after) and after[j] == 1:
            outside.append(j)
            j += 1
        groups.append((inside, outside))
    return groups if j == len(after) and groups else None


def _estimate(size: Size) -> int:
    """A number to order sizes by: every symbol stands for a large one."""
    return (
        size.evaluate(dict.fromkeys((n for n, _ in size.terms), 1 << 40))
        if isinstance(size, Dim)
        else size
    )


def is_last_slice(x: Value) -> bool:
    """Whether x is a slice of the last axis with step 1 and fixed bounds."""
    attrs = x.node.attrs
    return (
        x.op == "slice"
        and attrs["axis"] == -1
        and attrs["step"] == 1
        and isinstance(attrs["start"], int)
        and isinstance(attrs["stop"], int)
    )


def bounds(x: Value) -> tuple[int, int]:
    """Start and stop of a slice with fixed bounds."""
    return int_of(x.node, "start"), int_of(x.node, "stop")
