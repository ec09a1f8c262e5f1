"""The arena plan: where each buffer of activations lives during a call.

Buffers whose lifetimes overlap get disjoint places; others share. Sizes are those of a chunk with
its most rows, so a plan holds for every call and nothing is allocated while a model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bessemer.artifact.layout import align
from bessemer.codegen.program import Program
from bessemer.codegen.views import Buffer


@dataclass(frozen=True)
class Lifetime:
    """Calls [first, last] during which a buffer holds something."""

    buffer: Buffer
    first: int
    last: int
    nbytes: int


@dataclass(frozen=True)
class ArenaPlan:
    """offsets, sizes: buffer -> byte offset in the arena, and bytes of it."""

    offsets: dict[Buffer, int]
    sizes: dict[Buffer, int]
    lifetimes: tuple[Lifetime, ...]
    nbytes: int


def plan_arena(program: Program, rows: int, *, share: bool = True) -> ArenaPlan:
    """First fit in order of birth: the lowest gap that is free for the buffer's whole life.
    Equal layers so get equal places, which lets the main graph loop over them.

    share: False gives every buffer a place of its own, where it can be read after the call.
    """
    lifetimes = _lifetimes(program, rows)
    offsets = _first_fit(lifetimes) if share else _one_by_one(lifetimes)
    total = max((offsets[life.buffer] + align(life.nbytes) for life in lifetimes), default=0)
    sizes = {life.buffer: life.nbytes for life in lifetimes}
    return ArenaPlan(offsets, sizes, lifetimes, total)


def _one_by_one(lifetimes: Sequence[Lifetime]) -> dict[Buffer, int]:
    offsets, at = {}, 0
    for life in lifetimes:
        offsets[life.buffer] = at
        at += align(life.nbytes)
    return offsets


def _first_fit(lifetimes: Sequence[Lifetime]) -> dict[Buffer, int]:
    offsets: dict[Buffer, int] = {}
    placed: list[tuple[Lifetime, int]] = []
    for life in lifetimes:
        busy = sorted(
            (at, at + align(other.nbytes))
            for other, at in placed
            if other.last >= life.first and life.last >= other.first
        )
        offset = 0
        for start, end in busy:
            if offset + life.nbytes <= start:
                break
            offset = max(offset, end)
        offsets[life.buffer] = offset
        placed.append((life, offset))
    return offsets


def _lifetimes(program: Program, rows: int) -> tuple[Lifetime, ...]:
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for i, call in enumerate(program.calls):
        for access in call.accesses:
            if access.view.buffer.kind == "arena":
                first.setdefault(access.view.buffer, i)
                last[access.view.buffer] = i
    if program.hidden is not None and program.hidden.buffer in first:
        last[program.hidden.buffer] = len(program.calls)
    return tuple(Lifetime(b, first[b], last[b], b.nbytes(rows)) for b in first)
