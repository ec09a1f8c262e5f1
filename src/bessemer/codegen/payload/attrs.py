"""Attributes of nodes, as the numbers that they are."""

from __future__ import annotations

from typing import Any, cast

from bessemer.graph.core import Node


def integer(node: Node, name: str) -> int:
    return int(cast(Any, node.attrs[name]))


def number(node: Node, name: str) -> float:
    return float(cast(Any, node.attrs[name]))


def integers(node: Node, name: str) -> tuple[int, ...]:
    return tuple(int(n) for n in cast(Any, node.attrs[name]))


def axis_of(node: Node, rank: int) -> int:
    """The attribute `axis`, counted from the front."""
    return integer(node, "axis") % rank
