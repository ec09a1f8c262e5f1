"""The op families. Importing this package registers every schema."""

from bessemer.graph.ops import contraction, elementwise, fused, leaves, movement, reduction

__all__ = ["contraction", "elementwise", "fused", "leaves", "movement", "reduction"]
