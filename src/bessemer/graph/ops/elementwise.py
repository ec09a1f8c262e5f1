"""Elementwise ops. Operands broadcast as in NumPy; a symbolic size only equals itself or 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bessemer.graph.core import TensorType
from bessemer.graph.dims import Shape, Size
from bessemer.graph.dtypes import DType
from bessemer.graph.schema import REQUIRED, GraphError, OpSchema, register

_erf64 = np.vectorize(math.erf, otypes=[np.float64])


def broadcast(*shapes: Shape) -> Shape:
    """The NumPy broadcast of shapes. Raises GraphError."""
    rank = max(map(len, shapes))
    result: list[Size] = []
    for axis in range(rank):
        size: Size = 1
        for shape in shapes:
            at = axis - (rank - len(shape))
            other = shape[at] if at >= 0 else 1
            if other == 1 or other == size:
                continue
            if size != 1:
                raise GraphError(f"shapes {', '.join(map(str, shapes))} do not broadcast")
            size = other
        result.append(size)
    return tuple(result)


def erf(x: np.ndarray) -> np.ndarray:
    return _erf64(x).astype(x.dtype) if x.size else x


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow on either side."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(x.dtype)


def gelu(x: np.ndarray) -> np.ndarray:
    return (0.5 * x * (1 + erf(x / np.float32(math.sqrt(2))))).astype(x.dtype)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return (0.5 * x * (1 + np.tanh(inner))).astype(x.dtype)


def softplus(x: np.ndarray) -> np.ndarray:
    return (np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))).astype(x.dtype)


# Activations that `linear` and `moe` may carry in their epilogue, by the same names.
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * sigmoid(x),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "sigmoid": sigmoid,
    "tanh": np.tanh,
}

UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "reciprocal": lambda x: (1 / x).astype(x.dtype),
    "sin": np.sin,
    "cos": np.cos,
    "erf": erf,
    "floor": np.floor,
    "ceil": np.ceil,
    "softplus": softplus,
    "logical_not": np.logical_not,
    **{k: v for k, v in ACTIVATIONS.items() if k != "none"},
}

ARITHMETIC: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floordiv": np.floor_divide,
    "mod": np.mod,
    "pow": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
}
COMPARE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
LOGICAL: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
}


def _same(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    return types[0]


def _broadcast_type(dtype: DType | None) -> Callable[..., TensorType]:
    def infer(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
        if len({t.dtype for t in types}) != 1:
            raise GraphError(f"operand types differ: {', '.join(map(str, types))}")
        return TensorType(dtype or types[0].dtype, broadcast(*(t.shape for t in types)))

    return infer


def _where_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    cond, a, b = types
    if cond.dtype != DType.BOOL or a.dtype != b.dtype:
        raise GraphError(f"where({cond}, {a}, {b}) needs a bool and two of one type")
    return TensorType(a.dtype, broadcast(cond.shape, a.shape, b.shape))


def _unary(fn: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda x, attrs: fn(x)


def _binary(fn: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda a, b, attrs: fn(a, b)


for _name, _fn in UNARY.items():
    register(OpSchema(_name, (1, 1), {}, _same, _unary(_fn), elementwise=True))
for _table, _result in ((ARITHMETIC, None), (COMPARE, DType.BOOL), (LOGICAL, DType.BOOL)):
    for _name, _op in _table.items():
        register(
            OpSchema(_name, (2, 2), {}, _broadcast_type(_result), _binary(_op), elementwise=True)
        )
register(
    OpSchema(
        "where",
        (3, 3),
        {},
        _where_type,
        lambda c, a, b, attrs: np.where(c, a, b),
        elementwise=True,
        doc="a where c holds, else b.",
    )
)
register(
    OpSchema(
        "cast",
        (1, 1),
        {"dtype": REQUIRED},
        lambda types, attrs: TensorType(DType(attrs["dtype"]), types[0].shape),
        lambda x, attrs: x.astype(DType(attrs["dtype"]).numpy),
        elementwise=True,
        doc="Another element type; float to int truncates.",
    )
)
