"""What a payload is made from: some graph nodes, and how the group's operands are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bessemer.artifact.layout import PANEL_ROWS
from bessemer.codegen.group import ROWS, Operand
from bessemer.codegen.payload.scalar import MEMORY
from bessemer.errors import CompileError
from bessemer.graph.core import Node, Value
from bessemer.graph.dims import Dim, Size

_STORED_FLOATS = ("f32", "f16", "bf16")


class Storage(Protocol):
    """How a weight is kept: `StoredWeight` is one."""

    @property
    def dtype(self) -> str: ...

    @property
    def layout(self) -> str: ...


@dataclass(frozen=True)
class Stored:
    """dtype: "f32", "f16", "bf16".  layout: "plain" (row-major) or "panels" ([N/32][K][32])."""

    dtype: str = "f32"
    layout: str = "plain"


@dataclass(frozen=True)
class PayloadSpec:
    """A piece of a graph.

    nodes: what to compute, operands before users; `constant` nodes may be among them or not.
    inputs: values from outside.  outputs: values that are wanted.  weights: those inputs that are
    stored weights.  updates: output -> the `state` input whose memory it replaces, in place.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    weights: Mapping[Value, Storage] = field(default_factory=dict)
    updates: Mapping[Value, Value] = field(default_factory=dict)

    def storage(self, value: Value) -> Stored:
        """Storage of an input: f32-typed values may be kept narrower. Raises CompileError."""
        found = self.weights.get(value)
        if found is None or not value.dtype.is_float:
            return Stored(MEMORY[value.dtype])
        if found.dtype not in _STORED_FLOATS or found.layout not in ("plain", "panels"):
            raise CompileError(
                f"A generic group can't read a weight stored as {found.dtype} {found.layout}"
            )
        return Stored(found.dtype, found.layout)

    @property
    def destinations(self) -> tuple[Value, ...]:
        """Outputs that have a memory operand of their own: all but the updates."""
        return tuple(v for v in self.outputs if v not in self.updates)


def stored_shape(shape: tuple[Size, ...], layout: str) -> tuple[Size, ...]:
    """Shape of the memory of a value: panels are [..., ceil(N/32), K, 32]."""
    if layout == "plain":
        return shape
    *lead, n, k = shape
    if isinstance(n, Dim):
        raise CompileError(f"panels of a symbolic number of rows ({n})")
    return (*lead, -(-n // PANEL_ROWS), k, PANEL_ROWS)


def group_operands(spec: PayloadSpec) -> tuple[Operand, ...]:
    """The contiguous memory operands of the group: inputs in order, then destinations."""
    found = []
    for value in spec.inputs:
        storage = spec.storage(value)
        role = "weight" if value in spec.weights else "state" if value.op == "state" else "in"
        found.append(_operand(storage.dtype, stored_shape(value.shape, storage.layout), role))
    for value in spec.destinations:
        found.append(_operand(MEMORY[value.dtype], value.shape, "out"))
    return tuple(found)


def _operand(element: str, shape: tuple[Size, ...], role: str) -> Operand:
    return Operand(element, tuple(ROWS if isinstance(s, Dim) else s for s in shape), None, role)
