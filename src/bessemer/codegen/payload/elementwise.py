"""Elementwise graph ops on scalars: the table from op names to `Scalars`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bessemer.codegen.emit import Fn
from bessemer.codegen.payload.scalar import Scalars
from bessemer.errors import CompileError
from bessemer.graph.core import Node
from bessemer.graph.dtypes import DType

_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_BINARY: dict[str, Callable[[Scalars, str, str], str]] = {
    "add": Scalars.add,
    "sub": Scalars.sub,
    "mul": Scalars.mul,
    "div": Scalars.div,
    "floordiv": Scalars.floordiv,
    "mod": Scalars.mod,
    "pow": Scalars.pow,
    "maximum": Scalars.maximum,
    "minimum": Scalars.minimum,
}
_LOGICAL = {"logical_and": "arith.andi", "logical_or": "arith.ori"}
_ANY_UNARY: dict[str, Callable[[Scalars, str], str]] = {
    "neg": Scalars.neg,
    "abs": Scalars.abs,
    "relu": lambda s, x: s.maximum(x, s.const(0)),
}
_FLOAT_UNARY: dict[str, Callable[[Scalars, str], str]] = {
    "exp": Scalars.exp,
    "log": lambda s, x: s.op("math.log", x),
    "log1p": Scalars.log1p,
    "sqrt": lambda s, x: s.op("math.sqrt", x),
    "rsqrt": lambda s, x: s.div(s.const(1), s.op("math.sqrt", x)),
    "reciprocal": lambda s, x: s.div(s.const(1), x),
    "sin": lambda s, x: s.op("math.sin", x),
    "cos": lambda s, x: s.op("math.cos", x),
    "erf": lambda s, x: s.op("math.erf", x),
    "floor": lambda s, x: s.op("math.floor", x),
    "ceil": lambda s, x: s.op("math.ceil", x),
    "tanh": lambda s, x: s.op("math.tanh", x),
    "softplus": Scalars.softplus,
    "sigmoid": Scalars.sigmoid,
    "silu": lambda s, x: s.mul(x, s.sigmoid(x)),
    "gelu": Scalars.gelu,
    "gelu_tanh": Scalars.gelu_tanh,
}
# What recomputing an op costs, in additions; one that is not named costs 1.
_COST = {
    **dict.fromkeys(_FLOAT_UNARY, 10),
    **dict.fromkeys(("floor", "ceil"), 1),
    **dict.fromkeys(("div", "floordiv", "mod", "pow", "sqrt", "rsqrt", "reciprocal"), 6),
}


def cost(op: str) -> int:
    """Rough price of one elementwise op, in additions."""
    return _COST.get(op, 1)


def apply(fn: Fn, node: Node, operands: Sequence[str]) -> str:
    """The op of `node` on scalars. Raises CompileError for an element type that it is not for."""
    dtype = node.inputs[0].dtype
    s, op = Scalars(fn, dtype), node.op
    try:
        if op in _COMPARE:
            return s.compare(op, *operands)
        if op in _BINARY:
            return _BINARY[op](s, *operands)
        if op == "where":
            return Scalars(fn, node.types[0].dtype).select(*operands)
        if op == "cast":
            return s.cast(operands[0], DType(node.attrs["dtype"]))
        if op in _LOGICAL:
            truths = [s.cast(x, DType.BOOL) for x in operands]
            return Scalars(fn, DType.BOOL).op(_LOGICAL[op], *truths)
        if op == "logical_not":
            truth = Scalars(fn, DType.BOOL)
            negated = truth.op("arith.xori", s.cast(operands[0], DType.BOOL), truth.const(True))
            return truth.cast(negated, dtype)
        if op in _ANY_UNARY:
            return _ANY_UNARY[op](s, operands[0])
        if op in _FLOAT_UNARY and s.is_float:
            return _FLOAT_UNARY[op](s, operands[0])
        if op in ("floor", "ceil"):
            return operands[0]
    except TypeError as error:
        raise CompileError(f"{op} of {dtype} has no lowering: {error} ({node.loc})") from error
    raise CompileError(f"{op} of {dtype} has no lowering ({node.loc})")
