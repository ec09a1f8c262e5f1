"""The register tile: rows of activations times one 32-row weight panel.

`block_product` computes C[rows, 32] = X[rows, K] @ panel.T for one panel of any float format. K is
cut into blocks, each of which is used by every tile of rows. Where a load does not give f32, the
block is widened once before. Rows are addressed through a function, so that gathered rows (experts)
use it too. Quantised panels have `tile_integer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bessemer.artifact.layout import PANEL_ROWS, align
from bessemer.codegen.emit import Fn, memref_type
from bessemer.codegen.group import CodegenTarget, Operand
from bessemer.codegen.kernels.panel import Panel

# Most depths of a K block: 1536 x 32 are 96 KiB of f16 and 192 of f32, which stream from an L2 of
# 512 KiB beside the rows that meet them. Smaller blocks fetch and store C's tile more often: on
# Zen 3 a depth of 1536 runs at 99 GFLOP/s in one block, at 97.5 in three.
K_BLOCK = 1536
# Accumulators of the tile for left-over rows: as many chains as two units of four cycles keep busy.
TAIL_ACCUMULATORS = 8


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


def tail_shape(target: CodegenTarget) -> TileShape:
    """The tile of rows that don't fill a large one: 2x4, or 4x2 of AVX-512's vectors. Wide and low,
    so that few rows are filled up; a prompt of 7 or 8 runs half as fast again as with 6x2 alone.
    """
    vectors = min(4, PANEL_ROWS // target.lanes)
    return TileShape(TAIL_ACCUMULATORS // vectors, vectors)


def rows_by_shape(
    fn: Fn, target: CodegenTarget, rows: str
) -> tuple[tuple[TileShape, str, str], tuple[TileShape, str, str]]:
    """Which of `rows` rows go through which tile: (shape, begin, end). Left-over rows that fill
    more of a large tile than of tails are the large one's.
    """
    tile, tail = tile_shape(target), tail_shape(target)
    rest = fn.rem(rows, fn.index(tile.rows))
    many = fn.cmp("sgt", rest, fn.index(tile.rows - tail.rows))
    whole = fn.select(many, rows, fn.sub(rows, rest), "index")
    return (tile, fn.index(0), whole), (tail, whole, rows)


def padded_rows(rows: int, target: CodegenTarget) -> int:
    return align(rows, tile_shape(target).rows)


def k_block(depth: int) -> int:
    """Depths of one K block: equal blocks, but for the last one's remainder."""
    return -(-depth // -(-depth // K_BLOCK))


def is_widened(element: str, target: CodegenTarget) -> bool:
    """Whether weights of a format are widened (or f32, put closer together) before they are used.
    Where loads widen, they are not: few rows then cost their products alone. Integers never are.
    """
    return element == "f32" or (element != "q8_0" and not target.loads_halves)


def weights_bytes(depth: int, element: str, target: CodegenTarget) -> int:
    """Thread scratch of the widened K block."""
    return align(k_block(depth) * PANEL_ROWS * 4) if is_widened(element, target) else 0


def product_bytes(rows: int) -> int:
    """Thread scratch of C for so many rows, whole tiles."""
    return align(rows * PANEL_ROWS * 4)


# weights(k, v): vector v of the tile's weights at depth k of the K block.
Weights = Callable[[str, int], str]


@dataclass(frozen=True)
class Tile:
    """The parts of a block product that stay the same for a function."""

    fn: Fn
    target: CodegenTarget
    x: str
    x_operand: Operand
    offset: int  # of the widened K block in the thread's scratch

    @property
    def depth(self) -> int:
        depth = self.x_operand.shape[-1]
        assert isinstance(depth, int)
        return depth

    @property
    def columns(self) -> int:
        return tile_shape(self.target).vectors * self.target.lanes

    def block_product(
        self,
        panel: Panel,
        rows: str,
        product: str,
        row_index: Callable[[str], list[str]] | None = None,
        following: Panel | None = None,
    ) -> None:
        """C[0:rows] = X @ panel.T into `product`, a memref<? x 32 x f32> of padded rows.

        row_index(m) gives the indices of row m of x; None: [m].  following: the panel that comes
        next, which is fetched meanwhile.
        """
        fn = self.fn
        k_size, step = fn.index(self.depth), k_block(self.depth)
        split = rows_by_shape(fn, self.target, rows)
        with fn.loop(fn.index(0), k_size, step) as k_loop:
            size = fn.min(fn.index(step), fn.sub(k_size, k_loop.iv))
            read = self._open(panel, k_loop.iv, size)
            first = fn.cmp("eq", k_loop.iv, fn.index(0))
            for shape, begin, end in split:
                columns = shape.vectors * self.target.lanes
                with fn.loop(begin, end, shape.rows) as m_loop:
                    at = rows_at(fn, shape.rows, m_loop.iv, rows, row_index)
                    with fn.loop(fn.index(0), fn.index(PANEL_ROWS), columns) as n_loop:
                        place = (m_loop.iv, n_loop.iv)
                        depths = (k_loop.iv, size)
                        fetch = self._fetcher(following, depths, place, columns)
                        weights = read(n_loop.iv)
                        _tile(self, shape, at, place, depths, first, weights, product, fetch)

    def _fetcher(
        self, following: Panel | None, depths: tuple[str, str], place: tuple[str, str], columns: int
    ) -> Callable[[str], None] | None:
        """Fetches the K block of the next panel into L2, bit by bit: fetch(k) at depth k of a tile.

        The products of a tile fill the window in which a processor looks ahead for loads, so that
        too few are under way for memory's latency. The first tile fetches all; for the others k
        leads to one and the same line.
        """
        fn = self.fn
        if following is None or is_widened(following.operand.element, self.target):
            return None
        (k0, size), (m, n), parts = depths, place, fn.index(PANEL_ROWS // columns)
        step = fn.select(fn.cmp("eq", m, fn.index(0)), fn.index(1), fn.index(0), "index")
        start = fn.mul(fn.div(n, fn.index(columns)), size)

        def fetch(k: str) -> None:
            line = fn.mul(fn.div(fn.add(start, k), parts), step)
            following.fetch(fn.add(k0, line), fn.index(0))

        return fetch

    def _open(self, panel: Panel, k0: str, size: str) -> Callable[[str], Weights]:
        """How the tile whose first column is given is read in this K block."""
        fn, lanes, operand = self.fn, self.target.lanes, panel.operand
        if not is_widened(operand.element, self.target):

            def from_panel(k: str, column: str) -> str:
                at = [*panel.lead, fn.add(k0, k), column]
                return fn.vload(panel.name, at, operand.type, lanes, operand.element)

            return lambda column: lambda k, v: from_panel(k, fn.offset(column, v * lanes))
        type_ = memref_type((PANEL_ROWS // self.columns, k_block(self.depth), self.columns), "f32")
        wide = scratch_view(fn, self.offset, type_)

        def keep(k: str, column: int, value: str) -> None:
            block, inner = divmod(column, self.columns)
            fn.vstore(value, wide, [fn.index(block), k, fn.index(inner)], type_, lanes)

        panel.widen(k0, size, keep)

        def from_scratch(column: str) -> Weights:
            first = fn.div(column, fn.index(self.columns))

            def read(k: str, v: int) -> str:
                block, inner = divmod(v * lanes, self.columns)
                return fn.vload(wide, [fn.offset(first, block), k, fn.index(inner)], type_, lanes)

            return read

        return from_scratch


def rows_at(
    fn: Fn,
    count: int,
    m: str,
    rows: str,
    row_index: Callable[[str], list[str]] | None,
) -> list[list[str]]:
    """Indices of a tile's `count` rows of x from row m. Rows past the end repeat the last one:
    their products land in the padding of C.
    """
    last = fn.sub(rows, fn.index(1))
    wanted = [fn.min(fn.offset(m, r), last) for r in range(count)]
    return [row_index(r) if row_index else [r] for r in wanted]


PRODUCT_TYPE = memref_type(("?", PANEL_ROWS), "f32")


def scratch_view(fn: Fn, offset: int, type_: str, *sizes: str) -> str:
    """A typed view of the thread's scratch at a byte offset."""
    at = fn.index(offset)
    return fn.op(f"memref.view %scratch[{at}][{', '.join(sizes)}] : memref<?xi8> to {type_}")


def _tile(
    tile: Tile,
    shape: TileShape,
    at: list[list[str]],
    place: tuple[str, str],
    depths: tuple[str, str],
    first: str,
    weights: Weights,
    product: str,
    fetch: Callable[[str], None] | None,
) -> None:
    """C of rows x columns from `place` += X[:, k0:k0+size] @ W; starts from zero in the first K
    block. depths: k0 and size.
    """
    fn, lanes = tile.fn, tile.target.lanes
    vector = f"vector<{lanes}xf32>"
    zero = fn.splat(0.0, lanes)
    (m, column), (k0, size) = place, depths
    places = [
        [fn.offset(m, r), fn.offset(column, v * lanes)]
        for r in range(shape.rows)
        for v in range(shape.vectors)
    ]
    held = [fn.vload(product, where, PRODUCT_TYPE, lanes) for where in places]
    start = [(fn.select(first, zero, h, vector), vector) for h in held]
    with fn.loop(fn.index(0), size, 1, start) as loop:
        k = fn.add(k0, loop.iv)
        if fetch is not None:
            fetch(loop.iv)
        w = [weights(loop.iv, v) for v in range(shape.vectors)]
        sums = []
        for r in range(shape.rows):
            scalar = fn.load(tile.x, [*at[r], k], tile.x_operand.type)
            x = fn.broadcast(scalar, lanes)
            for v in range(shape.vectors):
                sums.append(fn.fma(x, w[v], loop.args[r * shape.vectors + v], lanes))
        loop.carry(*sums)
    for value, where in zip(loop.results, places, strict=True):
        fn.vstore(value, product, where, PRODUCT_TYPE, lanes)
