"""Data movement that is no view: concatenation, padding, and look-ups and stores by index."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bessemer.artifact.layout import PANEL_ROWS
from bessemer.codegen.payload.attrs import axis_of, integers, number
from bessemer.codegen.payload.builder import Body, Builder, Tensor
from bessemer.codegen.payload.scalar import Scalars
from bessemer.errors import CompileError
from bessemer.graph.core import Node, Value
from bessemer.graph.dims import Shape, Size
from bessemer.graph.dtypes import DType


def concat(b: Builder, node: Node) -> None:
    """Each operand is computed into its part of the result."""
    result = b.target(node.out)
    axis = axis_of(node, len(result.shape))
    start: Size = 0
    for value in node.inputs:
        shape = b.shape(value)
        offsets = [b.mixed(start) if i == axis else "0" for i in range(len(shape))]
        result = _computed_part(b, value, result, offsets, shape)
        start = shape[axis] + start
        b.prepare([start])
    b.env[node.out] = result


def pad(b: Builder, node: Node) -> None:
    """The result is filled, then its inner part computed."""
    (x,) = node.inputs
    s = Scalars(b.fn, x.dtype)
    result = b.filled(b.target(node.out), s.const(number(node, "value")))
    offsets = [str(n) for n in integers(node, "low")]
    b.env[node.out] = _computed_part(b, x, result, offsets, b.shape(x))


def _computed_part(
    b: Builder, value: Value, result: Tensor, offsets: Sequence[str], shape: Shape
) -> Tensor:
    part = b.computed(value, b.part(result, offsets, shape))
    return b.inserted(part, result, offsets, shape)


def index_of(b: Builder, tensor: Tensor, at: Sequence[str], size: Size) -> str:
    """An index that a tensor holds, as an SSA index; a negative one counts from the end."""
    fn = b.fn
    dtype = DType.I32 if tensor.element == "i32" else DType.I64
    index = fn.cast_index(b.element(tensor, at, dtype), tensor.element, "index")
    negative = fn.cmp("slt", index, fn.index(0))
    return fn.select(negative, fn.add(index, b.extent(size)), index, "index")


def nest(
    b: Builder, shape: Shape, result: Tensor, step: Callable[[Tensor, list[str]], Tensor]
) -> Tensor:
    """Loops over `shape` that carry `result`; a dimension of size 1 has no loop."""

    def level(depth: int, held: Tensor, at: list[str]) -> Tensor:
        if depth == len(shape):
            return step(held, at)
        if shape[depth] == 1:
            return level(depth + 1, held, [*at, b.fn.index(0)])
        carried = [(held.ssa, held.type)]
        with b.fn.loop(b.fn.index(0), b.extent(shape[depth]), 1, carried) as loop:
            inner = Tensor(loop.args[0], held.shape, held.element)
            loop.carry(level(depth + 1, inner, [*at, loop.iv]).ssa)
        return Tensor(loop.results[0], held.shape, held.element)

    return level(0, result, [])


def take(b: Builder, node: Node) -> None:
    """Whole slices of a table, one for each index."""
    x, indices = node.inputs
    table, index = b.tensor(x), b.tensor(indices)
    result = b.target(node.out)
    axis = axis_of(node, len(table.shape))
    rank = len(index.shape)

    def one(held: Tensor, at: list[str]) -> Tensor:
        chosen = index_of(b, index, at, table.shape[axis])
        row = table_slice(b, table, axis, chosen)
        offsets = ["0"] * axis + at + ["0"] * (len(row.shape) - axis)
        box = (*row.shape[:axis], *[1] * rank, *row.shape[axis:])
        place = b.part(held, offsets, box, drop=range(axis, axis + rank))
        dims = tuple(f"d{i}" for i in range(len(row.shape)))
        filled = b.generic(
            row.shape,
            [(place, dims)],
            lambda body, _: [body.load(row, body.dims, x.dtype)],
        )[0]
        return b.inserted(filled, held, offsets, box)

    b.env[node.out] = nest(b, index.shape, result, one)


def table_slice(b: Builder, table: Tensor, axis: int, at: str) -> Tensor:
    """The slice of a table at an index of one axis, without that axis, where it lies."""
    box: list[Size] = [1 if i == axis else s for i, s in enumerate(table.stored)]
    offsets = [at if i == axis else "0" for i in range(len(box))]
    if table.layout == "plain":
        return b.part(table, offsets, tuple(box), drop=(axis,))
    if axis < len(table.shape) - 2:
        row = b.part(table, offsets, tuple(box), drop=(axis,))
        shape = tuple(s for i, s in enumerate(table.shape) if i != axis)
        return Tensor(row.ssa, shape, row.element, "panels")
    if axis != len(table.shape) - 2:
        raise CompileError("columns of a weight that is packed in panels of rows")
    fn, rows = b.fn, b.fn.index(PANEL_ROWS)
    offsets[axis], offsets[-1] = fn.div(at, rows), fn.rem(at, rows)
    box[-1] = 1
    return b.part(table, offsets, tuple(box), drop=(axis, len(box) - 1))


def gather(b: Builder, node: Node) -> None:
    """Element by element along an axis."""
    x, indices = node.inputs
    table = b.tensor(x)
    axis = axis_of(node, len(table.shape))
    result = b.target(node.out)

    def one(body: Body, old: list[str]) -> list[str]:
        fn = b.fn
        index = fn.cast_index(body.read(indices, body.dims), _integer(indices), "index")
        end = b.extent(table.shape[axis])
        negative = fn.cmp("slt", index, fn.index(0))
        index = fn.select(negative, fn.add(index, end), index, "index")
        at = [body.ssa_index(e) for e in b.broadcast(x, body.dims)]
        at[axis] = index
        if table.layout != "plain":
            raise CompileError("a gather from a packed weight")
        return [b.element(table, at, x.dtype)]

    dims = tuple(f"d{i}" for i in range(len(result.shape)))
    b.env[node.out] = b.generic(result.shape, [(result, dims)], one)[0]


def _integer(value: Value) -> str:
    return "i32" if value.dtype == DType.I32 else "i64"


def scatter(b: Builder, node: Node) -> None:
    """A copy of the operand in which single elements are replaced or added to, in index order."""
    x, indices, sources = node.inputs
    index, source = b.tensor(indices), b.tensor(sources)
    axis = axis_of(node, x.type.rank)
    s = Scalars(b.fn, x.dtype)

    def one(held: Tensor, at: list[str]) -> Tensor:
        where = list(at)
        where[axis] = index_of(b, index, at, held.shape[axis])
        new = b.element(source, at, x.dtype)
        if node.attrs["accumulate"]:
            new = s.add(b.element(held, where, x.dtype), new)
        place = f"{held.ssa}[{', '.join(where)}] : {held.type}"
        new = b.to_memory(new, held.element)
        return Tensor(b.fn.op(f"tensor.insert {new} into {place}"), held.shape, held.element)

    b.env[node.out] = nest(b, index.shape, _base(b, node), one)


def put(b: Builder, node: Node) -> None:
    """Slices along an axis replaced or added to, in index order; a state is changed in place."""
    x, indices, sources = node.inputs
    index, source = b.tensor(indices), b.tensor(sources)
    axis = axis_of(node, x.type.rank)
    s = Scalars(b.fn, x.dtype)

    def one(held: Tensor, at: list[str]) -> Tensor:
        new = table_slice(b, source, axis, at[0])
        chosen = index_of(b, index, at, held.shape[axis])
        offsets = [chosen if i == axis else "0" for i in range(len(held.shape))]
        box = tuple(1 if i == axis else n for i, n in enumerate(held.shape))
        place = b.part(held, offsets, box, drop=(axis,))
        dims = tuple(f"d{i}" for i in range(len(new.shape)))

        def element(body: Body, old: list[str]) -> list[str]:
            value = body.load(new, body.dims, x.dtype)
            return [s.add(old[0], value) if node.attrs["accumulate"] else value]

        filled = b.generic(new.shape, [(place, dims)], element)[0]
        return b.inserted(filled, held, offsets, box)

    b.env[node.out] = nest(b, index.shape, _base(b, node), one)


def _base(b: Builder, node: Node) -> Tensor:
    """What a scatter or put starts from: the state itself, or a copy of the operand."""
    x = node.inputs[0]
    if node.out in b.in_place:
        return b.tensor(x)
    return b.computed(x, b.target(node.out))
