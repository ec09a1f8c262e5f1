"""The register tile of quantised weights: rows of 16-bit integers times one 32-row weight panel.

As `tile`, C[rows, 32] = X[rows, K] @ panel.T; but the sums of a block of 32 depths are exact
integers, and meet C in f32 by the scales of the rows and of the weights. Loads widen the weights to
16 bits, beside the products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bessemer.artifact.layout import PANEL_ROWS, Q8_DEPTH, Q8_PAIR
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget
from bessemer.codegen.kernels.integer_rows import IntegerRows, pair_dot
from bessemer.codegen.kernels.panel import Panel
from bessemer.codegen.kernels.tile import (
    PRODUCT_TYPE,
    TileShape,
    rows_at,
    rows_by_shape,
    tile_shape,
)
from bessemer.codegen.kernels.vectors import vector_type

PAIRS = Q8_DEPTH // Q8_PAIR


@dataclass(frozen=True)
class IntegerTile:
    """The parts of a block product that stay the same for a function."""

    fn: Fn
    target: CodegenTarget
    rows: IntegerRows

    def block_product(
        self,
        panel: Panel,
        rows: str,
        product: str,
        row_index: Callable[[str], str] | None = None,
        start: str | None = None,
    ) -> None:
        """C[0:rows] = X @ panel.T into `product`, a memref<? x 32 x f32> of padded rows.

        row_index(m) gives the number of row m of x; None: m, or m + start with `start` at the
        beginning of a tile.
        """
        fn = self.fn
        self._clear(product, rows)
        split = rows_by_shape(fn, self.target, rows)
        # Blocks are outside rows: C of a tile stays in memory, where LLVM would otherwise also
        # keep it on the stack from one block to the next.
        with fn.loop(fn.index(0), fn.index(panel.blocks)) as block:
            for shape, begin, end in split:
                with fn.loop(begin, end, shape.rows) as m_loop:
                    if row_index is None:
                        row = m_loop.iv if start is None else fn.add(start, m_loop.iv)
                        at = self._places(shape, row)
                    else:
                        at = self._gathered(shape, m_loop.iv, rows, row_index)
                    columns = shape.vectors * self.target.lanes
                    with fn.loop(fn.index(0), fn.index(PANEL_ROWS), columns) as n_loop:
                        sums = self._sums(shape, panel, at, n_loop.iv, block.iv)
                        place = (m_loop.iv, n_loop.iv, block.iv)
                        self._accumulate(shape, panel, sums, at, place, product)

    def _places(self, shape: TileShape, row: str) -> list[list[str]]:
        """Where the rows of x from `row` on lie; those of a large tile are a group."""
        if shape == tile_shape(self.target):
            return self.rows.places(self.fn, row)
        return [self.rows.place(self.fn, self.fn.offset(row, r)) for r in range(shape.rows)]

    def _gathered(
        self, shape: TileShape, m: str, rows: str, row_index: Callable[[str], str]
    ) -> list[list[str]]:
        """Where the tile's rows of x lie; those past the end do not matter."""
        wanted = rows_at(self.fn, shape.rows, m, rows, lambda r: [row_index(r)])
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

    def _sums(
        self, shape: TileShape, panel: Panel, at: list[list[str]], column: str, block: str
    ) -> list[str]:
        """Integer sums over one block: rows x vectors of them, rows first."""
        fn, lanes = self.fn, self.target.lanes
        vectors, kind = shape.vectors, vector_type(lanes, "i32")
        zero = fn.constant(f"arith.constant dense<0> : {kind}")
        start = [(zero, kind)] * (len(at) * vectors)
        first_x = fn.mul(block, fn.index(PAIRS))
        # One pair a turn: of several, LLVM would add up the products before the sums, and spill.
        with fn.loop(fn.index(0), fn.index(PAIRS), 1, start) as loop:
            weights = [
                panel.pair_vector(block, loop.iv, fn.offset(column, v * lanes))
                for v in range(vectors)
            ]
            pair = fn.add(first_x, loop.iv)
            sums = []
            for r, row in enumerate(at):
                x = self.rows.pair(fn, lanes, row, pair)
                for v, w in enumerate(weights):
                    sums.append(pair_dot(fn, self.target, loop.args[r * vectors + v], w, x))
            loop.carry(*sums)
        return loop.results

    def _accumulate(
        self,
        shape: TileShape,
        panel: Panel,
        sums: list[str],
        at: list[list[str]],
        place: tuple[str, str, str],
        product: str,
    ) -> None:
        """C += scale of the row * scale of the weight * sum"""
        fn, lanes = self.fn, self.target.lanes
        m, column, block = place
        kind = vector_type(lanes)
        vectors = shape.vectors
        columns = [fn.offset(column, v * lanes) for v in range(vectors)]
        scales = [panel.scale_vector(block, c) for c in columns]
        for r, row in enumerate(at):
            x_scale = self.rows.scale(fn, lanes, row, block)
            for v, w_scale in enumerate(scales):
                to = [fn.offset(m, r), columns[v]]
                held = fn.vload(product, to, PRODUCT_TYPE, lanes)
                whole = sums[r * vectors + v]
                value = fn.op(f"arith.sitofp {whole} : {vector_type(lanes, 'i32')} to {kind}")
                scale = fn.arith("mulf", x_scale, w_scale, type_=kind)
                fn.vstore(fn.fma(value, scale, held, lanes), product, to, PRODUCT_TYPE, lanes)
