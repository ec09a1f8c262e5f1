"""Memory of a group's temporaries: after bufferization, each becomes a part of the scratch memory.

Small fixed ones go to the stack, where LLVM turns them into registers. The rest are views into the
thread's scratch at offsets that are known at compile time, for the largest number of rows; two
temporaries whose lives do not overlap share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bessemer.artifact.layout import ALIGN, align
from bessemer.errors import CompileError

if TYPE_CHECKING:
    import mlir.ir as ir

# Sums and other statistics of a row stay below it; all of them together below the second number.
STACK_BUFFER_BYTES = 1024
STACK_BYTES = 4096

_ELEMENT_BYTES = {"i1": 1, "i8": 1, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "index": 8}
_ALIASES = (
    "memref.subview",
    "memref.cast",
    "memref.expand_shape",
    "memref.collapse_shape",
    "memref.reinterpret_cast",
    "memref.view",
    "memref.transpose",
    "arith.select",
)

ExtentBound = Callable[[int, int], int]  # (argument, axis) -> most elements


@dataclass
class _Buffer:
    """A temporary: its op, its life as an interval of op numbers, its bytes at most."""

    op: Any
    start: int
    end: int
    nbytes: int
    offset: int = 0


class _Numbering:
    """Numbers ops so that an op's interval contains those of the ops inside it."""

    def __init__(self, function: ir.Operation) -> None:
        self.intervals: dict[Any, tuple[int, int]] = {}
        self._count = 0
        self._visit(function)

    def _visit(self, op: ir.Operation) -> None:
        start = self._count
        self._count += 1
        for inner in _children(op):
            self._visit(inner)
        self.intervals[op] = (start, self._count)
        self._count += 1


def _children(op: ir.Operation) -> Iterator[ir.Operation]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation


def _walk(op: ir.Operation) -> Iterator[ir.Operation]:
    for inner in _children(op):
        yield inner
        yield from _walk(inner)


def place_buffers(
    function: ir.Operation, scratch: int, rows: int, bound: ExtentBound, chunk: int
) -> int:
    """Replace the `memref.alloc` ops of a `func.func`; returns the bytes of scratch that it needs.

    scratch, rows: numbers of the arguments that are the scratch memory (memref<?xi8>, aligned to 64
    bytes) and the row count, which is at most `chunk`. bound: most elements of an argument's
    symbolic dimension. Raises CompileError when a temporary escapes or its size has no known bound.
    """
    import mlir.ir as ir

    block = function.regions[0].blocks[0]
    extents = _Extents(block, rows, bound, chunk)
    large, on_stack = [], 0
    for op in list(_walk(function)):
        if op.name == "memref.dealloc":
            op.erase()
        elif op.name == "memref.alloc":
            nbytes = _nbytes(op, extents)
            static = not len(op.operands)
            if static and nbytes <= STACK_BUFFER_BYTES and on_stack + nbytes <= STACK_BYTES:
                on_stack += align(nbytes)
                _to_stack(op, block)
            else:
                large.append((op, nbytes))
    # An op's hash follows its operands: numbers hold until the next change.
    numbers = _Numbering(function)
    buffers = [_Buffer(op, *_life(op, numbers), nbytes) for op, nbytes in large]
    total = _assign(buffers)
    with function.location, function.context:
        index = ir.IndexType.get()
        for buffer in buffers:
            with ir.InsertionPoint(buffer.op):
                offset = ir.Operation.create(
                    "arith.constant",
                    results=[index],
                    attributes={"value": ir.IntegerAttr.get(index, buffer.offset)},
                )
                view = ir.Operation.create(
                    "memref.view",
                    results=[buffer.op.results[0].type],
                    operands=[block.arguments[scratch], offset.results[0], *buffer.op.operands],
                )
            buffer.op.results[0].replace_all_uses_with(view.results[0])
            buffer.op.erase()
    return total


def _to_stack(op: ir.Operation, block: ir.Block) -> None:
    import mlir.ir as ir

    with op.location, ir.InsertionPoint.at_block_begin(block):
        made = ir.Operation.create(
            "memref.alloca",
            results=[op.results[0].type],
            attributes={
                "operandSegmentSizes": ir.DenseI32ArrayAttr.get([0, 0]),
                "alignment": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), ALIGN),
            },
        )
    op.results[0].replace_all_uses_with(made.results[0])
    op.erase()


