"""Groups: the functions that the main graph calls, and what each declares about itself.

A group function has the form

    func @name(%begin, %end: index, %rows: index, %scratch: memref<?xi8>,
               operands: memref..., literals: index...)

It works on the units [begin, end) of its split (rows, weight panels, heads, or everything at
once), may use its thread's part of the scratch memory, and reads what differs between equal groups
(layer number, window) from the literals. Two groups with the same `GroupSpec` share one function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bessemer.codegen.emit import Fn, memref_type

ELEMENT_BYTES = {
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "q8_0": 1,
    "i1": 1,
    "i8": 1,
}

ROWS = "?"  # a dimension whose size is known at run time: the rows of the call


@dataclass(frozen=True)
class Operand:
    """A memory operand. element: "f32", "f16", "bf16", "q8_0" (bytes), "i64", "i16", "i1", "i8".

    A size of ROWS (only the first) is the row count; strides are in elements, None = contiguous.
    role: "in", "out", "weight" or "state".
    """

    element: str
    shape: tuple[int | str, ...]
    strides: tuple[int, ...] | None = None
    role: str = "in"

    @property
    def type(self) -> str:
        return memref_type(self.shape, self.element, self.strides)

    @property
    def nbytes(self) -> int:
        """Bytes of it, or of one of its rows where it has ROWS."""
        sizes = [int(size) for size in self.shape if size != ROWS]
        return math.prod(sizes) * ELEMENT_BYTES[self.element]


@dataclass(frozen=True)
class GroupSpec:
    """All that a group's code depends on. Hashable: equal specs are one function."""

    kind: str
    operands: tuple[Operand, ...]
    literals: tuple[str, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()
    body: str = ""  # generic groups: the payload text, which is their whole meaning

    def attr(self, name: str) -> Any:
        return dict(self.attrs)[name]


@dataclass(frozen=True)
class BlockUnits:
    """`heads * ceil(rows / block)` units: unit u is head u / blocks, block u % blocks."""

    heads: int
    block: int


Units = int | str | BlockUnits


@dataclass(frozen=True)
class CodegenTarget:
    """What kernels need to know of the machine and the build."""

    lanes: int  # f32 elements of the vector that kernels are written in
    registers: int  # architectural vector registers
    chunk: int  # most rows of a call
    kv_dtype: str  # element of the KV cache
    pair_dot: str = ""  # LLVM's name of an instruction on `lanes` pairs, see `integer_rows`
    loads_halves: bool = False  # f16 and bf16 are widened beside multiply-adds, for nothing


@dataclass(frozen=True)
class Kernel:
    """How one kind of group becomes code.

    emit(fn, spec, target): writes the body into `fn`, whose arguments are named as `signature`
    says.  units(spec): units of the split: an int, ROWS, or BlockUnits.
    thread_scratch(spec, target): bytes that each thread needs.
    split: "rows" (a thread touches only its own rows of all operands that have rows), "panels",
    "heads", or "single" (one thread does it all).
    """

    kind: str
    split: str
    emit: Callable[[Fn, GroupSpec, CodegenTarget], None]
    units: Callable[[GroupSpec], Units] = lambda spec: ROWS
    thread_scratch: Callable[[GroupSpec, CodegenTarget], int] = lambda spec, target: 0


KERNELS: dict[str, Kernel] = {}


def register(kernel: Kernel) -> None:
    if kernel.kind in KERNELS:
        raise ValueError(f"kernel {kernel.kind} is registered twice")
    KERNELS[kernel.kind] = kernel


def signature(spec: GroupSpec) -> list[tuple[str, str]]:
    """Arguments of the group's function: %begin, %end, %rows, %scratch, %op0.., %lit0.."""
    head = [
        ("%begin", "index"),
        ("%end", "index"),
        ("%rows", "index"),
        ("%scratch", "memref<?xi8>"),
    ]
    operands = [(f"%op{i}", o.type) for i, o in enumerate(spec.operands)]
    return head + operands + [(f"%lit{i}", "index") for i in range(len(spec.literals))]


def emit_group(name: str, spec: GroupSpec, target: CodegenTarget) -> str:
    """MLIR text of the group's function, by its scheduled kernel."""
    fn = Fn(name, signature(spec))
    KERNELS[spec.kind].emit(fn, spec, target)
    return fn.text()
