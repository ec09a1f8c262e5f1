"""moe(x, e, s) = sum over j of s[j] * down[e[j]](glu[e[j]](x)): one op for each matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bessemer.graph import Node, Value, emit
from bessemer.passes import views
from bessemer.passes.base import RulePass, Uses


@dataclass(frozen=True)
class Moe(RulePass):
    """moe(x, e, s) = sum_j s[j] * expert_linear(expert_glu(x, e), e)[j]."""

    name: ClassVar[str] = "moe"

    def rule(self, node: Node, uses: Uses) -> Value | None:
        if node.op != "moe":
            return None
        x, experts, scores, gate_up, down, *rest = node.inputs
        biases = iter(rest)
        glu_bias = [next(biases)] if node.attrs["has_gate_up_bias"] else []
        down_bias = [next(biases)] if node.attrs["has_down_bias"] else []
        gated = {k: node.attrs[k] for k in ("activation", "alpha", "limit")}
        hidden = emit(
            "expert_linear",
            *(x, experts, gate_up, *glu_bias),
            gated=True,
            has_bias=bool(glu_bias),
            loc=node.loc,
            **gated,
        )
        each = emit(
            "expert_linear",
            hidden,
            experts,
            down,
            *down_bias,
            has_bias=bool(down_bias),
            loc=node.loc,
        )
        weighted = emit("mul", each, views.reshape(scores, (*scores.shape, 1)), loc=node.loc)
        return emit("reduce_sum", weighted, axes=(-2,))
