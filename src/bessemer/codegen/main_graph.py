"""The main graphs: `forward_prefill` and `forward_decode`.

The outer function has the C interface; it packs its arguments and forks once. Every thread then
runs the worker: it walks the calls in order, takes its range of units in each, and meets the others
at the barriers that `barriers` placed. Layers that differ only in numbers are one loop whose
numbers come from a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bessemer.artifact.layout import ScratchLayout
from bessemer.artifact.work import OUTSIDE, POLL, ProfileLayout
from bessemer.codegen.emit import Fn, memref_type
from bessemer.codegen.group import (
    ELEMENT_BYTES,
    KERNELS,
    ROWS,
    BlockUnits,
    Operand,
    Units,
    signature,
)
from bessemer.codegen.memory import ArenaPlan
from bessemer.codegen.program import Access, Call, Program
from bessemer.codegen.repeats import Segment, find_repeats
from bessemer.graph.dims import Dim, Size

# Arguments of an entry point after the context, in order: name and memref type.
ARGUMENTS = (
    ("weights", "memref<?xi8>"),
    ("ids", "memref<?xi64>"),
    ("positions", "memref<?xi64>"),
    ("slots", "memref<?xi64>"),
    ("output_rows", "memref<?xi64>"),
    ("state", "memref<?xi8>"),
    ("scratch", "memref<?xi8>"),
    ("logits", "memref<?x?xf32>"),
)
# Words that the outer function packs for the workers: the context, a pointer per argument, T and R.
WORDS = ("ctx", *(name for name, _ in ARGUMENTS), "T", "R")
# Byte offsets in `bsm_context` (native/bessemer.h).
CTX_SEQUENCE_LENGTH = 16
CTX_HIDDEN = 24

_DESCRIPTOR = "!llvm.struct<(ptr, ptr, i64, array<1 x i64>, array<1 x i64>)>"
_RUNTIME = (
    "  func.func private @bsm_fork(!llvm.ptr, !llvm.ptr, !llvm.ptr)\n"
    "  func.func private @bsm_barrier(!llvm.ptr, i64)\n"
    "  func.func private @bsm_poll_cancel(!llvm.ptr, i64) -> i32\n"
)
_MARK = "  func.func private @bsm_profile_mark(!llvm.ptr, i64)\n"
_WORKER_TYPE = "(!llvm.ptr, i64, i64) -> ()"


@dataclass(frozen=True)
class PlannedCall:
    """A call with its function, numbers and barrier. numbers: a byte offset for each operand, then
    the literals.
    """

    call: Call
    function: str
    numbers: tuple[int, ...]
    barrier: bool

    @property
    def key(self) -> tuple:
        """Equal keys differ only in their numbers."""
        bases = tuple(_base(a) for a in self.call.accesses)
        return (self.function, bases, self.barrier, str(self.call.rows))


def _base(access: Access) -> str:
    """Which pointer an operand is relative to."""
    buffer = access.view.buffer
    kinds = {"arena": "scratch", "weight": "weights", "state": "state", "session": "state"}
    return kinds.get(buffer.kind, buffer.name)


def plan_calls(
    program: Program,
    plan: ArenaPlan,
    flags: Sequence[bool],
    functions: Sequence[str],
    state_offsets: dict[str, int],
) -> list[PlannedCall]:
    planned = []
    for call, flag, function in zip(program.calls, flags, functions, strict=True):
        numbers = [_byte_offset(a, plan, state_offsets) for a in call.accesses]
        planned.append(PlannedCall(call, function, (*numbers, *call.literals), flag))
    return planned


def _byte_offset(access: Access, plan: ArenaPlan, state_offsets: dict[str, int]) -> int:
    buffer = access.view.buffer
    base = plan.offsets.get(buffer, buffer.offset)
    if buffer.kind == "state":
        base = state_offsets[buffer.name]
    return base + access.view.offset * ELEMENT_BYTES[buffer.element]


class _Worker:
    """Emission of one worker function."""

    def __init__(
        self, name: str, program: Program, scratch: ScratchLayout, profile: ProfileLayout | None
    ) -> None:
        self.fn = Fn(name, [("%args", "!llvm.ptr"), ("%tid", "i64"), ("%threads", "i64")])
        self.program = program
        self.scratch = scratch
        self.profile = profile
        self.globals: list[str] = []
        fn = self.fn
        self.words = {w: self._word(i) for i, w in enumerate(WORDS)}
        self.ctx = fn.op(f"llvm.inttoptr {self.words['ctx']} : i64 to !llvm.ptr")
        self.sizes = {n: fn.cast_index(self.words[n], "i64", "index") for n in ("T", "R")}
        self.thread = fn.cast_index("%tid", "i64", "index")
        self.threads = fn.cast_index("%threads", "i64", "index")
        self.is_first = fn.cmp("eq", self.thread, fn.index(0))
        self.bases = {name: self._bytes(self.words[name]) for name, _ in ARGUMENTS}
        length = fn.add(self.words["ctx"], fn.i64(CTX_SEQUENCE_LENGTH), "i64")
        self.bases["sequence_length"] = self._bytes(length)
        own = fn.mul(self.thread, fn.index(scratch.thread_bytes))
        at = fn.add(own, fn.index(scratch.shared_bytes))
        size = fn.index(scratch.thread_bytes)
        self.own_scratch = fn.op(
            f"memref.view {self.bases['scratch']}[{at}][{size}] : memref<?xi8> to memref<?xi8>"
        )
        if profile is not None:
            place = fn.cast_index(fn.offset(at, profile.offset), "index", "i64")
            address = fn.add(self.words["scratch"], place, "i64")
            self.marks = fn.op(f"llvm.inttoptr {address} : i64 to !llvm.ptr")
        self.mark(lambda p: OUTSIDE)

    def _word(self, i: int) -> str:
        fn = self.fn
        at = fn.op(f"llvm.getelementptr %args[{i}] : (!llvm.ptr) -> !llvm.ptr, i64")
        return fn.op(f"llvm.load {at} : !llvm.ptr -> i64")

    def _bytes(self, address: str) -> str:
        """Memory at an address as memref<?xi8>; its size is never asked for."""
        fn = self.fn
        pointer = fn.op(f"llvm.inttoptr {address} : i64 to !llvm.ptr")
        value = fn.op(f"llvm.mlir.undef : {_DESCRIPTOR}")
        parts = (("0", pointer), ("1", pointer), ("2", fn.i64(0)), ("3, 0", fn.i64(1 << 62)))
        for place, part in (*parts, ("4, 0", fn.i64(1))):
            value = fn.op(f"llvm.insertvalue {part}, {value}[{place}] : {_DESCRIPTOR}")
        return fn.op(f"builtin.unrealized_conversion_cast {value} : {_DESCRIPTOR} to memref<?xi8>")

    def mark(self, slot: Callable[[ProfileLayout], int]) -> None:
        """In a profiled build: the time since the last mark belongs to this slot."""
        if self.profile is not None:
            number = self.fn.i64(slot(self.profile))
            call = f"func.call @bsm_profile_mark({self.marks}, {number})"
            self.fn.line(f"{call} : (!llvm.ptr, i64) -> ()")

    def rows(self, size: Size) -> str:
        if isinstance(size, Dim):
            return self.sizes[size.terms[0][0]]
        return self.fn.index(size)

    def operand(self, access: Access, offset: str, operand: Operand) -> str:
        """The memref that a call's operand is."""
        fn = self.fn
        base = self.bases[_base(access)]
        if access.view.buffer.kind == "session":
            return base
        symbolic = [size for size in access.view.shape if isinstance(size, Dim)]
        dense = memref_type(operand.shape, operand.element)
        sizes = self.rows(symbolic[0]) if symbolic else ""
        if operand.type == dense:
            return fn.op(f"memref.view {base}[{offset}][{sizes}] : memref<?xi8> to {dense}")
        assert operand.strides is not None
        flat = memref_type((ROWS,), operand.element)
        one = sizes or fn.index(1)
        line = fn.op(f"memref.view {base}[{offset}][{one}] : memref<?xi8> to {flat}")
        shape = ", ".join(sizes if s == ROWS else str(s) for s in operand.shape)
        strides = ", ".join(map(str, operand.strides))
        return fn.op(
            f"memref.reinterpret_cast {line} to offset: [0], sizes: [{shape}], "
            f"strides: [{strides}] : {flat} to {operand.type}"
        )

    def unit_range(self, call: Call) -> tuple[str, str, str]:
        """(begin, end, rows) of this thread. One thread takes all the units of a single split."""
        fn = self.fn
        rows = self.rows(call.rows)
        units = self._units(call, rows)
        if call.split == "single":
            return fn.index(0), units, rows
        begin = fn.div(fn.mul(self.thread, units), self.threads)
        after = fn.add(self.thread, fn.index(1))
        return begin, fn.div(fn.mul(after, units), self.threads), rows

    def _units(self, call: Call, rows: str) -> str:
        fn = self.fn
        units: Units = ROWS if call.payload else KERNELS[call.spec.kind].units(call.spec)
        if isinstance(units, BlockUnits):
            padded = fn.offset(rows, units.block - 1)
            return fn.mul(fn.div(padded, fn.index(units.block)), fn.index(units.heads))
        return rows if isinstance(units, str) else fn.index(units)

    def emit_call(self, planned: PlannedCall, numbers: Sequence[str]) -> None:
        fn, call = self.fn, planned.call
        if planned.barrier:
            fn.line(f"func.call @bsm_barrier({self.ctx}, %tid) : (!llvm.ptr, i64) -> ()")
            self.mark(lambda p: p.wait_slot(planned.function))
        if call.split == "single":
            with fn.when(self.is_first):
                self._emit_group_call(planned, numbers)
        else:
            self._emit_group_call(planned, numbers)

    def _emit_group_call(self, planned: PlannedCall, numbers: Sequence[str]) -> None:
        fn, call = self.fn, planned.call
        begin, end, rows = self.unit_range(call)
        count = len(call.accesses)
        pairs = zip(call.accesses, numbers[:count], call.spec.operands, strict=True)
        operands = [self.operand(*triple) for triple in pairs]
        args = ", ".join([begin, end, rows, self.own_scratch, *operands, *numbers[count:]])
        types = ", ".join(t for _, t in signature(call.spec))
        fn.line(f"func.call @{planned.function}({args}) : ({types}) -> ()")
        self.mark(lambda p: p.work_slot(planned.function))

    def meet(self) -> None:
        """All threads wait for each other."""
        call = f"func.call @bsm_barrier({self.ctx}, %tid)"
        self.fn.line(f"{call} : (!llvm.ptr, i64) -> ()")
        self.mark(lambda p: POLL)

    def poll(self) -> str:
        """Meets the other threads and says (i1) whether to go on."""
        fn = self.fn
        name = "bsm_poll_cancel"
        stop = fn.op(f"func.call @{name}({self.ctx}, %tid) : (!llvm.ptr, i64) -> i32")
        self.mark(lambda p: POLL)
        zero = fn.constant("arith.constant 0 : i32")
        return fn.cmp("eq", stop, zero, "i32")

    def emit_segment(self, calls: Sequence[PlannedCall], segment: Segment) -> str | None:
        """Straight code, or a loop; a loop polls for a cancel after each turn and gives an i1."""
        fn = self.fn
        body = calls[segment.start : segment.start + segment.period]
        if segment.count == 1:
            for planned in body:
                self.emit_call(planned, [fn.index(n) for n in planned.numbers])
            return None
        table = _Table(self, calls, segment)
        true = fn.constant("arith.constant true")
        with fn.loop(fn.index(0), fn.index(segment.count), 1, [(true, "i1")]) as loop:
            go = fn.fresh("go")
            fn.line(f"{go} = scf.if {loop.args[0]} -> (i1) {{")
            for i, planned in enumerate(body):
                self.emit_call(planned, table.numbers(i, loop.iv))
            fn.line(f"scf.yield {self.poll()} : i1")
            fn.line("} else {")
            fn.line(f"scf.yield {fn.constant('arith.constant false')} : i1")
            fn.line("}")
            loop.carry(go)
        return loop.results[0]

    def emit_hidden(self, offset: int, width: int, rows: Size) -> None:
        """Copies the hidden rows to ctx->hidden when the caller gave one (thread 0)."""
        fn = self.fn
        at = fn.op(f"llvm.getelementptr {self.ctx}[{CTX_HIDDEN}] : (!llvm.ptr) -> !llvm.ptr, i8")
        address = fn.op(f"llvm.load {at} : !llvm.ptr -> i64")
        wanted = fn.cmp("ne", address, fn.i64(0), "i64")
        with fn.when(fn.op(f"arith.andi {wanted}, {self.is_first} : i1")):
            type_ = memref_type((ROWS, width), "f32")
            count = self.rows(rows)
            scratch = self.bases["scratch"]
            source = fn.op(
                f"memref.view {scratch}[{fn.index(offset)}][{count}] : memref<?xi8> to {type_}"
            )
            out = self._bytes(address)
            target = fn.op(f"memref.view {out}[{fn.index(0)}][{count}] : memref<?xi8> to {type_}")
            with (
                fn.loop(fn.index(0), count) as i,
                fn.loop(fn.index(0), fn.index(width)) as j,
            ):
                fn.store(fn.load(source, [i.iv, j.iv], type_), target, [i.iv, j.iv], type_)


