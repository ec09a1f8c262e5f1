"""The table from ATen ops to graph ops: its registry, and what its functions work with.

A function of the table takes a `Builder`, then the ATen op's own arguments with tensors as graph
values and symbolic sizes as graph sizes, and returns a value (or a tuple of them). The families
are in `aten_elementwise`, `aten_views`, `aten_reductions`, `aten_contractions`, `aten_indexing`;
the ops of our own definitions in `aten_definitions`.
In-place ops need no entry: `add_` is `add` whose result is written back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from bessemer.graph import DType, TensorType, Value, build, constant, emit
from bessemer.graph.core import Attr
from bessemer.graph.dims import Dim, Shape, Size


class Complex(NamedTuple):
    """A complex tensor as its real and imaginary part; the graph itself has no complex type."""

    re: Value
    im: Value


class NoMapping(Exception):
    """This use of an op has no graph form; the message says why."""


@dataclass(frozen=True)
class Builder:
    """Where a table function puts its nodes.

    loc: module path and source line.  outs: the result types that PyTorch says, dtypes mapped.
    positions: the graph input i64[1, T].  sequence_length: gives the graph input i64[].
    next_layer: gives a number to an attention that has none.
    """

    loc: str
    outs: tuple[TensorType, ...]
    positions: Value
    sequence_length: Callable[[], Value]
    next_layer: Callable[[], int]

    @property
    def out(self) -> TensorType:
        return self.outs[0]

    def emit(self, op: str, *values: Value, **attrs: Attr) -> Value:
        return emit(op, *values, loc=self.loc, **attrs)

    def emit_many(self, op: str, *values: Value, **attrs: Attr) -> tuple[Value, ...]:
        """All results of a node."""
        return build(op, values, loc=self.loc, **attrs).outputs

    def scalar(self, x: Any, dtype: DType) -> Value:
        """A constant without dimensions."""
        if isinstance(x, Dim) or not isinstance(x, (bool, int, float)):
            raise NoMapping(f"uses the size {x} as a number; results may not depend on the length")
        return constant(np.asarray(x), dtype.numpy)

    def fill(self, x: Any, type_: TensorType) -> Value:
        """A tensor of one number."""
        return self.expand(self.scalar(x, type_.dtype), type_.shape)

    def cast(self, x: Value, dtype: DType) -> Value:
        return x if x.dtype == dtype else self.emit("cast", x, dtype=dtype)

    def reshape(self, x: Value, shape: Shape) -> Value:
        return x if x.shape == tuple(shape) else self.emit("reshape", x, shape=tuple(shape))

    def expand(self, x: Value, shape: Shape) -> Value:
        return x if x.shape == tuple(shape) else self.emit("expand", x, shape=tuple(shape))

    def permute(self, x: Value, perm: Sequence[int]) -> Value:
        same = list(perm) == list(range(len(perm)))
        return x if same else self.emit("permute", x, perm=tuple(perm))

    def slice(self, x: Value, axis: int, start: Size, stop: Size, step: int = 1) -> Value:
        axis = negative(axis, x.type.rank)
        if start == 0 and stop == x.shape[axis] and step == 1:
            return x
        return self.emit("slice", x, axis=axis, start=start, stop=stop, step=step)

    def concat(self, parts: Sequence[Value], axis: int) -> Value:
        axis = negative(axis, parts[0].type.rank)
        return parts[0] if len(parts) == 1 else self.emit("concat", *parts, axis=axis)


Handler = Callable[..., Any]
TABLE: dict[str, Handler] = {}


def aten(*names: str) -> Callable[[Handler], Handler]:
    """Enter a function under ATen names such as `"mul.Tensor"` or full names with a namespace."""

    def register(fn: Handler) -> Handler:
        for name in names:
            full = name if name.count(".") == 2 else f"aten.{name}"
            if full in TABLE:
                raise ValueError(f"{full} is entered twice")
            TABLE[full] = fn
        return fn

    return register


def negative(axis: int, rank: int) -> int:
    """An axis counted from the end, as graph attributes want it."""
    if not -rank <= axis < rank:
        raise NoMapping(f"axis {axis} of a tensor of rank {rank}")
    return axis - rank if axis >= 0 else axis


def negatives(axes: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Axes counted from the end, in order; all of them for None or an empty list."""
    if axes is None or (not isinstance(axes, int) and not len(axes)):
        return tuple(range(-rank, 0))
    listed = [axes] if isinstance(axes, int) else list(axes)
    return tuple(sorted(negative(a, rank) for a in listed))


def dtype_of(dtype: torch.dtype) -> DType:
    """The graph type of a torch dtype: every float computes in f32, every integer in i64."""
    if dtype == torch.bool:
        return DType.BOOL
    if dtype.is_floating_point or dtype.is_complex:
        return DType.F32
    return DType.I64


def promoted(b: Builder, *xs: Any) -> list[Value]:
    """Operands (values or Python numbers) brought to their common type."""
    kinds = {x.dtype for x in xs if isinstance(x, Value)}
    if any(isinstance(x, float) for x in xs) or DType.F32 in kinds:
        common = DType.F32
    elif DType.I64 in kinds or any(type(x) is int for x in xs):
        common = DType.I64
    else:
        common = DType.BOOL
    return [operand(b, x, common) for x in xs]


def operand(b: Builder, x: Any, dtype: DType) -> Value:
    """A value or Python number as a value of a type."""
    return b.cast(x, dtype) if isinstance(x, Value) else b.scalar(x, dtype)
