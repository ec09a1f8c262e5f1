"""ATen to graph: creation, gathers, scatters and advanced indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bessemer.graph import DType, Value
from bessemer.graph.dims import Dim, Size, product
from bessemer.graph.ops.elementwise import broadcast
from bessemer.importer.aten import Builder, NoMapping, aten, negative, operand

# --- creation --------------------------------------------------------------------------------


@aten("full.default", "full_like.default", "new_full.default")
def _full(b: Builder, source: Any, *rest: Any, **kwargs: Any) -> Value:
    value = kwargs.get("fill_value", rest[-1] if rest else None)
    return b.fill(value, b.out)


@aten("zeros.default", "zeros_like.default", "new_zeros.default")
def _zeros(b: Builder, *args: Any, **kwargs: Any) -> Value:
    return b.fill(0, b.out)


@aten("empty.memory_format", "empty_like.default", "new_empty.default", "empty_strided.default")
def _empty(b: Builder, *args: Any, **kwargs: Any) -> Value:
    # zeros are as good as any content: what is read before it is written is undefined in torch
    return b.fill(0, b.out)


@aten("ones.default", "ones_like.default", "new_ones.default")
def _ones(b: Builder, *args: Any, **kwargs: Any) -> Value:
    return b.fill(1, b.out)


@aten("scalar_tensor.default")
def _scalar_tensor(b: Builder, value: Any, **kwargs: Any) -> Value:
    return b.scalar(value, b.out.dtype)


@aten("arange.default", "arange.start", "arange.start_step")
def _arange(b: Builder, *args: Any, **kwargs: Any) -> Value:
    start, step = 0, 1
    if len(args) == 3:
        start, _, step = args
    elif len(args) == 2:
        start = args[0]
    (size,) = b.out.shape
    if isinstance(start, int) and isinstance(step, int):
        return b.emit("iota", size=size, start=start, step=step, dtype=b.out.dtype)
    if isinstance(start, Dim) or isinstance(step, Dim):
        raise NoMapping("an arange that starts or steps by the number of tokens")
    count = b.emit("iota", size=size, dtype=DType.F32)
    scaled = b.emit("mul", count, b.scalar(float(step), DType.F32))
    return b.cast(b.emit("add", scaled, b.scalar(float(start), DType.F32)), b.out.dtype)


@aten("one_hot.default")
def _one_hot(b: Builder, x: Value, num_classes: int = -1) -> Value:
    classes = b.emit("iota", size=b.out.shape[-1])
    hit = b.emit("eq", b.reshape(x, (*x.shape, 1)), classes)
    return b.cast(hit, DType.I64)


def _triangle(b: Builder, x: Value, op: str, diagonal: int) -> Value:
    rows, columns = x.shape[-2:]
    row = b.reshape(b.emit("iota", size=rows), (rows, 1))
    offset = b.emit("sub", b.emit("iota", size=columns), row)
    kept = b.emit(op, offset, b.scalar(diagonal, DType.I64))
    return b.emit("where", kept, x, b.scalar(0, x.dtype))


@aten("tril.default")
def _tril(b: Builder, x: Value, diagonal: int = 0) -> Value:
    return _triangle(b, x, "le", diagonal)


@aten("triu.default")
def _triu(b: Builder, x: Value, diagonal: int = 0) -> Value:
    return _triangle(b, x, "ge", diagonal)


# --- gathers ---------------------------------------------------------------------------------


@aten("gather.default")
def _gather(b: Builder, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    axis = negative(dim, x.type.rank)
    # torch reads only the leading part of x along the other axes
    for other in range(-x.type.rank, 0):
        if other != axis:
            x = b.slice(x, other, 0, index.shape[other])
    return b.emit("gather", x, index, axis=axis)


@aten("index_select.default")
def _index_select(b: Builder, x: Value, dim: int, index: Value) -> Value:
    return b.emit("take", x, index, axis=negative(dim, x.type.rank))


def _wrapped(b: Builder, index: Value, size: Size) -> Value:
    """Indices with negative ones counted from the end."""
    source = index
    while source.op in ("reshape", "slice", "permute", "expand"):
        source = source.node.inputs[0]
    if source.op in ("input", "iota"):
        return index  # positions, ids and counts are never negative
    if isinstance(size, Dim):
        raise NoMapping("an index into the token axis")
    low = b.emit("lt", index, b.scalar(0, DType.I64))
    return b.emit("where", low, b.emit("add", index, b.scalar(size, DType.I64)), index)


def _joined(b: Builder, x: Value, indices: Sequence[Value | None]) -> tuple[int, int, Value]:
    """Adjacent index tensors as one: first axis, number of axes, flat index over those axes."""
    at = [i for i, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if any(t.dtype == DType.BOOL for t in tensors):
        raise NoMapping("indexing by a mask (the size of the result depends on the data)")
    if at != list(range(at[0], at[0] + len(at))):
        raise NoMapping("index tensors that are not side by side")
    shape = broadcast(*(t.shape for t in tensors))
    flat: Value | None = None
    for axis, index in zip(at, tensors, strict=True):
        size = x.shape[axis]
        index = b.expand(_wrapped(b, index, size), shape)
        if flat is not None:
            flat = b.emit("add", b.emit("mul", flat, b.scalar(size, DType.I64)), index)
        else:
            flat = index
    assert flat is not None
    return at[0], len(at), flat


def _merged(b: Builder, x: Value, first: int, count: int) -> Value:
    """x with `count` axes from `first` on flattened to one."""
    size = product(tuple(x.shape[first : first + count]))
    return b.reshape(x, (*x.shape[:first], size, *x.shape[first + count :]))


@aten("index.Tensor")
def _index(b: Builder, x: Value, indices: Sequence[Value | None]) -> Value:
    first, count, flat = _joined(b, x, indices)
    merged = _merged(b, x, first, count)
    return b.emit("take", merged, flat, axis=first - merged.type.rank)


# --- scatters --------------------------------------------------------------------------------


@aten("index_put.default")
def _index_put(
    b: Builder,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Value:
    first, count, flat = _joined(b, x, indices)
    merged = _merged(b, x, first, count)
    rest = (*x.shape[:first], *flat.shape, *x.shape[first + count :])
    rows = product(flat.shape)
    source = b.reshape(
        b.expand(b.cast(values, x.dtype), rest),
        (*x.shape[:first], rows, *x.shape[first + count :]),
    )
    index = b.reshape(flat, (rows,))
    axis = first - merged.type.rank
    result = b.emit("put", merged, index, source, axis=axis, accumulate=accumulate)
    return b.reshape(result, x.shape)


@aten("index_copy.default")
def _index_copy(b: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    return b.emit("put", x, index, source, axis=negative(dim, x.type.rank))


@aten("index_add.default")
def _index_add(
    b: Builder, x: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1
) -> Value:
    if alpha != 1:
        source = b.emit("mul", source, b.scalar(alpha, source.dtype))
    return b.emit("put", x, index, source, axis=negative(dim, x.type.rank), accumulate=True)


@aten("index_fill.int_Scalar")
def _index_fill(b: Builder, x: Value, dim: int, index: Value, value: Any) -> Value:
    axis = negative(dim, x.type.rank)
    shape = list(x.shape)
    shape[axis] = index.shape[0]
    source = b.expand(operand(b, value, x.dtype), tuple(shape))
    return b.emit("put", x, index, source, axis=axis)


@aten("scatter.value")
def _scatter_value(b: Builder, x: Value, dim: int, index: Value, value: Any) -> Value:
    return _scatter(b, x, dim, index, b.expand(operand(b, value, x.dtype), index.shape))


@aten("scatter.src")
def _scatter(b: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _scatter_node(b, x, dim, index, source, False)


@aten("scatter_add.default")
def _scatter_add(b: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _scatter_node(b, x, dim, index, source, True)


def _scatter_node(
    b: Builder, x: Value, dim: int, index: Value, source: Value, accumulate: bool
) -> Value:
    axis = negative(dim, x.type.rank)
    # torch reads only the leading part of the source
    for other in range(-source.type.rank, 0):
        source = b.slice(source, other, 0, index.shape[other])
    return b.emit("scatter", x, index, source, axis=axis, accumulate=accumulate)
