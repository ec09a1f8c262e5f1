"""Generic groups: a payload as a function that the main graph can call.

Row by row where rows are independent of each other: then all shapes are static, temporaries are
those of one row, and threads share out the rows. Else everything at once, on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bessemer.codegen.emit import contiguous_strides
from bessemer.codegen.group import GroupSpec, Operand, signature
from bessemer.codegen.payload.buffers import check_state, place_buffers
from bessemer.codegen.payload.builder import Tensor, TextFn, tensor_type
from bessemer.codegen.payload.payload import emit_payload, solved, write_payload
from bessemer.codegen.payload.rows import has_symbol, is_rows, row_symbol, row_wise
from bessemer.codegen.payload.scalar import MEMORY
from bessemer.codegen.payload.spec import PayloadSpec, group_operands, stored_shape
from bessemer.errors import CompileError
from bessemer.graph.core import Value
from bessemer.graph.dims import Dim, Shape, Size, evaluate_size, substitute_size

if TYPE_CHECKING:
    import mlir.ir as ir

_FIRST_OPERAND = 4  # arguments before the operands: begin, end, rows, scratch
_ROWS, _SCRATCH = 2, 3

# Tensors to memrefs, for one function. Elementwise ops have been fused when the payload was built.
_BUFFERIZE = (
    "canonicalize",
    "cse",
    "eliminate-empty-tensors",
    "empty-tensor-to-alloc-tensor",
    "one-shot-bufferize{bufferize-function-boundaries=true "
    "function-boundary-type-conversion=identity-layout-map}",
    "canonicalize",
    "cse",
)


@dataclass(frozen=True)
class GenericGroup:
    """A group function by the generic lowering.

    text: MLIR on memrefs, `func.func @name(%begin, %end, %rows, %scratch, operands...)`, with the
    constants it needs.  payload: the same computation on tensors, for reading and testing.
    thread_scratch_bytes: what each thread needs at %scratch.
    """

    name: str
    text: str
    payload: str
    operands: tuple[Operand, ...]
    split_rows: bool
    thread_scratch_bytes: int


def emit_generic_group(
    name: str,
    spec: PayloadSpec,
    *,
    split_rows: bool,
    chunk: int,
    operands: Sequence[Operand] | None = None,
) -> GenericGroup:
    """The group function of a payload.

    split_rows: a call works on the rows [begin, end); else on everything, and begin and end are
    not looked at. chunk: most rows of a call. operands: the memory operands where they are not
    contiguous; inputs in order, then outputs that update no state. Outputs must not overlap inputs.

    Raises CompileError when the rows can't be split, or a whole state would be copied.
    """
    memory = tuple(operands or group_operands(spec))
    if split_rows and (spec.updates or not row_wise(spec.nodes, spec.outputs)):
        raise CompileError(f"group {name} mixes rows, so it can't be split by rows")
    fn = TextFn(name, signature(GroupSpec("generic", memory)))
    symbol = row_symbol(spec.nodes) if split_rows else None
    _Writer(fn, spec, memory, symbol).write()
    text, nbytes = _bufferized(fn.text(), name, spec, memory, chunk)
    return GenericGroup(name, text, emit_payload(name, spec), memory, split_rows, nbytes)


class _Writer:
    """Writes the function that turns memrefs into tensors and runs the payload on them."""

    def __init__(
        self, fn: TextFn, spec: PayloadSpec, memory: tuple[Operand, ...], symbol: str | None
    ) -> None:
        self.fn, self.spec, self.memory, self.symbol = fn, spec, memory, symbol
        self.values = (*spec.inputs, *spec.destinations)

    def write(self) -> None:
        symbols = self._symbols()
        whole = {
            i: self._tensor(f"%op{i}", o.type, v, i)
            for i, (v, o) in enumerate(zip(self.values, self.memory, strict=True))
            if self.symbol is None or not has_symbol(v.shape, self.symbol)
        }
        if self.symbol is None:
            tensors = [whole[i] for i in range(len(self.values))]
            self._run(
                tensors, symbols, None, [(f"%op{i}", o.type) for i, o in enumerate(self.memory)]
            )
            return
        symbols[self.symbol] = 1
        with self.fn.loop("%begin", "%end") as loop:
            tensors, places = [], []
            for i, value in enumerate(self.values):
                if i in whole:
                    tensors.append(whole[i])
                    places.append((f"%op{i}", self.memory[i].type))
                else:
                    place = self._row(i, value, loop.iv)
                    tensors.append(self._tensor(*place, value, i))
                    places.append(place)
            self._run(tensors, symbols, loop.iv, places)

    def _run(
        self,
        tensors: list[Tensor],
        symbols: dict[str, int | str],
        row: str | None,
        places: list[tuple[str, str]],
    ) -> None:
        spec, n = self.spec, len(self.spec.inputs)
        results = write_payload(self.fn, spec, tensors[:n], tensors[n:], symbols, row)
        for value, tensor in zip(spec.outputs, results, strict=True):
            if value in spec.updates:
                at = spec.inputs.index(spec.updates[value])
            else:
                at = n + spec.destinations.index(value)
            ssa, type_ = places[at]
            self.fn.line(
                f"bufferization.materialize_in_destination {tensor.ssa} in restrict writable {ssa} "
                f": ({tensor.type}, {type_}) -> ()"
            )

    def _symbols(self) -> dict[str, int | str]:
        """Symbols' values, read off the operands; what none of them tells is the row count."""
        found: dict[str, int | str] = {}
        for i, value in enumerate(self.values):
            for axis, size in enumerate(value.shape):
                if isinstance(size, Dim) and len(size.terms) == 1:
                    (name, factor), *_ = size.terms
                    if name not in found and name != self.symbol:
                        at = self.fn.index(axis)
                        dim = self.fn.op(f"memref.dim %op{i}, {at} : {self.memory[i].type}")
                        found[name] = solved(self.fn, dim, factor, size.const)
        return found

    def _shape(self, value: Value) -> Shape:
        one: dict[str, Size] = {} if self.symbol is None else {self.symbol: 1}
        return tuple(substitute_size(s, one) for s in value.shape)

    def _tensor(self, ssa: str, type_: str, value: Value, at: int) -> Tensor:
        is_input = at < len(self.spec.inputs)
        storage = self.spec.storage(value) if is_input else None
        layout = storage.layout if storage else "plain"
        element = storage.dtype if storage else MEMORY[value.dtype]
        shape = self._shape(value)
        writable = not is_input or value in self.spec.updates.values()
        result = tensor_type(stored_shape(shape, layout), element)
        op = f"bufferization.to_tensor {ssa} restrict{' writable' if writable else ''}"
        return Tensor(self.fn.op(f"{op} : {type_} to {result}"), shape, element, layout)

    def _row(self, at: int, value: Value, row: str) -> tuple[str, str]:
        """The part of an operand that belongs to one row."""
        operand, fn = self.memory[at], self.fn
        assert self.symbol is not None
        if not is_rows(value.shape, self.symbol):
            raise CompileError(f"{value} has rows that are not its leading dimension")
        shape = self._shape(value)
        strides = operand.strides or contiguous_strides(operand.shape)
        if strides is None:
            raise CompileError(f"the rows of {value} have no known stride")
        one = str(shape[0])
        start = row if one == "1" else fn.mul(row, fn.index(int(one)))
        offsets = ", ".join([start, *["0"] * (len(shape) - 1)])
        sizes, steps = ", ".join(map(str, shape)), ", ".join(["1"] * len(shape))
        dims = "x".join(map(str, shape))
        shown = ", ".join(map(str, strides))
        type_ = f"memref<{dims}x{operand.element}, strided<[{shown}], offset: ?>>"
        op = f"memref.subview %op{at}[{offsets}] [{sizes}] [{steps}] : {operand.type} to {type_}"
        return fn.op(op), type_