class _Table:
    """The numbers of a loop's calls: those that change from turn to turn come from a table."""

    def __init__(self, worker: _Worker, calls: Sequence[PlannedCall], segment: Segment) -> None:
        self._fn = worker.fn
        self._columns: dict[tuple[int, int], int] = {}
        self._fixed: list[tuple[int, ...]] = []
        columns: list[list[int]] = []
        for i in range(segment.period):
            turns = [
                calls[segment.start + t * segment.period + i].numbers for t in range(segment.count)
            ]
            self._fixed.append(turns[0])
            for j, values in enumerate(zip(*turns, strict=True)):
                if len(set(values)) > 1:
                    self._columns[(i, j)] = len(columns)
                    columns.append(list(values))
        if not columns:
            return
        name = f"{worker.fn.name}_table{len(worker.globals)}"
        self._type = memref_type((segment.count, len(columns)), "i64")
        rows = ", ".join(f"[{', '.join(map(str, turn))}]" for turn in zip(*columns, strict=True))
        worker.globals.append(
            f'  memref.global "private" constant @{name} : {self._type} = dense<[{rows}]>\n'
        )
        self._table = self._fn.constant(f"memref.get_global @{name} : {self._type}")

    def numbers(self, call: int, turn: str) -> list[str]:
        fn = self._fn
        result = []
        for j, value in enumerate(self._fixed[call]):
            column = self._columns.get((call, j))
            if column is None:
                result.append(fn.index(value))
            else:
                word = fn.load(self._table, [turn, fn.index(column)], self._type)
                result.append(fn.cast_index(word, "i64", "index"))
        return result


