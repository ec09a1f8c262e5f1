"""Weight panels of every storage format: how 32 rows of a matrix become f32 vectors.

A panel is named by the indices that lead to it in its operand. Float formats store it as
[K][32]; q8_0 as blocks of 32 deep, int8 [32][32] followed by the 32 rows' f16 scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bessemer.artifact.layout import PANEL_ROWS, Q8_DEPTH, Q8_SCALES_AT
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import Operand

# Weight rows per step of the matrix-vector loop: with four vectors a panel this gives eight
# independent chains, as many as two FMA units of four cycles keep busy.
UNROLL = 2

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

    def vectors(self, k: str) -> list[str]:
        """The panel's 32 weights at depth k, as vectors; without scales when quantised."""
        if self.is_quantised:
            return self._quantised(self.fn.div(k, self._depth), self.fn.rem(k, self._depth))
        at = [*self.lead, k]
        return [self._load([*at, self.fn.index(c)], self.operand.element) for c in self.columns]

    @property
    def _depth(self) -> str:
        return self.fn.index(Q8_DEPTH)

    def _load(self, at: list[str], element: str, count: int | None = None) -> str:
        return self.fn.vload(self.name, at, self.operand.type, count or self.lanes, element)

    def _quantised(self, block: str, k: str) -> list[str]:
        """int8 at depth k of a block, as f32."""
        fn, found = self.fn, []
        first = fn.mul(k, fn.index(PANEL_ROWS))
        for column in self.columns:
            at = ", ".join([*self.lead, block, fn.offset(first, column)])
            kind = f"vector<{self.lanes}xi8>"
            bytes_ = fn.op(f"vector.load {self.name}[{at}] : {self.operand.type}, {kind}")
            found.append(fn.op(f"arith.sitofp {bytes_} : {kind} to vector<{self.lanes}xf32>"))
        return found

    def scales(self, block: str) -> list[str]:
        """The rows' scales of a q8_0 block, as f32 vectors."""
        fn, found = self.fn, []
        for column in self.columns:
            at = ", ".join([*self.lead, block, fn.index(Q8_SCALES_AT + 2 * column)])
            kind = f"vector<{2 * self.lanes}xi8>"
            bytes_ = fn.op(f"vector.load {self.name}[{at}] : {self.operand.type}, {kind}")
            half = fn.op(f"vector.bitcast {bytes_} : {kind} to vector<{self.lanes}xf16>")
            found.append(fn.widen(half, "f16", self.lanes))
        return found

    def widen(self, first: str, size: str, store: Callable[[str, int, str], None]) -> None:
        """store(k - first, column, vector) for depths [first, first + size); `first` is a multiple
        of 32.
        """
        fn, zero = self.fn, self.fn.index(0)
        if not self.is_quantised:
            with fn.loop(zero, size) as loop:
                vectors = self.vectors(fn.add(first, loop.iv))
                for column, value in zip(self.columns, vectors, strict=True):
                    store(loop.iv, column, value)
            return
        with fn.loop(zero, size, Q8_DEPTH) as blocks:
            block = fn.div(fn.add(first, blocks.iv), self._depth)
            scales = self.scales(block)
            count = fn.min(fn.sub(size, blocks.iv), self._depth)
            with fn.loop(zero, count) as loop:
                at = fn.add(blocks.iv, loop.iv)
                vectors = self._quantised(block, loop.iv)
                for column, value, scale in zip(self.columns, vectors, scales, strict=True):
                    kind = f"vector<{self.lanes}xf32>"
                    store(at, column, fn.arith("mulf", value, scale, type_=kind))

    def product(self, x: Scalar, depth: int) -> list[str]:
        """The 32 sums of weight * x(k) over k < depth, as vectors. x gives a broadcast vector."""
        if not self.is_quantised:
            return self._sums(x, self.vectors, 0, depth, self.fn.index(0))
        fn, kind = self.fn, f"vector<{self.lanes}xf32>"
        start = [(fn.splat(0.0, self.lanes), kind)] * len(self.columns)
        whole = depth // Q8_DEPTH
        with fn.loop(fn.index(0), fn.index(whole), 1, start) as loop:
            loop.carry(*self._block(x, loop.iv, Q8_DEPTH, loop.args))
        sums = loop.results
        if depth % Q8_DEPTH:
            sums = self._block(x, fn.index(whole), depth % Q8_DEPTH, sums)
        return sums

    def _block(self, x: Scalar, block: str, depth: int, sums: list[str]) -> list[str]:
        """sums + scale * (sum over one block): scales are applied once per block."""
        fn = self.fn
        first = fn.mul(block, self._depth)
        inner = self._sums(x, lambda k: self._quantised(block, k), 0, depth, first)
        scaled = zip(inner, self.scales(block), sums, strict=True)
        return [fn.fma(value, scale, total, self.lanes) for value, scale, total in scaled]

    def _sums(
        self, x: Scalar, weights: Callable[[str], list[str]], start: int, stop: int, base: str
    ) -> list[str]:
        """Sums over k in [start, stop) of weights(k) * x(base + k), UNROLL rows a step."""
        fn, lanes, vectors = self.fn, self.lanes, len(self.columns)
        kind = f"vector<{lanes}xf32>"
        zero = (fn.splat(0.0, lanes), kind)

        def step(k: str, sums: list[str]) -> list[str]:
            factor = x(fn.add(base, k))
            pairs = zip(weights(k), sums, strict=True)
            return [fn.fma(w, factor, total, lanes) for w, total in pairs]

        even = stop - (stop - start) % UNROLL
        carried = [zero] * (vectors * UNROLL)
        with fn.loop(fn.index(start), fn.index(even), UNROLL, carried) as loop:
            now: list[str] = []
            for u in range(UNROLL):
                now += step(fn.offset(loop.iv, u), loop.args[u * vectors : (u + 1) * vectors])
            loop.carry(*now)
        sums = loop.results[:vectors]
        for u in range(1, UNROLL):
            other = loop.results[u * vectors : (u + 1) * vectors]
            sums = [fn.arith("addf", a, b, type_=kind) for a, b in zip(sums, other, strict=True)]
        for k in range(even, stop):
            sums = step(fn.index(k), sums)
        return sums

    def element(self, k: str, row: str) -> str:
        """One weight as an f32 scalar: row `row` of the panel at depth k."""
        fn = self.fn
        if not self.is_quantised:
            value = fn.load(self.name, [*self.lead, k, row], self.operand.type)
            return fn.widen(value, self.operand.element)
        block, inner = fn.div(k, self._depth), fn.rem(k, self._depth)
        at = fn.add(fn.mul(inner, fn.index(PANEL_ROWS)), row)
        byte = fn.load(self.name, [*self.lead, block, at], self.operand.type)
        value = fn.op(f"arith.sitofp {byte} : i8 to f32")
        place = fn.add(fn.index(Q8_SCALES_AT), fn.mul(row, fn.index(2)))
        where = ", ".join([*self.lead, block, place])
        two = fn.op(f"vector.load {self.name}[{where}] : {self.operand.type}, vector<2xi8>")
        half = fn.op(f"vector.bitcast {two} : vector<2xi8> to vector<1xf16>")
        scale = fn.widen(fn.op(f"vector.extract {half}[0] : f16 from vector<1xf16>"), "f16")
        return fn.arith("mulf", value, scale, type_="f32")
