"""Op schemas: operands, attributes, shape rule and NumPy reference of each op, in one place.

`build(op, inputs, **attrs)` is the way to make a node: it fills defaults, checks the attributes
and infers the result types. The op families are in `bessemer.graph.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bessemer.graph.core import Attr, Node, TensorType, Value

REQUIRED: Any = object()
# Beyond every token: where a call without tokens begins.
LAST_POSITION = np.iinfo(np.int64).max
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
class WindowState:
    """One stream of a layer that pools windows of token rows.

    pending: position -> (values, gates) of a token row.  rows: number -> compressed row.
    """

    pending: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    rows: dict[int, np.ndarray] = field(default_factory=dict)

    def rewind(self, length: int, rate: int) -> None:
        """Keep what the first `length` positions gave."""
        self.pending = {p: v for p, v in self.pending.items() if p < length}
        self.rows = {s: row for s, row in self.rows.items() if s < length // rate}

    def window(self, positions: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Values and gates [N, W] of token rows; those at negative positions have no weight."""
        some = next(iter(self.pending.values()))
        nothing = (np.zeros_like(some[0]), np.full_like(some[1], -np.inf))
        rows = [nothing if p < 0 else self.pending[p] for p in positions]
        return np.stack([v for v, _ in rows]), np.stack([g for _, g in rows])

    def stacked(self, count: int, width: int) -> np.ndarray:
        """The first `count` compressed rows [count, width]."""
        return np.stack([*(self.rows[s] for s in range(count)), np.zeros(width, np.float32)])[:-1]


@dataclass
class Env:
    """State of a reference evaluation: KV rows and positions per layer, windows that are pooled
    per layer and stream, and named states."""

    kv: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)
    windows: dict[tuple[int, str], WindowState] = field(default_factory=dict)
    states: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    read: Callable[[str], np.ndarray] | None = None
    sizes: dict[str, int] = field(default_factory=dict)

    def extend_kv(
        self, layer: int, k: np.ndarray, v: np.ndarray, at: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A layer's keys, values and positions with new rows, those at or after them dropped."""
        held = self.kv.get(layer)
        if held is not None:
            keep = held[2] < at.min(initial=LAST_POSITION)
            rows = zip(held, (k, v, at), strict=True)
            k, v, at = (np.concatenate([old[keep], new]) for old, new in rows)
        self.kv[layer] = (k, v, at)
        return k, v, at