def _emit_outer(name: str, worker: str) -> str:
    """The entry point: packs the argument words and forks the workers."""
    args = [("%ctx", "!llvm.ptr"), *((f"%{n}", t) for n, t in ARGUMENTS)]
    fn = Fn(name, args, attributes="llvm.emit_c_interface")
    block = fn.op(f"llvm.alloca {fn.i64(len(WORDS))} x i64 : (i64) -> !llvm.ptr")
    values = [fn.op("llvm.ptrtoint %ctx : !llvm.ptr to i64")]
    for argument, type_ in ARGUMENTS:
        pointer = fn.op(f"memref.extract_aligned_pointer_as_index %{argument} : {type_} -> index")
        values.append(fn.cast_index(pointer, "index", "i64"))
    types = dict(ARGUMENTS)
    for source in ("ids", "output_rows"):
        size = fn.op(f"memref.dim %{source}, {fn.index(0)} : {types[source]}")
        values.append(fn.cast_index(size, "index", "i64"))
    for i, value in enumerate(values):
        at = fn.op(f"llvm.getelementptr {block}[{i}] : (!llvm.ptr) -> !llvm.ptr, i64")
        fn.line(f"llvm.store {value}, {at} : i64, !llvm.ptr")
    task = fn.op(f"func.constant @{worker} : {_WORKER_TYPE}")
    task = fn.op(f"builtin.unrealized_conversion_cast {task} : {_WORKER_TYPE} to !llvm.ptr")
    call = f"func.call @bsm_fork(%ctx, {task}, {block})"
    fn.line(f"{call} : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> ()")
    return fn.text()


