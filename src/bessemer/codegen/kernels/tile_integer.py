"""The register tile of quantised weights: rows of 16-bit integers times one 32-row weight panel.

As `tile`, C[rows, 32] = X[rows, K] @ panel.T with the panel taken in blocks of K, each widened once
and used by every tile of rows; but the sums of a block of 32 depths are exact integers, and meet
C in f32 by the scales of the rows and of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bessemer.artifact.layout import PANEL_ROWS, Q8_DEPTH, Q8_PAIR, align
from bessemer.codegen.emit import Fn, memref_type
from bessemer.codegen.group import CodegenTarget
from bessemer.codegen.kernels.integer_rows import IntegerRows, pair_dot
from bessemer.codegen.kernels.panel import Panel
from bessemer.codegen.kernels.tile import (
    PRODUCT_TYPE,
    rows_at,
    scratch_view,
    tile_shape,
)
from bessemer.codegen.kernels.vectors import Array, vector_type

# Blocks of weights that are widened at a time: 16 KiB of i16 for half a panel, half of a 32 KiB L1;
# C's tile is fetched and stored for each block in any case.
BLOCKS = 8
PAIRS = Q8_DEPTH // Q8_PAIR


def _scales_at() -> int:
    """Bytes of the widened weights, behind which their scales lie."""
    return 2 * BLOCKS * Q8_DEPTH * PANEL_ROWS


def weights_bytes() -> int:
    """Thread scratch of the widened weights and their scales."""
    return align(_scales_at() + 4 * BLOCKS * PANEL_ROWS)


@dataclass(frozen=True)
class IntegerTile:
    """weights: i16 [column blocks][pairs of BLOCKS][columns * 2], scales: f32 [BLOCKS][32], both of
    the blocks at hand.
    """

    fn: Fn
    target: CodegenTarget
    rows: IntegerRows
    weights: Array
    scales: Array

    @staticmethod
    def open(fn: Fn, target: CodegenTarget, rows: IntegerRows, offset: int = 0) -> IntegerTile:
        """A tile whose widened weights live at `offset` of the thread's scratch, in no more than
        `weights_bytes()`.
        """
        columns = tile_shape(target).vectors * target.lanes
        shape = (PANEL_ROWS // columns, BLOCKS * PAIRS, columns * Q8_PAIR)
        weights, scales = memref_type(shape, "i16"), memref_type((BLOCKS, PANEL_ROWS), "f32")
        return IntegerTile(
            fn,
            target,
            rows,
            Array(scratch_view(fn, offset, weights), weights, "i16"),
            Array(scratch_view(fn, offset + _scales_at(), scales), scales),
        )

    @property
    def columns(self) -> int:
        return tile_shape(self.target).vectors * self.target.lanes

    def block_product(
        self,
        panel: Panel,
        rows: str,
        product: str,
        row_index: Callable[[str], str] | None = None,
    ) -> None:
        """C[0:rows] = X @ panel.T into `product`, a memref<? x 32 x f32> of padded rows.

        row_index(m) gives the number of row m of x; None: m.
        """
        fn = self.fn
        total = fn.index(panel.blocks)
        self._clear(product, rows)
        with fn.loop(fn.index(0), total, BLOCKS) as k_loop:
            count = fn.min(fn.index(BLOCKS), fn.sub(total, k_loop.iv))
            self._widen(panel, k_loop.iv, count)
            # Blocks are outside rows: C of a tile stays in memory, where LLVM would otherwise also
            # keep it on the stack from one block to the next.
            with (
                fn.loop(fn.index(0), count) as block,
                fn.loop(fn.index(0), rows, tile_shape(self.target).rows) as m_loop,
            ):
                at = self._places(m_loop.iv, rows, row_index)
                k_block = fn.add(k_loop.iv, block.iv)
                with fn.loop(fn.index(0), fn.index(PANEL_ROWS // self.columns)) as n_loop:
                    sums = self._sums(at, n_loop.iv, block.iv, k_block)
                    place = (m_loop.iv, n_loop.iv, block.iv)
                    self._accumulate(sums, at, place, k_block, product)

    def _places(self, m: str, rows: str, row_index: Callable[[str], str] | None) -> list[list[str]]:
        """Where the tile's rows of x lie; those past the end do not matter."""
        if row_index is None:
            return self.rows.places(self.fn, m)
        wanted = rows_at(self.fn, self.target, m, rows, lambda r: [row_index(r)])
        return [self.rows.place(self.fn, row) for (row,) in wanted]

    def _clear(self, product: str, rows: str) -> None:
        """Zeros in C, and in the rows that fill up its last tile."""
        fn, lanes = self.fn, self.target.lanes
        step = tile_shape(self.target).rows
        with fn.loop(fn.index(0), rows, step) as m_loop:
            for r in range(step):
                for column in range(0, PANEL_ROWS, lanes):
                    at = [fn.offset(m_loop.iv, r), fn.index(column)]
                    fn.vstore(fn.splat(0.0, lanes), product, at, PRODUCT_TYPE, lanes)

    def _widen(self, panel: Panel, first: str, count: str) -> None:
        """The int8 weights and f16 scales of `count` blocks, into scratch."""
        fn, lanes = self.fn, self.target.lanes
        kind = vector_type(2 * lanes, "i16")
        with fn.loop(fn.index(0), count) as block:
            of = fn.add(first, block.iv)
            for column, value in zip(panel.columns, panel.scales(of), strict=True):
                self.scales.vstore(fn, value, lanes, block.iv, fn.index(column))
            with fn.loop(fn.index(0), fn.index(PAIRS)) as pair:
                to = fn.add(fn.mul(block.iv, fn.index(PAIRS)), pair.iv)
                for column, value in zip(panel.columns, panel.pairs(of, pair.iv), strict=True):
                    part, inner = divmod(column, self.columns)
                    at = ", ".join([fn.index(part), to, fn.index(Q8_PAIR * inner)])
                    fn.line(
                        f"vector.store {value}, {self.weights.name}[{at}] : "
                        f"{self.weights.type}, {kind}"
                    )

    def _sums(self, at: list[list[str]], part: str, block: str, k_block: str) -> list[str]:
        """Integer sums over one block: rows x vectors of them, rows first."""
        fn, lanes = self.fn, self.target.lanes
        vectors, kind = tile_shape(self.target).vectors, vector_type(lanes, "i32")
        zero = fn.constant(f"arith.constant dense<0> : {kind}")
        start = [(zero, kind)] * (len(at) * vectors)
        first_w, first_x = (fn.mul(b, fn.index(PAIRS)) for b in (block, k_block))
        # One pair a turn: of several, LLVM would add up the products before the sums, and spill.
        with fn.loop(fn.index(0), fn.index(PAIRS), 1, start) as loop:
            weights = self._weights(part, fn.add(first_w, loop.iv))
            pair = fn.add(first_x, loop.iv)
            sums = []
            for r, row in enumerate(at):
                x = self.rows.pair(fn, lanes, row, pair)
                for v, w in enumerate(weights):
                    sums.append(pair_dot(fn, self.target, loop.args[r * vectors + v], w, x))
            loop.carry(*sums)
        return loop.results

    def _weights(self, part: str, pair: str) -> list[str]:
        fn, step = self.fn, Q8_PAIR * self.target.lanes
        kind = vector_type(step, "i16")
        found = []
        for v in range(tile_shape(self.target).vectors):
            at = ", ".join([part, pair, fn.index(v * step)])
            found.append(
                fn.op(f"vector.load {self.weights.name}[{at}] : {self.weights.type}, {kind}")
            )
        return found

    def _accumulate(
        self,
        sums: list[str],
        at: list[list[str]],
        place: tuple[str, str, str],
        k_block: str,
        product: str,
    ) -> None:
        """C += scale of the row * scale of the weight * sum"""
        fn, lanes = self.fn, self.target.lanes
        m, part, block = place
        kind, column = vector_type(lanes), fn.mul(part, fn.index(self.columns))
        vectors = tile_shape(self.target).vectors
        columns = [fn.offset(column, v * lanes) for v in range(vectors)]
        scales = [self.scales.vload(fn, lanes, block, c) for c in columns]
        for r, row in enumerate(at):
            x_scale = self.rows.scale(fn, lanes, row, k_block)
            for v, w_scale in enumerate(scales):
                to = [fn.offset(m, r), columns[v]]
                held = fn.vload(product, to, PRODUCT_TYPE, lanes)
                whole = sums[r * vectors + v]
                value = fn.op(f"arith.sitofp {whole} : {vector_type(lanes, 'i32')} to {kind}")
                scale = fn.arith("mulf", x_scale, w_scale, type_=kind)
                fn.vstore(fn.fma(value, scale, held, lanes), product, to, PRODUCT_TYPE, lanes)
