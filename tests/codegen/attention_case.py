"""Attention layers of many shapes, and caches that the update kernel filled for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import bessemer.codegen.kernels  # noqa: F401
from bessemer.artifact.layout import KVLayer
from bessemer.codegen.group import ROWS, GroupSpec, Operand
from bessemer.graph.ops.fused import attend
from tests.codegen.kernel_harness import Cache, codegen_target, row_operand


@dataclass(frozen=True)
class Case:
    """One attention layer."""

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    kv: str = "f32"
    lanes: int = 8
    registers: int = 16
    chunk: int = 64

    @property
    def attrs(self) -> dict[str, Any]:
        return {
            "kv_heads": self.kv_heads,
            "key_width": self.key_width,
            "value_width": self.value_width,
            "scale": self.key_width**-0.5,
            "softcap": self.softcap,
            "has_sinks": self.sinks,
        }

    @property
    def sink_operands(self) -> list[Operand]:
        return [Operand("f32", (self.heads,))] if self.sinks else []

    def inputs(self, rows: int | str = ROWS) -> list[Operand]:
        """q, positions, slots, state."""
        return [
            row_operand("f32", (self.heads, self.key_width), rows=rows),
            Operand("i64", (rows,)),
            Operand("i64", (rows,)),
            Operand("i8", (ROWS,), role="state"),
        ]

    def flash(self) -> GroupSpec:
        out = row_operand("f32", (self.heads, self.value_width))
        operands = (*self.inputs(), *self.sink_operands, out)
        literals = ("entry", "window")
        return GroupSpec("flash_attention", operands, literals, tuple(self.attrs.items()))

    def layer(self) -> KVLayer:
        return KVLayer(0, self.kv_heads, self.key_width, self.value_width, self.window)


CASES = {
    "mha": Case(2, 2, 8, 8, kv="f16"),
    "group 3": Case(9, 3, 64, 64),
    "group 4, wide values": Case(4, 1, 40, 80, kv="f16", lanes=4),
    "group 8": Case(16, 2, 16, 16, lanes=4),
    "more query heads than a unit holds": Case(50, 1, 16, 8),
    "odd widths": Case(3, 1, 20, 12, kv="f16"),
    "mla": Case(2, 2, 192, 128),
    "softcap": Case(4, 2, 96, 96, softcap=1.5, kv="f16"),
    "sinks": Case(6, 2, 64, 64, sinks=True),
    "window": Case(3, 1, 128, 128, window=40, kv="f16"),
    "small window, sinks": Case(4, 2, 16, 24, window=5, sinks=True),
    "32 registers": Case(4, 4, 80, 80, lanes=4, registers=32),
    "16 lanes": Case(6, 2, 40, 40, lanes=16, registers=32, softcap=2.0, window=33),
}


class Filled:
    """A cache for a case, filled row by row with random keys and values."""

    def __init__(self, case: Case, seed: int = 0, capacity: int = 512) -> None:
        self.case = case
        self.rng = np.random.default_rng(seed)
        self.target = replace(codegen_target(case.lanes, case.kv, case.registers), chunk=case.chunk)
        self.cache = Cache([case.layer()], self.target, capacity=capacity, chunk=case.chunk)
        self.sinks = self.rng.standard_normal(case.heads).astype(np.float32) * 2
        self.at = 0

    @property
    def sink_arrays(self) -> list[np.ndarray]:
        return [self.sinks] if self.case.sinks else []

    def rows(self, n: int, heads: int, width: int, scale: float = 1.0) -> np.ndarray:
        return (self.rng.standard_normal((n, heads, width)) * scale).astype(np.float32)

    def queries(self, n: int) -> np.ndarray:
        """Large enough that the softmax is far from uniform."""
        return self.rows(n, self.case.heads, self.case.key_width, 3.0)

    def append(self, n: int) -> np.ndarray:
        """Append n rows to the cache; returns their positions."""
        case = self.case
        positions = np.arange(self.at, self.at + n)
        k = self.rows(n, case.kv_heads, case.key_width)
        v = self.rows(n, case.kv_heads, case.value_width)
        self.cache.append(0, k, v, positions)
        self.at += n
        return positions

    def expected(self, q: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The reference over what the cache holds."""
        k, v, key_at = self.cache.held[0]
        allowed = key_at[None] <= positions[:, None]
        if self.case.window:
            allowed &= key_at[None] > positions[:, None] - self.case.window
        sinks = self.sinks if self.case.sinks else None
        return attend(q, k, v, allowed, self.case.attrs, sinks)
