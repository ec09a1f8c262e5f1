"""The table of the ops that have a loop of their own."""

from __future__ import annotations

from collections.abc import Callable

from bessemer.codegen.payload import contraction, movement, reduction, rounding
from bessemer.codegen.payload.builder import Builder
from bessemer.graph.core import Node

LOWERINGS: dict[str, Callable[[Builder, Node], None]] = {
    "reduce_sum": reduction.reduce,
    "reduce_max": reduction.reduce,
    "reduce_min": reduction.reduce,
    "reduce_prod": reduction.reduce,
    "argmax": reduction.argmax,
    "topk": reduction.topk,
    "cumsum": reduction.cumsum,
    "sinkhorn": reduction.sinkhorn,
    "round_trip": rounding.round_trip,
    "concat": movement.concat,
    "pad": movement.pad,
    "take": movement.take,
    "gather": movement.gather,
    "scatter": movement.scatter,
    "put": movement.put,
    "matmul": contraction.matmul,
    "project": contraction.project,
    "expert_project": contraction.expert_project,
}
