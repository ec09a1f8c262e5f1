"""Attributes and sizes with the types that the op schemas promise."""

from __future__ import annotations

from bessemer.graph import Dim, Node, Size


def int_of(node: Node, name: str) -> int:
    """An attribute that is a fixed number: an axis, a step, a count. Raises TypeError."""
    return fixed(size_of(node, name))


def size_of(node: Node, name: str) -> Size:
    """An attribute that is a size, perhaps a symbolic one. Raises TypeError."""
    value = node.attrs[name]
    if isinstance(value, (int, Dim)):
        return value
    raise TypeError(f"{node.op}: {name} is {value!r}, not a size")


def ints_of(node: Node, name: str) -> tuple[int, ...]:
    """An attribute that is a list of numbers: axes, a permutation. Raises TypeError."""
    value = node.attrs[name]
    if isinstance(value, tuple):
        return value
    raise TypeError(f"{node.op}: {name} is {value!r}, not a list")


def axes_of(node: Node) -> tuple[int, ...]:
    """The negative axes that an op works along: its `axes`, its `axis`, or the last one."""
    if "axes" in node.attrs:
        return ints_of(node, "axes")
    return (int_of(node, "axis"),) if "axis" in node.attrs else (-1,)


def float_of(node: Node, name: str) -> float:
    """An attribute that is a number. Raises TypeError."""
    value = node.attrs[name]
    if isinstance(value, (int, float)):
        return float(value)
    raise TypeError(f"{node.op}: {name} is {value!r}, not a number")


def fixed(size: Size) -> int:
    """A size that is a number. Raises TypeError on a symbolic one."""
    if isinstance(size, Dim):
        raise TypeError(f"{size} is not a fixed size")
    return size
