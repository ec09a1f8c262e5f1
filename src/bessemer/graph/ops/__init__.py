"""The op families. Importing this package registers every schema."""

from bessemer.graph.ops import (
    compressed,
    contraction,
    elementwise,
    fused,
    leaves,
    movement,
    reduction,
    rounding,
    streams,
)

__all__ = [
    "compressed",
    "contraction",
    "elementwise",
    "fused",
    "leaves",
    "movement",
    "reduction",
    "rounding",
    "streams",
]
