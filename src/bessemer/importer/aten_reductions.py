"""ATen to graph: reductions, softmax, scans and selections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bessemer.graph import DType, Value
from bessemer.graph.dims import Dim, product
from bessemer.importer.aten import Builder, NoMapping, aten, negative, negatives


def _reduce(b: Builder, op: str, x: Value, dim: Any, keepdim: bool) -> Value:
    return b.emit(op, x, axes=negatives(dim, x.type.rank), keepdims=keepdim)


def _count(b: Builder, x: Value, dim: Any) -> int:
    """Elements that a reduction takes together."""
    count = product(tuple(x.shape[a] for a in negatives(dim, x.type.rank)))
    if isinstance(count, Dim):
        raise NoMapping("a mean or variance over the token axis")
    return count


@aten("sum.dim_IntList", "sum.default")
def _sum(
    b: Builder, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    return _reduce(b, "reduce_sum", b.cast(x, b.out.dtype), dim, keepdim)


@aten("mean.dim", "mean.default")
def _mean(
    b: Builder, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    return _reduce(b, "reduce_mean", b.cast(x, DType.F32), dim, keepdim)


@aten("amax.default")
def _amax(b: Builder, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    return _reduce(b, "reduce_max", x, dim, keepdim)


@aten("amin.default")
def _amin(b: Builder, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
    return _reduce(b, "reduce_min", x, dim, keepdim)


@aten("max.default")
def _max(b: Builder, x: Value) -> Value:
    return _reduce(b, "reduce_max", x, None, False)


@aten("min.default")
def _min(b: Builder, x: Value) -> Value:
    return _reduce(b, "reduce_min", x, None, False)


@aten("max.dim")
def _max_dim(b: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _reduce(b, "reduce_max", x, dim, keepdim), _argmax(b, x, dim, keepdim)


@aten("min.dim")
def _min_dim(b: Builder, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _reduce(b, "reduce_min", x, dim, keepdim), _argmin(b, x, dim, keepdim)


@aten("argmax.default")
def _argmax(b: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    if dim is None:
        raise NoMapping("argmax without a dimension")
    return _reduce(b, "argmax", x, dim, keepdim)


@aten("argmin.default")
def _argmin(b: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _argmax(b, b.emit("neg", x), dim, keepdim)


@aten("prod.dim_int")
def _prod(b: Builder, x: Value, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Value:
    return _reduce(b, "reduce_prod", b.cast(x, b.out.dtype), dim, keepdim)


@aten("any.dim", "any.default")
def _any(b: Builder, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    held = b.cast(b.emit("ne", x, b.scalar(0, x.dtype)), DType.I64)
    return b.cast(_reduce(b, "reduce_max", held, dim, keepdim), DType.BOOL)


@aten("all.dim", "all.default")
def _all(b: Builder, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    held = b.cast(b.emit("ne", x, b.scalar(0, x.dtype)), DType.I64)
    return b.cast(_reduce(b, "reduce_min", held, dim, keepdim), DType.BOOL)


@aten("var.correction", "var.dim")
def _var(
    b: Builder,
    x: Value,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Value:
    less = (1 if unbiased else 0) if correction is None else correction
    count = _count(b, x, dim)
    centred = b.emit("sub", x, _reduce(b, "reduce_mean", x, dim, True))
    mean = _reduce(b, "reduce_mean", b.emit("mul", centred, centred), dim, keepdim)
    if not less:
        return mean
    return b.emit("mul", mean, b.scalar(count / (count - less), DType.F32))


@aten("std.correction", "std.dim")
def _std(b: Builder, x: Value, *args: Any, **kwargs: Any) -> Value:
    return b.emit("sqrt", _var(b, x, *args, **kwargs))


@aten("linalg_vector_norm.default", "norm.ScalarOpt_dim")
def _norm(
    b: Builder, x: Value, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    if ord not in (2, 2.0, None):
        raise NoMapping(f"a norm of order {ord}")
    return b.emit("sqrt", _reduce(b, "reduce_sum", b.emit("mul", x, x), dim, keepdim))


@aten("softmax.int", "_softmax.default")
def _softmax(b: Builder, x: Value, dim: int, *rest: Any, **kwargs: Any) -> Value:
    return b.emit("softmax", b.cast(x, DType.F32), axis=negative(dim, x.type.rank))


@aten("log_softmax.int", "_log_softmax.default")
def _log_softmax(b: Builder, x: Value, dim: int, *rest: Any, **kwargs: Any) -> Value:
    x = b.cast(x, DType.F32)
    return b.emit("sub", x, _logsumexp(b, x, dim, True))


@aten("logsumexp.default")
def _logsumexp(b: Builder, x: Value, dim: Any, keepdim: bool = False) -> Value:
    top = _reduce(b, "reduce_max", x, dim, True)
    total = _reduce(b, "reduce_sum", b.emit("exp", b.emit("sub", x, top)), dim, True)
    result = b.emit("add", b.emit("log", total), top)
    return b.reshape(result, _reduce(b, "reduce_sum", x, dim, keepdim).shape)


@aten("cumsum.default")
def _cumsum(b: Builder, x: Value, dim: int, *, dtype: Any = None) -> Value:
    return b.emit("cumsum", b.cast(x, b.out.dtype), axis=negative(dim, x.type.rank))


@aten("topk.default")
def _topk(
    b: Builder, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    # torch leaves the order open when `sorted` is false; ours is always sorted
    last, perm = _to_last(b, x, dim)
    source = last if largest else b.emit("neg", last)
    values, indices = b.emit_many("topk", source, k=k)
    values = values if largest else b.emit("neg", values)
    return b.permute(values, perm), b.permute(indices, perm)


@aten("sort.default", "sort.stable")
def _sort(b: Builder, x: Value, dim: int = -1, descending: bool = False, **kwargs: Any) -> Any:
    size = x.shape[dim]
    if isinstance(size, Dim):
        raise NoMapping("a sort along the token axis")
    return _topk(b, x, size, dim, descending)


@aten("argsort.default", "argsort.stable")
def _argsort(b: Builder, x: Value, *args: Any, **kwargs: Any) -> Value:
    return _sort(b, x, *args, **{k: v for k, v in kwargs.items() if k != "stable"})[1]


def _to_last(b: Builder, x: Value, dim: int) -> tuple[Value, Sequence[int]]:
    """x with `dim` swapped to the end, and the permutation that swaps it back."""
    perm = list(range(x.type.rank))
    at = dim % x.type.rank
    perm[at], perm[-1] = perm[-1], perm[at]
    return b.permute(x, perm), perm
