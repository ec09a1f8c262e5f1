"""ATen to graph: views, casts and rearrangements.

`VIEWS` holds, for each op whose result may share memory with its first operand, how a write
through the result changes that operand: `inverse(b, operand, new_result, *args)`. In-place ops
on views (`x[..., :n].copy_(y)`) become functional that way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bessemer.graph import DType, Value, constant
from bessemer.graph.dims import Dim, Size
from bessemer.importer.aten import Builder, Complex, Handler, NoMapping, aten, negative

VIEWS: dict[str, Handler] = {}
# Slices with this stop mean "to the end".
_END = 2**62


def view(*names: str, inverse: Handler) -> Callable[[Handler], Handler]:
    """Enter a view into the table together with its inverse."""

    def register(fn: Handler) -> Handler:
        aten(*names)(fn)
        VIEWS.update({f"aten.{name}": inverse for name in names})
        return fn

    return register


def _reshape_back(b: Builder, x: Value, new: Value, *args: Any, **kwargs: Any) -> Value:
    return b.reshape(new, x.shape)


def _same(b: Builder, x: Value, new: Value, *args: Any, **kwargs: Any) -> Value:
    return b.cast(new, x.dtype)


def _no_write(b: Builder, x: Value, new: Value, *args: Any, **kwargs: Any) -> Value:
    raise NoMapping("an in-place write through an expanded view")


@view(
    "view.default",
    "reshape.default",
    "_unsafe_view.default",
    "flatten.using_ints",
    "unflatten.int",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
    "unsqueeze.default",
    "view_as.default",
    "reshape_as.default",
    inverse=_reshape_back,
)
def _reshape(b: Builder, x: Value, *args: Any, **kwargs: Any) -> Value:
    return b.reshape(x, b.out.shape)


@view(
    "alias.default",
    "detach.default",
    "contiguous.default",
    "lift_fresh.default",
    inverse=_same,
)
def _identity(b: Builder, x: Value, *args: Any, **kwargs: Any) -> Value:
    return x


@view("dropout.default", inverse=_same)
def _dropout(b: Builder, x: Value, p: float, train: bool) -> Value:
    if train and p:
        raise NoMapping("dropout in training mode; call model.eval() first")
    return x


@aten("clone.default", "lift_fresh_copy.default")
def _clone(b: Builder, x: Value, *args: Any, **kwargs: Any) -> Value:
    return x


@view(
    "to.dtype",
    "to.device",
    "to.dtype_layout",
    "to.other",
    "type_as.default",
    "_to_copy.default",
    inverse=_same,
)
def _cast(b: Builder, x: Value, *args: Any, **kwargs: Any) -> Value:
    if x.dtype.is_float and b.out.dtype == DType.BOOL:
        return b.emit("ne", x, b.scalar(0.0, x.dtype))
    return b.cast(x, b.out.dtype)


def _permute_back(b: Builder, x: Value, new: Value, dims: Sequence[int]) -> Value:
    return b.permute(new, np.argsort([d % x.type.rank for d in dims]).tolist())


@view("permute.default", inverse=_permute_back)
def _permute(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    return b.permute(x, [d % x.type.rank for d in dims])


def _swapped(rank: int, a: int, c: int) -> list[int]:
    perm = list(range(rank))
    perm[a % rank], perm[c % rank] = perm[c % rank], perm[a % rank]
    return perm


def _transpose_back(b: Builder, x: Value, new: Value, dim0: int = 0, dim1: int = 1) -> Value:
    return b.permute(new, _swapped(x.type.rank, dim0, dim1))


@view("transpose.int", "swapaxes.default", "swapdims.default", inverse=_transpose_back)
def _transpose(b: Builder, x: Value, dim0: int, dim1: int) -> Value:
    return b.permute(x, _swapped(x.type.rank, dim0, dim1))


@view("t.default", inverse=_transpose_back)
def _t(b: Builder, x: Value) -> Value:
    return x if x.type.rank < 2 else b.permute(x, (1, 0))


@aten("numpy_T.default", "mT.default")
def _reversed(b: Builder, x: Value) -> Value:
    return b.permute(x, _swapped(x.type.rank, -1, -2))


@aten("movedim.int", "movedim.intlist", "moveaxis.int")
def _movedim(b: Builder, x: Value, source: Any, destination: Any) -> Value:
    rank = x.type.rank
    sources = [source] if isinstance(source, int) else list(source)
    targets = [destination] if isinstance(destination, int) else list(destination)
    moved = {t % rank: s % rank for s, t in zip(sources, targets, strict=True)}
    rest = iter(d for d in range(rank) if d not in moved.values())
    return b.permute(x, [moved[i] if i in moved else next(rest) for i in range(rank)])


@view("expand.default", "expand_as.default", "broadcast_to.default", inverse=_no_write)
def _expand(b: Builder, x: Value, *args: Any, **kwargs: Any) -> Value:
    return b.expand(x, b.out.shape)


# --- slices ----------------------------------------------------------------------------------


def _bounds(b: Builder, size: Size, start: Any, end: Any) -> tuple[Size, Size]:
    """Start and stop of a Python slice over an axis, clamped as Python does."""

    def clamped(at: Any, default: Size) -> Size:
        if at is None or (isinstance(at, int) and at >= _END):
            return default
        if isinstance(size, int) and isinstance(at, int):
            return min(max(at + size if at < 0 else at, 0), size)
        if at in (0, size):
            return at
        if isinstance(at, int) and at < 0:
            return size + at
        raise NoMapping(f"a slice to {at} of an axis of size {size}")

    return clamped(start, 0), clamped(end, size)


def overwrite(b: Builder, x: Value, axis: int, start: Size, stop: Size, new: Value) -> Value:
    """x with new in place of x[start:stop] along an axis. A concat is taken apart, not copied."""
    axis = negative(axis, x.type.rank)
    before = pieces(b, x, axis, 0, start)
    return b.concat([*before, new, *pieces(b, x, axis, stop, x.shape[axis])], axis)


def pieces(b: Builder, x: Value, axis: int, start: Size, stop: Size) -> list[Value]:
    """Parts that make up x[start:stop] along an axis, nothing for an empty range."""
    if start == stop:
        return []
    if x.op != "concat" or x.node.attrs["axis"] != axis:
        return [b.slice(x, axis, start, stop)]
    sizes = [s for part in x.node.inputs if isinstance(s := part.shape[axis], int)]
    if len(sizes) < len(x.node.inputs) or isinstance(start, Dim) or isinstance(stop, Dim):
        return [b.slice(x, axis, start, stop)]
    found: list[Value] = []
    at = 0
    for part, size in zip(x.node.inputs, sizes, strict=True):
        end = at + size
        low, high = max(start, at), min(stop, end)
        if low < high:
            found.append(b.slice(part, axis, low - at, high - at))
        at = end
    return found


def _slice_back(
    b: Builder,
    x: Value,
    new: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Value:
    axis = negative(dim, x.type.rank)
    low, high = _bounds(b, x.shape[axis], start, end)
    if step == 1:
        return overwrite(b, x, axis, low, high, new)
    if not (isinstance(low, int) and isinstance(high, int)):
        raise NoMapping("an in-place write to a strided slice of the token axis")
    rows = constant(np.arange(low, high, step, dtype=np.int64))
    return b.emit("put", x, rows, new, axis=axis)


@view("slice.Tensor", inverse=_slice_back)
def _slice(
    b: Builder, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    low, high = _bounds(b, x.shape[dim], start, end)
    return b.slice(x, dim, low, high, step)


def _narrow_back(b: Builder, x: Value, new: Value, dim: int, start: Any, length: Any) -> Value:
    return overwrite(b, x, dim, start, start + length, new)


@view("narrow.default", inverse=_narrow_back)
def _narrow(b: Builder, x: Value, dim: int, start: Any, length: Any) -> Value:
    return b.slice(x, dim, start, start + length)


def _at(size: Size, index: Any) -> Size:
    if isinstance(index, int) and index < 0:
        return size + index
    return index


def _select_back(b: Builder, x: Value, new: Value, dim: int, index: Any) -> Value:
    axis = negative(dim, x.type.rank)
    at = _at(x.shape[axis], index)
    shape = list(x.shape)
    shape[axis] = 1
    return overwrite(b, x, axis, at, at + 1, b.reshape(new, tuple(shape)))


@view("select.int", inverse=_select_back)
def _select(b: Builder, x: Value, dim: int, index: Any) -> Value:
    at = _at(x.shape[dim], index)
    return b.reshape(b.slice(x, dim, at, at + 1), b.out.shape)


def _parts(b: Builder, x: Value, dim: int) -> list[Value]:
    """Consecutive parts along an axis with the sizes that PyTorch says."""
    at: Size = 0
    result = []
    for out in b.outs:
        size = out.shape[dim]
        result.append(b.slice(x, dim, at, size + at))
        at = size + at
    return result


def part_back(b: Builder, x: Value, new: Value, index: int, dim: int) -> Value:
    """x with the `index`-th result of a split replaced."""
    sizes = [out.shape[dim] for out in b.outs]
    start: Size = 0
    for size in sizes[:index]:
        start = size + start
    return overwrite(b, x, dim, start, sizes[index] + start, new)


@aten("chunk.default", "split.Tensor", "split.default", "split_with_sizes.default")
def _split(b: Builder, x: Value, sizes: Any, dim: int = 0) -> list[Value]:
    return _parts(b, x, dim)


@aten("tensor_split.sections")
def _tensor_split(b: Builder, x: Value, sections: Any, dim: int = 0) -> list[Value]:
    return _parts(b, x, dim)


@aten("unbind.int")
def _unbind(b: Builder, x: Value, dim: int = 0) -> list[Value]:
    return [b.reshape(b.slice(x, dim, i, i + 1), out.shape) for i, out in enumerate(b.outs)]


# --- complex ---------------------------------------------------------------------------------


@aten("view_as_complex.default")
def _view_as_complex(b: Builder, x: Value) -> Complex:
    re, im = (b.reshape(b.slice(x, -1, i, i + 1), x.shape[:-1]) for i in (0, 1))
    return Complex(re, im)


@aten("view_as_real.default")
def _view_as_real(b: Builder, x: Complex) -> Value:
    return b.concat([b.reshape(p, (*p.shape, 1)) for p in x], -1)


@aten("real.default")
def _real(b: Builder, x: Complex) -> Value:
    return x.re


@aten("imag.default")
def _imag(b: Builder, x: Complex) -> Value:
    return x.im


# --- rearrangements --------------------------------------------------------------------------


@aten("cat.default", "concat.default")
def _cat(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    # torch leaves out empty tensors of shape [0], whatever the rank of the others
    kept = [t for t in tensors if t.shape != (0,)] or list(tensors)
    return b.concat([b.cast(t, b.out.dtype) for t in kept], dim)


@aten("stack.default")
def _stack(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    axis = dim % b.out.rank
    shape = (*b.out.shape[:axis], 1, *b.out.shape[axis + 1 :])
    return b.concat([b.reshape(b.cast(t, b.out.dtype), shape) for t in tensors], axis)


@aten("repeat.default", "tile.default")
def _repeat(b: Builder, x: Value, repeats: Sequence[Any]) -> Value:
    counts: list[Size] = [*[1] * (b.out.rank - len(repeats)), *repeats]
    sizes: list[Size] = [*[1] * (b.out.rank - x.type.rank), *x.shape]
    split: list[Size] = []
    spread: list[Size] = []
    for count, size in zip(counts, sizes, strict=True):
        split += [1, size]
        spread += [count, size]
    return b.reshape(b.expand(b.reshape(x, tuple(split)), tuple(spread)), b.out.shape)


@aten("repeat_interleave.self_int")
def _repeat_interleave(
    b: Builder, x: Value, repeats: Any, dim: int | None = None, *, output_size: Any = None
) -> Value:
    if dim is None:
        raise NoMapping("repeat_interleave without a dimension")
    axis = dim % x.type.rank
    split = (*x.shape[: axis + 1], 1, *x.shape[axis + 1 :])
    spread = (*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :])
    return b.reshape(b.expand(b.reshape(x, split), spread), b.out.shape)


@aten("flip.default")
def _flip(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    for dim in dims:
        size = x.shape[dim]
        if isinstance(size, Dim):
            raise NoMapping("a flip of the token axis")
        index = constant(np.arange(size - 1, -1, -1, dtype=np.int64))
        x = b.emit("take", x, index, axis=negative(dim, x.type.rank))
    return x


@aten("roll.default")
def _roll(b: Builder, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if not dims:
        raise NoMapping("roll without a dimension")
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        if isinstance(size, Dim):
            raise NoMapping("a roll of the token axis")
        cut = -shift % size
        if cut:
            x = b.concat([b.slice(x, dim, cut, size), b.slice(x, dim, 0, cut)], dim)
    return x


@aten("constant_pad_nd.default", "pad.default")
def _pad(b: Builder, x: Value, pad: Sequence[Any], *rest: Any, **kwargs: Any) -> Value:
    mode = kwargs.get("mode", rest[0] if rest and isinstance(rest[0], str) else "constant")
    numbers = [r for r in (*rest, kwargs.get("value")) if r is not None and not isinstance(r, str)]
    if mode != "constant":
        raise NoMapping(f"padding with mode {mode!r}")
    low, high = [0] * x.type.rank, [0] * x.type.rank
    for i in range(len(pad) // 2):
        low[-1 - i], high[-1 - i] = pad[2 * i], pad[2 * i + 1]
    for axis in range(x.type.rank):  # negative padding crops
        if low[axis] < 0 or high[axis] < 0:
            x = b.slice(x, axis, max(-low[axis], 0), x.shape[axis] + min(high[axis], 0))
    low, high = [max(n, 0) for n in low], [max(n, 0) for n in high]
    value = float(numbers[0]) if numbers else 0.0
    return b.emit("pad", x, low=tuple(low), high=tuple(high), value=value)
