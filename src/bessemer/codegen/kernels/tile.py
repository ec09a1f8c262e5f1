"""The register tile: rows of activations times one 32-row weight panel.

`block_product` computes C[rows, 32] = X[rows, K] @ panel.T for one panel of any float format. K is
cut into blocks; of each, the panel is widened to f32 once and then used by every tile of rows. Rows
are addressed through a function, so that gathered rows (experts) use it too. Quantised panels have
`tile_integer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bessemer.artifact.layout import PANEL_ROWS, align
from bessemer.codegen.emit import Fn, memref_type
from bessemer.codegen.group import CodegenTarget, Operand
from bessemer.codegen.kernels.panel import Panel

# Most depths of a K block. The widened block, 640 x 32 f32 = 80 KiB, streams from an L2 of 256 KiB
# or more at a line for 12 FMAs, which costs less than to fetch and store C's tile more often: on
# Zen 3 a tile of 576 deep runs at 96 GFLOP/s in one block, at 93 in blocks of 256.
K_BLOCK = 640


@dataclass(frozen=True)
class TileShape:
    """Register tile: `rows` x `vectors` accumulators."""

    rows: int
    vectors: int


def tile_shape(target: CodegenTarget) -> TileShape:
    """Accumulators + one row of weights + one broadcast fill the registers: 6x2 of 16 registers
    (AVX2, SSE), 12x2 of 32 (AVX-512); NEON's four-lane vectors take 6x4 of 32.
    """
    if target.registers < 32:
        return TileShape(6, 2)
    return TileShape(12, 2) if target.lanes > 4 else TileShape(6, 4)


def padded_rows(rows: int, target: CodegenTarget) -> int:
    return align(rows, tile_shape(target).rows)


def k_block(depth: int) -> int:
    """Depths of one K block: equal blocks, but for the last one's remainder."""
    return -(-depth // -(-depth // K_BLOCK))


def weights_bytes(depth: int) -> int:
    """Thread scratch of the widened K block."""
    return align(k_block(depth) * PANEL_ROWS * 4)


def product_bytes(target: CodegenTarget) -> int:
    """Thread scratch of C for a whole chunk of rows."""
    return align(padded_rows(target.chunk, target) * PANEL_ROWS * 4)


@dataclass(frozen=True)
class Tile:
    """The parts of a block product that stay the same for a function."""

    fn: Fn
    target: CodegenTarget
    x: str
    x_operand: Operand
    weights: str  # memref<blocks x k_block x columns x f32>, the widened K block

    @property
    def depth(self) -> int:
        depth = self.x_operand.shape[-1]
        assert isinstance(depth, int)
        return depth

    @property
    def columns(self) -> int:
        return tile_shape(self.target).vectors * self.target.lanes

    @property
    def weights_type(self) -> str:
        return memref_type((PANEL_ROWS // self.columns, k_block(self.depth), self.columns), "f32")

    def block_product(
        self,
        panel: Panel,
        rows: str,
        product: str,
        row_index: Callable[[str], list[str]] | None = None,
    ) -> None:
        """C[0:rows] = X @ panel.T into `product`, a memref<? x 32 x f32> of padded rows.

        row_index(m) gives the indices of row m of x; None: [m].
        """
        fn = self.fn
        k_size, step = fn.index(self.depth), k_block(self.depth)
        with fn.loop(fn.index(0), k_size, step) as k_loop:
            size = fn.min(fn.index(step), fn.sub(k_size, k_loop.iv))
            panel.widen(k_loop.iv, size, lambda k, column, value: _keep(self, k, column, value))
            first = fn.cmp("eq", k_loop.iv, fn.index(0))
            with fn.loop(fn.index(0), rows, tile_shape(self.target).rows) as m_loop:
                at = rows_at(fn, self.target, m_loop.iv, rows, row_index)
                with fn.loop(fn.index(0), fn.index(PANEL_ROWS // self.columns)) as n_loop:
                    _tile(self, at, m_loop.iv, n_loop.iv, k_loop.iv, size, first, product)


def rows_at(
    fn: Fn,
    target: CodegenTarget,
    m: str,
    rows: str,
    row_index: Callable[[str], list[str]] | None,
) -> list[list[str]]:
    """Indices of a tile's rows of x from row m. Rows past the end repeat the last one: their
    products land in the padding of C, so that there is no second code path for the remainder.
    """
    last = fn.sub(rows, fn.index(1))
    wanted = [fn.min(fn.offset(m, r), last) for r in range(tile_shape(target).rows)]
    return [row_index(r) if row_index else [r] for r in wanted]


PRODUCT_TYPE = memref_type(("?", PANEL_ROWS), "f32")


def scratch_view(fn: Fn, offset: int, type_: str, *sizes: str) -> str:
    """A typed view of the thread's scratch at a byte offset."""
    at = fn.index(offset)
    return fn.op(f"memref.view %scratch[{at}][{', '.join(sizes)}] : memref<?xi8> to {type_}")


def open_tile(fn: Fn, target: CodegenTarget, x: str, x_operand: Operand, offset: int = 0) -> Tile:
    """A tile whose widened weights live at `offset` of the thread's scratch."""
    tile = Tile(fn, target, x, x_operand, "")
    view = scratch_view(fn, offset, tile.weights_type)
    return Tile(fn, target, x, x_operand, view)


def _keep(tile: Tile, k: str, column: int, value: str) -> None:
    """Store widened weights as [column block][k][columns]."""
    fn = tile.fn
    block, inner = divmod(column, tile.columns)
    to = [fn.index(block), k, fn.index(inner)]
    fn.vstore(value, tile.weights, to, tile.weights_type, tile.target.lanes)


def _tile(
    tile: Tile,
    at: list[list[str]],
    m: str,
    block: str,
    k0: str,
    size: str,
    first: str,
    product: str,
) -> None:
    """rows x columns of C += X[:, k0:k0+size] @ W; starts from zero in the first K block."""
    fn, lanes = tile.fn, tile.target.lanes
    shape = tile_shape(tile.target)
    vector = f"vector<{lanes}xf32>"
    zero = fn.splat(0.0, lanes)
    column = fn.mul(block, fn.index(tile.columns))
    places = [
        [fn.offset(m, r), fn.offset(column, v * lanes)]
        for r in range(shape.rows)
        for v in range(shape.vectors)
    ]
    held = [fn.vload(product, place, PRODUCT_TYPE, lanes) for place in places]
    start = [(fn.select(first, zero, h, vector), vector) for h in held]
    with fn.loop(fn.index(0), size, 1, start) as loop:
        k = fn.add(k0, loop.iv)
        w = [
            fn.vload(tile.weights, [block, loop.iv, fn.index(v * lanes)], tile.weights_type, lanes)
            for v in range(shape.vectors)
        ]
        sums = []
        for r in range(shape.rows):
            scalar = fn.load(tile.x, [*at[r], k], tile.x_operand.type)
            x = fn.broadcast(scalar, lanes)
            for v in range(shape.vectors):
                sums.append(fn.fma(x, w[v], loop.args[r * shape.vectors + v], lanes))
        loop.carry(*sums)
    for value, place in zip(loop.results, places, strict=True):
        fn.vstore(value, product, place, PRODUCT_TYPE, lanes)
