"""Op schemas: operands, attributes, shape rule and NumPy reference of each op, in one place.

`build(op, inputs, **attrs)` is the way to make a node: it fills defaults, checks the attributes
and infers the result types. The op families are in `bessemer.graph.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bessemer.graph.core import Attr, Node, TensorType, Value

REQUIRED: Any = object()
Infer = Callable[[Sequence[TensorType], Mapping[str, Any]], "TensorType | Sequence[TensorType]"]
Reference = Callable[..., Any]


class GraphError(ValueError):
    """A graph is not well formed: unknown op, wrong operands, attributes or types."""


@dataclass(frozen=True)
class OpSchema:
    """What one op takes, gives and computes.

    arity: (least, most) operands.  attrs: name -> default, or REQUIRED.
    infer: operand types and attributes to result type(s); raises GraphError.
    reference: NumPy arrays and attributes to result(s); those with `needs_env` get `env` too.
    elementwise: broadcasts its operands and works on each element by itself.
    """

    name: str
    arity: tuple[int, int]
    attrs: Mapping[str, Any]
    infer: Infer
    reference: Reference
    elementwise: bool = False
    needs_env: bool = False
    doc: str = ""


SCHEMAS: dict[str, OpSchema] = {}


def register(schema: OpSchema) -> None:
    if schema.name in SCHEMAS:
        raise ValueError(f"op {schema.name} is registered twice")
    SCHEMAS[schema.name] = schema


def schema_of(op: str) -> OpSchema:
    import bessemer.graph.ops  # noqa: F401  (registers the op families on first use)

    found = SCHEMAS.get(op)
    if found is None:
        raise GraphError(f"unknown op {op!r}")
    return found


def complete_attrs(schema: OpSchema, attrs: Mapping[str, Attr]) -> dict[str, Attr]:
    """Attributes with defaults filled in, in the schema's order. Raises GraphError."""
    unknown = [k for k in attrs if k not in schema.attrs]
    if unknown:
        raise GraphError(f"{schema.name} has no attribute {', '.join(unknown)}")
    full = {k: attrs.get(k, default) for k, default in schema.attrs.items()}
    missing = [k for k, v in full.items() if v is REQUIRED]
    if missing:
        raise GraphError(f"{schema.name} needs the attribute {', '.join(missing)}")
    return full


def infer_types(
    op: str, types: Sequence[TensorType], attrs: Mapping[str, Attr]
) -> tuple[TensorType, ...]:
    """Result types of an op. Raises GraphError when operands or attributes do not fit."""
    schema = schema_of(op)
    least, most = schema.arity
    if not least <= len(types) <= most:
        raise GraphError(f"{op} takes {least} to {most} operands, not {len(types)}")
    try:
        result = schema.infer(types, attrs)
    except GraphError:
        raise
    except (TypeError, ValueError, IndexError) as error:
        shown = ", ".join(map(str, types))
        raise GraphError(f"{op}({shown}): {error}") from error
    return (result,) if isinstance(result, TensorType) else tuple(result)


def build_from(op: str, inputs: Sequence[Value], attrs: Mapping[str, Attr], loc: str = "") -> Node:
    """A new node with inferred types, its attributes in a mapping."""
    full = complete_attrs(schema_of(op), attrs)
    return Node(op, tuple(inputs), full, infer_types(op, [v.type for v in inputs], full), loc)


def build(op: str, inputs: Sequence[Value] = (), *, loc: str = "", **attrs: Attr) -> Node:
    """A new node with inferred types."""
    return build_from(op, inputs, attrs, loc)


def emit(op: str, *inputs: Value, loc: str = "", **attrs: Attr) -> Value:
    """The only result of a new node: `emit("add", a, b)`."""
    return build(op, inputs, loc=loc, **attrs).out


def constant(value: np.ndarray | float | int | bool, dtype: Any = None) -> Value:
    """A constant node with a copy of the value; Python floats become f32 and ints i64."""
    if dtype is None and isinstance(value, float):
        dtype = np.float32
    array = np.array(value, dtype=dtype, order="C")
    array.flags.writeable = False
    return emit("constant", value=array)


def param(name: str, type_: TensorType) -> Value:
    return emit("param", name=name, dtype=type_.dtype, shape=type_.shape)


@dataclass
class Env:
    """State of a reference evaluation: KV rows and positions per layer, and named states."""

    kv: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)
    states: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    read: Callable[[str], np.ndarray] | None = None
    sizes: dict[str, int] = field(default_factory=dict)