def emit_main_graph(
    program: Program,
    calls: Sequence[PlannedCall],
    plan: ArenaPlan,
    scratch: ScratchLayout,
    profile: ProfileLayout | None = None,
) -> str:
    """MLIR of the module `program.name`: tables, group declarations, worker, entry point.

    profile: set for code that measures itself (see `artifact.work`).
    """
    worker_name = f"{program.name}_worker"
    worker = _Worker(worker_name, program, scratch, profile)
    fn = worker.fn
    go: str | None = None
    open_ifs = 0
    for segment in find_repeats([c.key for c in calls]):
        result = worker.emit_segment(calls, segment)
        if result is not None:
            go = result
            fn.line(f"scf.if {go} {{")
            open_ifs += 1
    if program.hidden is not None:
        if any(c.call.split != "single" for c in calls):
            worker.meet()
        view = program.hidden
        width = view.shape[-1]
        assert isinstance(width, int)
        worker.emit_hidden(plan.offsets[view.buffer] + view.offset * 4, width, view.shape[0])
    for _ in range(open_ifs):
        fn.line("}")
    declared = {c.function: signature(c.call.spec) for c in calls}
    declarations = "".join(
        f"  func.func private @{name}({', '.join(t for _, t in args)})\n"
        for name, args in declared.items()
    )
    outer = _emit_outer(program.name, worker_name)
    runtime = _RUNTIME if profile is None else _RUNTIME + _MARK
    parts = ["module {\n", *worker.globals, runtime, declarations, worker.fn.text(), outer, "}\n"]
    return "".join(parts)