def _nbytes(op: ir.Operation, extents: _Extents) -> int:
    import mlir.ir as ir

    type_ = ir.MemRefType(op.results[0].type)
    dynamic = iter(op.operands)
    total = _ELEMENT_BYTES[str(type_.element_type)]
    for axis in range(type_.rank):
        if type_.is_dynamic_dim(axis):
            total *= extents.most(next(dynamic))
        else:
            total *= type_.get_dim_size(axis)
    return max(total, 1)


def _life(op: ir.Operation, numbers: _Numbering) -> tuple[int, int]:
    """From the allocation to its last use, widened to whole loops around uses deeper inside."""
    import mlir.ir as ir

    start, end = numbers.intervals[op]
    home = op.parent
    pending, seen = [op.results[0]], set()
    while pending:
        value = pending.pop()
        for use in value.uses:
            user = use.owner.operation
            end = max(end, _end_in(user, home, numbers))
            followers: list[Any] = []
            if user.name in _ALIASES:
                followers = list(user.results)
            elif user.name == "scf.for" and use.operand_number >= 3:
                at = use.operand_number - 3
                followers = [user.results[at], user.regions[0].blocks[0].arguments[at + 1]]
            elif user.name == "scf.yield":
                followers = [user.parent.operation.results[use.operand_number]]
            elif user.name in ("func.return", "func.call"):
                raise CompileError(f"a temporary escapes its function: {op}")
            for value in followers:
                if isinstance(value.type, ir.MemRefType) and value not in seen:
                    seen.add(value)
                    pending.append(value)
    return start, end


def _end_in(user: ir.Operation, home: Any, numbers: _Numbering) -> int:
    """End of the op in `home` that contains the user."""
    inner = user
    while inner.parent.operation != home.operation:
        inner = inner.parent.operation
        if inner.name == "func.func":
            raise CompileError(f"a temporary outlives the loop that makes it: {user}")
    return numbers.intervals[inner][1]


def _assign(buffers: Sequence[_Buffer]) -> int:
    """First fit, in the order of the program. Returns the bytes in use."""
    total = 0
    for i, buffer in enumerate(buffers):
        taken = sorted(
            (b.offset, b.offset + b.nbytes)
            for b in buffers[:i]
            if b.start <= buffer.end and buffer.start <= b.end
        )
        at = 0
        for low, high in taken:
            if at + buffer.nbytes <= low:
                break
            at = max(at, align(high))
        buffer.offset = at
        total = max(total, at + buffer.nbytes)
    return align(total)


class _Extents:
    """Upper bounds of index values that sizes are made of."""

    def __init__(self, block: ir.Block, rows: int, bound: ExtentBound, chunk: int) -> None:
        self._arguments = list(block.arguments)
        self._rows, self._bound, self._chunk = rows, bound, chunk

    def most(self, value: Any) -> int:
        """The value when the rows are as many as can be. Raises CompileError if it can't tell."""
        import mlir.ir as ir

        if value == self._arguments[self._rows]:
            return self._chunk
        op = value.owner
        name = op.name if isinstance(op, ir.Operation) else getattr(op, "name", "")
        if name == "arith.constant":
            return int(ir.IntegerAttr(op.attributes["value"]).value)
        if name == "memref.dim" and op.operands[0] in self._arguments:
            axis = self.most(op.operands[1])
            return self._bound(self._arguments.index(op.operands[0]), axis)
        combine = _COMBINE.get(name)
        if combine is None:
            raise CompileError(f"the size of a temporary has no known bound: {value}")
        return combine(*(self.most(v) for v in op.operands))


_COMBINE: dict[str, Callable[[int, int], int]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: max(a - b, 0),
    "arith.muli": lambda a, b: a * b,
    "arith.divui": lambda a, b: a // b,
    "arith.maxsi": max,
    "arith.minsi": min,
}


def check_state(function: ir.Operation, states: Sequence[int]) -> None:
    """Raise CompileError where a whole state (one of the arguments `states`) is copied."""
    import mlir.ir as ir

    arguments = list(function.regions[0].blocks[0].arguments)
    held = [arguments[i] for i in states]
    for op in _walk(function):
        if op.name not in ("memref.copy", "linalg.copy"):
            continue
        for value in op.operands:
            base, whole = value, True
            while isinstance(base.owner, ir.Operation) or hasattr(base.owner, "operands"):
                owner = base.owner
                if owner.name not in _ALIASES:
                    break
                whole = whole and owner.name != "memref.subview"
                base = owner.operands[0]
            if whole and base in held:
                raise CompileError(f"a group would copy a whole state each time it runs: {op}")
