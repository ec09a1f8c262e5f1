"""Views and data movement: reshape, permute, expand, slice, concat, gather, scatter, iota."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bessemer.graph.core import TensorType
from bessemer.graph.dims import Dim, Size, evaluate_size, product
from bessemer.graph.dtypes import DType
from bessemer.graph.ops.elementwise import broadcast
from bessemer.graph.ops.reduction import check_axis
from bessemer.graph.schema import REQUIRED, Env, GraphError, OpSchema, register


def _sizes(shape: Sequence[Size], env: Env) -> list[int]:
    return [evaluate_size(s, env.sizes) for s in shape]


def _reshape_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    shape = tuple(attrs["shape"])
    if product(shape) != product(types[0].shape):
        raise GraphError(f"reshape of {types[0]} to {list(shape)} changes the number of elements")
    return TensorType(types[0].dtype, shape)


def _permute_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    perm = tuple(attrs["perm"])
    if sorted(perm) != list(range(types[0].rank)):
        raise GraphError(f"{perm} is not a permutation of rank {types[0].rank}")
    return TensorType(types[0].dtype, tuple(types[0].shape[p] for p in perm))


def _expand_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    shape = tuple(attrs["shape"])
    if broadcast(types[0].shape, shape) != shape:
        raise GraphError(f"{types[0]} does not expand to {list(shape)}")
    return TensorType(types[0].dtype, shape)


def _slice_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    axis, start, stop, step = (attrs[k] for k in ("axis", "start", "stop", "step"))
    check_axis(axis, x.rank)
    size = x.shape[axis]
    if isinstance(size, int) and isinstance(start, int) and isinstance(stop, int):
        if not (0 <= start <= stop <= size and step >= 1):
            raise GraphError(f"slice {start}:{stop}:{step} of size {size}")
    elif step != 1:
        raise GraphError("a slice of a symbolic size has step 1")
    extent = stop - start
    length = extent if isinstance(extent, Dim) or step == 1 else -(-extent // step)
    shape = list(x.shape)
    shape[axis] = length
    return TensorType(x.dtype, tuple(shape))


def _slice(x: np.ndarray, attrs: Mapping[str, Any], env: Env) -> np.ndarray:
    index: list[slice] = [slice(None)] * x.ndim
    start, stop = _sizes((attrs["start"], attrs["stop"]), env)
    index[attrs["axis"]] = slice(start, stop, attrs["step"])
    return x[tuple(index)]


def _concat_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    first = types[0]
    check_axis(attrs["axis"], first.rank)
    axis = attrs["axis"] + first.rank
    total: Size = 0
    for t in types:
        if t.dtype != first.dtype or t.rank != first.rank:
            raise GraphError(f"concat of {', '.join(map(str, types))}")
        for i, (a, b) in enumerate(zip(t.shape, first.shape, strict=True)):
            if i != axis and a != b:
                raise GraphError(f"concat of {', '.join(map(str, types))} along {attrs['axis']}")
        total = t.shape[axis] + total
    return TensorType(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :]))


def _iota_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    return TensorType(DType(attrs["dtype"]), (attrs["size"],))


def _iota(attrs: Mapping[str, Any], env: Env) -> np.ndarray:
    size = evaluate_size(attrs["size"], env.sizes)
    steps = np.arange(size, dtype=np.int64) * attrs["step"] + attrs["start"]
    return steps.astype(DType(attrs["dtype"]).numpy)


def _take_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    x, index = types
    check_axis(attrs["axis"], x.rank)
    axis = attrs["axis"] + x.rank
    return TensorType(x.dtype, (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


def _gather_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    x, index = types
    check_axis(attrs["axis"], x.rank)
    if x.rank != index.rank:
        raise GraphError(f"gather({x}, {index}) needs operands of one rank")
    return TensorType(x.dtype, index.shape)


def _scatter_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    x, index, source = types
    check_axis(attrs["axis"], x.rank)
    if index.shape != source.shape or x.rank != index.rank or x.dtype != source.dtype:
        raise GraphError(f"scatter({x}, {index}, {source})")
    return x


def _scatter(
    x: np.ndarray, index: np.ndarray, source: np.ndarray, attrs: Mapping[str, Any]
) -> np.ndarray:
    result = x.copy()
    where = list(np.indices(index.shape))
    where[attrs["axis"]] = index
    if attrs["accumulate"]:
        np.add.at(result, tuple(where), source)
    else:
        result[tuple(where)] = source
    return result


def _put_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    x, index, source = types
    check_axis(attrs["axis"], x.rank)
    axis = attrs["axis"] + x.rank
    expected = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    if index.rank != 1 or source.shape != expected or source.dtype != x.dtype:
        raise GraphError(f"put({x}, {index}, {source}) along {attrs['axis']}")
    return x


def _put(
    x: np.ndarray, index: np.ndarray, source: np.ndarray, attrs: Mapping[str, Any]
) -> np.ndarray:
    result = np.moveaxis(x.copy(), attrs["axis"], 0)
    rows = np.moveaxis(source, attrs["axis"], 0)
    if attrs["accumulate"]:
        np.add.at(result, index, rows)
    else:
        result[index] = rows
    return np.ascontiguousarray(np.moveaxis(result, 0, attrs["axis"]))


def _pad_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    (x,) = types
    if len(attrs["low"]) != x.rank or len(attrs["high"]) != x.rank:
        raise GraphError("pad needs a low and a high count for each axis")
    sides = zip(x.shape, attrs["low"], attrs["high"], strict=True)
    return TensorType(x.dtype, tuple(s + (a + b) for s, a, b in sides))


def _pad(x: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    widths = list(zip(attrs["low"], attrs["high"], strict=True))
    return np.pad(x, widths, constant_values=attrs["value"])


register(
    OpSchema(
        "reshape",
        (1, 1),
        {"shape": REQUIRED},
        _reshape_type,
        lambda x, attrs, env: x.reshape(_sizes(attrs["shape"], env)),
        needs_env=True,
    )
)
register(
    OpSchema(
        "permute",
        (1, 1),
        {"perm": REQUIRED},
        _permute_type,
        lambda x, attrs: np.transpose(x, attrs["perm"]),
    )
)
register(
    OpSchema(
        "expand",
        (1, 1),
        {"shape": REQUIRED},
        _expand_type,
        lambda x, attrs, env: np.broadcast_to(x, _sizes(attrs["shape"], env)),
        needs_env=True,
        doc="Broadcast to a shape.",
    )
)
register(
    OpSchema(
        "slice",
        (1, 1),
        {"axis": REQUIRED, "start": REQUIRED, "stop": REQUIRED, "step": 1},
        _slice_type,
        _slice,
        needs_env=True,
    )
)
register(
    OpSchema(
        "concat",
        (1, 1 << 16),
        {"axis": REQUIRED},
        _concat_type,
        lambda *xs: np.concatenate(xs[:-1], axis=xs[-1]["axis"]),
    )
)
register(
    OpSchema(
        "iota",
        (0, 0),
        {"size": REQUIRED, "start": 0, "step": 1, "dtype": DType.I64},
        _iota_type,
        _iota,
        needs_env=True,
        doc="start, start + step, ...",
    )
)
register(
    OpSchema(
        "take",
        (2, 2),
        {"axis": REQUIRED},
        _take_type,
        lambda x, index, attrs: np.take(x, index, axis=attrs["axis"]),
        doc="Whole slices of x along an axis, by an index of any shape (numpy.take).",
    )
)
register(
    OpSchema(
        "gather",
        (2, 2),
        {"axis": REQUIRED},
        _gather_type,
        lambda x, index, attrs: np.take_along_axis(x, index, axis=attrs["axis"]),
        doc="Element by element along an axis (numpy.take_along_axis).",
    )
)
register(
    OpSchema(
        "scatter",
        (3, 3),
        {"axis": REQUIRED, "accumulate": False},
        _scatter_type,
        _scatter,
        doc="x with source written (or added) where index says, along an axis (torch.scatter).",
    )
)
register(
    OpSchema(
        "put",
        (3, 3),
        {"axis": REQUIRED, "accumulate": False},
        _put_type,
        _put,
        doc="x with whole slices along an axis replaced (or added to); the update of a state.",
    )
)
register(
    OpSchema(
        "pad",
        (1, 1),
        {"low": REQUIRED, "high": REQUIRED, "value": 0.0},
        _pad_type,
        _pad,
    )
)
