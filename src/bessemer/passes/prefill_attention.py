"""attention(q[T], k[T], v[T]) of many rows is flash attention: blocks of keys, online softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Node, Value
from bessemer.graph.schema import build_from
from bessemer.passes.base import RulePass, Uses


@dataclass(frozen=True)
class PrefillAttention(RulePass):
    """attention of many rows = flash_attention."""

    name: ClassVar[str] = "prefill_attention"

    def rule(self, node: Node, uses: Uses) -> Value | None:
        if node.op != "attention":
            return None
        return build_from("flash_attention", node.inputs, node.attrs, node.loc).out
