"""A call that begins a sequence: positions = 0, 1, ..., T - 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Node, Value, emit
from bessemer.passes.base import RulePass, Uses


@dataclass(frozen=True)
class FromTheStart(RulePass):
    """positions = iota(T)."""

    name: ClassVar[str] = "from_the_start"

    def rule(self, node: Node, uses: Uses) -> Value | None:
        if node.op != "input" or node.attrs["name"] != "positions":
            return None
        (rows,) = node.types[0].shape
        return emit("iota", size=rows, dtype=node.types[0].dtype)
