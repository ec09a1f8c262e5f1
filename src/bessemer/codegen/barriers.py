"""Where the threads must meet: derived from what each group declares that it reads and writes.

Every thread walks the whole program. Between a write and an access of the same memory by another
thread there must be a barrier, except that row-split groups over the same rows only touch their own
rows of a buffer, and groups that one thread runs alone follow each other in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.codegen.group import ROWS
from bessemer.codegen.memory import ArenaPlan
from bessemer.codegen.program import Call, Program
from bessemer.codegen.views import Buffer
from bessemer.errors import CompileError
from bessemer.graph.dims import Size


@dataclass(frozen=True)
class Touch:
    """One region that a call touches. rows: set when the call only touches its own rows of it."""

    region: str
    start: int
    end: int
    writes: bool
    split: str
    rows: Size | None
    buffer: Buffer | None


def touches(call: Call, plan: ArenaPlan) -> list[Touch]:
    """Memory of a call that other calls may touch as well. Weights and inputs are never written."""
    split = call.split
    found = []
    for access, operand in zip(call.accesses, call.spec.operands, strict=True):
        buffer = access.view.buffer
        own = split == "rows" and bool(operand.shape) and operand.shape[0] == ROWS
        rows = call.rows if own else None
        writes = access.role == "out"
        if buffer.kind == "arena":
            start = plan.offsets[buffer]
            end = start + plan.sizes[buffer]
            found.append(Touch("arena", start, end, writes, split, rows, buffer))
        elif buffer.kind in ("output", "state"):
            region = f"{buffer.kind}:{buffer.name}"
            found.append(Touch(region, 0, 1, writes, split, rows, None))
    for name, writes in call.resources:
        found.append(Touch(name, 0, 1, writes, split, None, None))
    return found


def conflict(a: Touch, b: Touch) -> bool:
    """Whether b, after a in another thread, needs a barrier between."""
    if a.region != b.region or a.end <= b.start or b.end <= a.start:
        return False
    if not (a.writes or b.writes):
        return False
    if a.split == b.split == "single":
        return False
    same_rows = a.rows is not None and a.rows == b.rows
    return not (same_rows and a.buffer is not None and a.buffer is b.buffer)


def place_barriers(program: Program, plan: ArenaPlan) -> list[bool]:
    """For each call, whether the threads meet before it."""
    flags = []
    open_touches: list[Touch] = []
    for call in program.calls:
        now = touches(call, plan)
        needed = any(conflict(a, b) for a in open_touches for b in now)
        flags.append(needed)
        open_touches = now if needed else open_touches + now
    return flags


def verify_barriers(program: Program, plan: ArenaPlan, flags: list[bool]) -> None:
    """Checks every pair of calls against the barriers between them. Raises CompileError."""
    history = [touches(call, plan) for call in program.calls]
    for j in range(len(history)):
        for i in range(j - 1, -1, -1):
            if any(flags[i + 1 : j + 1]):
                break
            if any(conflict(a, b) for a in history[i] for b in history[j]):
                a, b = program.calls[i], program.calls[j]
                raise CompileError(
                    f"{program.name}: no barrier between {a.spec.kind} ({a.label}) and "
                    f"{b.spec.kind} ({b.label}), which touch the same memory"
                )