def _bufferized(
    text: str, name: str, spec: PayloadSpec, memory: tuple[Operand, ...], chunk: int
) -> tuple[str, int]:
    """The function on memrefs with its temporaries placed, and the bytes of scratch it needs."""
    import mlir.ir as ir

    from bessemer.backend.pipeline import reproducer, run_passes

    values = (*spec.inputs, *spec.destinations)

    def bound(argument: int, axis: int) -> int:
        size = values[argument - _FIRST_OPERAND].shape[axis]
        names = {n: chunk for n, _ in size.terms} if isinstance(size, Dim) else {}
        return evaluate_size(size, names)

    states = [_FIRST_OPERAND + i for i, v in enumerate(spec.inputs) if v.op == "state"]
    with ir.Context() as context, ir.Location.unknown():
        context.enable_multithreading(False)
        source = f"module {{\n{text}}}\n"
        try:
            module = ir.Module.parse(source)
        except ir.MLIRError as error:
            raise CompileError(
                f"The payload of group {name} does not parse:\n{error}\n"
                + reproducer(source, name, ("canonicalize",))
            ) from error
        run_passes(module, _BUFFERIZE, name)
        function = next(op.operation for op in module.body if op.operation.name == "func.func")
        check_state(function, states)
        nbytes = place_buffers(function, _SCRATCH, _ROWS, bound, chunk)
        run_passes(module, ("canonicalize", "cse"), name)
        return _text(module, name), nbytes


def _text(module: ir.Module, name: str) -> str:
    """The module's functions and constants as text that can stand in any module."""
    parts = []
    for op in module.body:
        parts.append(op.operation.get_asm(use_local_scope=True))
    text = "\n".join(parts).replace("@__constant_", f"@{name}_constant_")
    return "".join(f"  {line}\n" for line in text.splitlines())
