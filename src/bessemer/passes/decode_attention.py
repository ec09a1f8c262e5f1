"""attention(q[1], k[1], v[1]) of one row: the query heads that share a KV head are computed
together, so that each key and value is read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Node, Value
from bessemer.graph.schema import build_from
from bessemer.passes.base import RulePass, Uses


@dataclass(frozen=True)
class DecodeAttention(RulePass):
    """attention of one row = gqa_decode_attention."""

    name: ClassVar[str] = "decode_attention"

    def rule(self, node: Node, uses: Uses) -> Value | None:
        if node.op != "attention" or node.types[0].shape[:-2] != (1,):
            return None
        return build_from("gqa_decode_attention", node.inputs, node.attrs, node.loc).out
