"""Weight panels of every storage format: how 32 rows of a matrix become vectors.

A panel is named by the indices that lead to it in its operand. Float formats store it as [K][32],
and are widened to f32. q8_0 has blocks of 32 deep, int8 [16][32][2] followed by the 32 rows' f16
scales; it is multiplied as integers, see `integer_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bessemer.artifact.layout import (
    PANEL_ROWS,
    Q8_DEPTH,
    Q8_PAIR,
    Q8_SCALES_AT,
    STORAGE_BYTES,
)
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, Operand
from bessemer.codegen.kernels.integer_rows import IntegerRows, pair_dot
from bessemer.codegen.kernels.vectors import vector_type

# Weight rows per step of the matrix-vector loop: with four vectors a panel this gives eight
# independent chains, as many as two FMA units of four cycles keep busy.
UNROLL = 2
# Pairs of depths per step of the integer loop, whose sums need no more than their four chains.
PAIR_UNROLL = 4

# How far ahead of a matrix-vector product its weights are fetched: 16 lines of f16 and bf16, and 24
# of int8, which passes faster. On a Zen 3 whole decode steps are 10 to 14 % faster than by what the
# processor fetches by itself; eight lines more or less cost 1 to 5 % of that. f32 panels are read
# faster without (by 13 % with two threads, 23 % with one).
AHEAD_BYTES = 1024
INTEGER_AHEAD_BYTES = 1536

Scalar = Callable[[str], str]


@dataclass(frozen=True)
class Panel:
    """One panel: the operand's name and description, and the indices before its depth."""

    fn: Fn
    lanes: int
    name: str
    operand: Operand
    lead: tuple[str, ...]

    @property
    def is_quantised(self) -> bool:
        return self.operand.element == "q8_0"

    @property
    def columns(self) -> range:
        """First row of each vector of the panel."""
        return range(0, PANEL_ROWS, self.lanes)

    @property
    def blocks(self) -> int:
        """Blocks of a quantised panel's depth."""
        count = self.operand.shape[-2]
        assert isinstance(count, int)
        return count

    def fetch(self, *at: str, near: bool = False) -> None:
        """Have the processor fetch the line at these indices, which may be past the panel's end:
        into L1 when it is needed soon, else into L2.
        """
        where = ", ".join([*self.lead, *at])
        self.fn.line(
            f"memref.prefetch {self.name}[{where}], read, locality<{3 if near else 2}>, data : "
            f"{self.operand.type}"
        )

    def vectors(self, k: str) -> list[str]:
        """The panel's 32 weights at depth k, as f32 vectors; of the float formats."""
        fn, type_, element = self.fn, self.operand.type, self.operand.element
        return [
            fn.vload(self.name, [*self.lead, k, fn.index(c)], type_, self.lanes, element)
            for c in self.columns
        ]

    @property
    def _depth(self) -> str:
        return self.fn.index(Q8_DEPTH)

    def pair_vector(self, block: str, pair: str, column: str) -> str:
        """The int8 weights at depths 2 * pair and 2 * pair + 1 of a q8_0 block, side by side for
        each row from `column` on, as a vector of 2 * lanes i16.
        """
        fn, count = self.fn, Q8_PAIR * self.lanes
        row = fn.add(fn.mul(pair, fn.index(PANEL_ROWS)), column)
        at = ", ".join([*self.lead, block, fn.mul(row, fn.index(Q8_PAIR))])
        kind = f"vector<{count}xi8>"
        bytes_ = fn.op(f"vector.load {self.name}[{at}] : {self.operand.type}, {kind}")
        return fn.op(f"arith.extsi {bytes_} : {kind} to vector<{count}xi16>")

    def scale_vector(self, block: str, column: str) -> str:
        """The scales of the rows from `column` on of a q8_0 block, as an f32 vector."""
        fn = self.fn
        place = fn.offset(fn.mul(column, fn.index(2)), Q8_SCALES_AT)
        at = ", ".join([*self.lead, block, place])
        kind = f"vector<{2 * self.lanes}xi8>"
        bytes_ = fn.op(f"vector.load {self.name}[{at}] : {self.operand.type}, {kind}")
        half = fn.op(f"vector.bitcast {bytes_} : {kind} to vector<{self.lanes}xf16>")
        return fn.widen(half, "f16", self.lanes)

    def pairs(self, block: str, pair: str) -> list[str]:
        """`pair_vector` of all rows."""
        return [self.pair_vector(block, pair, self.fn.index(c)) for c in self.columns]

    def scales(self, block: str) -> list[str]:
        """`scale_vector` of all rows."""
        return [self.scale_vector(block, self.fn.index(c)) for c in self.columns]

    def widen(self, first: str, size: str, store: Callable[[str, int, str], None]) -> None:
        """store(k - first, column, vector) for depths [first, first + size)."""
        fn = self.fn
        with fn.loop(fn.index(0), size) as loop:
            vectors = self.vectors(fn.add(first, loop.iv))
            for column, value in zip(self.columns, vectors, strict=True):
                store(loop.iv, column, value)

    def integer_product(
        self, target: CodegenTarget, rows: IntegerRows, place: list[str]
    ) -> list[str]:
        """The 32 sums of weight * x over one row of integers, as f32 vectors. The sums of a block
        are exact; its scales are applied once.
        """
        fn, lanes = self.fn, self.lanes
        kind, whole = vector_type(lanes), vector_type(lanes, "i32")
        start = [(fn.splat(0.0, lanes), kind)] * len(self.columns)
        with fn.loop(fn.index(0), fn.index(self.blocks), 1, start) as loop:
            x_scale = rows.scale(fn, lanes, place, loop.iv)
            sums = self._integer_block(target, rows, place, loop.iv)
            totals = []
            for total, value, scale in zip(loop.args, sums, self.scales(loop.iv), strict=True):
                value = fn.op(f"arith.sitofp {value} : {whole} to {kind}")
                scale = fn.arith("mulf", x_scale, scale, type_=kind)
                totals.append(fn.fma(value, scale, total, lanes))
            loop.carry(*totals)
        return loop.results

    def _integer_block(
        self, target: CodegenTarget, rows: IntegerRows, place: list[str], block: str
    ) -> list[str]:
        fn, kind = self.fn, vector_type(self.lanes, "i32")
        zero = fn.constant(f"arith.constant dense<0> : {kind}")
        first = fn.mul(block, fn.index(Q8_DEPTH // Q8_PAIR))
        start = [(zero, kind)] * len(self.columns)
        with fn.loop(fn.index(0), fn.index(Q8_DEPTH // Q8_PAIR), PAIR_UNROLL, start) as loop:
            sums = list(loop.args)
            for u in range(PAIR_UNROLL):
                pair = fn.offset(loop.iv, u)
                at = fn.mul(pair, fn.index(Q8_PAIR * PANEL_ROWS))
                self.fetch(block, fn.offset(at, INTEGER_AHEAD_BYTES), near=True)
                x = rows.pair(fn, self.lanes, place, fn.add(first, pair))
                terms = zip(sums, self.pairs(block, pair), strict=True)
                sums = [pair_dot(fn, target, total, w, x) for total, w in terms]
            loop.carry(*sums)
        return loop.results

    def product(self, x: Scalar, depth: int, first: str | None = None) -> list[str]:
        """The 32 sums of weight * x(k) over `depth` depths from `first` (0), as vectors, UNROLL
        depths a step. x gives a broadcast vector.
        """
        fn, lanes, vectors = self.fn, self.lanes, len(self.columns)
        kind = f"vector<{lanes}xf32>"
        zero = (fn.splat(0.0, lanes), kind)
        row_bytes = PANEL_ROWS * STORAGE_BYTES[self.operand.element]
        ahead = AHEAD_BYTES // row_bytes if self.operand.element != "f32" else 0

        def step(k: str, sums: list[str]) -> list[str]:
            k = k if first is None else fn.add(first, k)
            if ahead:
                self.fetch(fn.offset(k, ahead), fn.index(0), near=True)
            factor = x(k)
            pairs = zip(self.vectors(k), sums, strict=True)
            return [fn.fma(w, factor, total, lanes) for w, total in pairs]

        even = depth - depth % UNROLL
        carried = [zero] * (vectors * UNROLL)
        with fn.loop(fn.index(0), fn.index(even), UNROLL, carried) as loop:
            now: list[str] = []
            for u in range(UNROLL):
                now += step(fn.offset(loop.iv, u), loop.args[u * vectors : (u + 1) * vectors])
            loop.carry(*now)
        sums = loop.results[:vectors]
        for u in range(1, UNROLL):
            other = loop.results[u * vectors : (u + 1) * vectors]
            sums = [fn.arith("addf", a, b, type_=kind) for a, b in zip(sums, other, strict=True)]
        for k in range(even, depth):
            sums = step(fn.index(k), sums)
        return sums

    def element(self, k: str, row: str) -> str:
        """One weight as an f32 scalar: row `row` of the panel at depth k."""
        fn = self.fn
        if not self.is_quantised:
            value = fn.load(self.name, [*self.lead, k, row], self.operand.type)
            return fn.widen(value, self.operand.element)
        block, inner = fn.div(k, self._depth), fn.rem(k, self._depth)
        two = fn.index(Q8_PAIR)
        pair = fn.add(fn.mul(fn.div(inner, two), fn.index(PANEL_ROWS)), row)
        at = fn.add(fn.mul(pair, two), fn.rem(inner, two))
        byte = fn.load(self.name, [*self.lead, block, at], self.operand.type)
        value = fn.op(f"arith.sitofp {byte} : i8 to f32")
        place = fn.add(fn.index(Q8_SCALES_AT), fn.mul(row, fn.index(2)))
        where = ", ".join([*self.lead, block, place])
        two = fn.op(f"vector.load {self.name}[{where}] : {self.operand.type}, vector<2xi8>")
        half = fn.op(f"vector.bitcast {two} : vector<2xi8> to vector<1xf16>")
        scale = fn.widen(fn.op(f"vector.extract {half}[0] : f16 from vector<1xf16>"), "f16")
        return fn.arith("mulf", value, scale, type_="f32")
