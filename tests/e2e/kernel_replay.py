"""Calls of kernels, noted while tests of the kernels run here, and called again by a program for
another processor with the same memory: what they leave there must be the same bytes.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.backend.target import Target
from bessemer.backend.tools import run_tool
from bessemer.codegen.group import CodegenTarget, GroupSpec
from tests.codegen import kernel_harness
from tests.codegen.kernel_harness import CompiledKernel, compiled_group, units_of
from tests.e2e.cross import zig_cc, zig_environment

PROGRAM = Path(__file__).with_name("kernel_replay.c")
ALIGNMENT = 64


@dataclass(frozen=True)
class Block:
    """Memory of a call: operands that overlap are in one. start: its address here."""

    start: int
    before: bytes
    after: bytes


@dataclass(frozen=True)
class Call:
    """A call of a kernel on all units. test: which one made it."""

    test: str
    spec: GroupSpec
    target: CodegenTarget
    rows: int
    scratch_bytes: int
    blocks: tuple[Block, ...]
    operands: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]  # address, sizes, strides
    literals: tuple[int, ...]

    def words(self, kernel: int, offset_of: dict[bytes, int]) -> list[int]:
        """As kernel_replay.c reads it. offset_of: where contents of memory are in the file."""
        units = units_of(self.spec, self.rows)
        words = [kernel, units, units // 2, self.scratch_bytes, self.rows, len(self.blocks)]
        for block in self.blocks:
            words += [len(block.before), block.start % ALIGNMENT]
            words += [offset_of[block.before], offset_of[block.after]]
        words.append(len(self.operands))
        for address, sizes, strides in self.operands:
            number = next(
                i
                for i, b in enumerate(self.blocks)
                if b.start <= address <= b.start + len(b.before)
            )
            words += [number, address - self.blocks[number].start, len(sizes), *sizes, *strides]
        return [*words, len(self.literals), *self.literals]


class Recorder:
    """Notes the calls of kernels while it is in place, and makes the tests' target `wide`.

    A kernel is noted once for each number of rows, by what all of its ranges leave behind.
    """

    def __init__(self, patch: pytest.MonkeyPatch, modules: Sequence[Any], wide: CodegenTarget):
        self.calls: list[Call] = []
        self.test = ""
        self._known: set[object] = set()
        original = CompiledKernel.__call__

        def target(_: int = 8, kv: str = "f32", *__: object, **___: object) -> CodegenTarget:
            return replace(wide, kv_dtype=kv)

        def call(
            kernel: CompiledKernel,
            rows: int,
            operands: Sequence[np.ndarray],
            literals: Sequence[int] = (),
            **how: Any,
        ) -> None:
            if kernel.spec.kind == "kv_update" and kernel.target.kv_dtype == "f16":
                _avoid_ties(operands[:2])
            ranges = _ranges(operands)
            before = [_bytes(*r) for r in ranges]
            original(kernel, rows, operands, literals, **how)
            self._note(kernel, rows, operands, literals, ranges, before)

        patch.setattr(CompiledKernel, "__call__", call)
        for module in (kernel_harness, *modules):
            patch.setattr(module, "codegen_target", target)

    def _note(
        self,
        kernel: CompiledKernel,
        rows: int,
        operands: Sequence[np.ndarray],
        literals: Sequence[int],
        ranges: list[tuple[int, int]],
        before: list[bytes],
    ) -> None:
        key = (kernel.spec, kernel.target, rows)
        if key in self._known:
            return
        self._known.add(key)
        blocks = (Block(r[0], b, _bytes(*r)) for r, b in zip(ranges, before, strict=True))
        views = (
            (a.ctypes.data, a.shape, tuple(s // a.itemsize for s in a.strides)) for a in operands
        )
        self.calls.append(
            Call(
                self.test,
                kernel.spec,
                kernel.target,
                rows,
                kernel.scratch_bytes,
                tuple(blocks),
                tuple(views),
                tuple(int(n) for n in literals),
            )
        )


def _ranges(operands: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """[start, end) of the memory that operands lie in, those that overlap as one."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(np.lib.array_utils.byte_bounds(a) for a in operands):
        if found and low < found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


def _avoid_ties(rows: Sequence[np.ndarray]) -> None:
    """Move numbers that lie halfway between two of f16 a little: there Bochs 2.7 rounds away from
    zero, where processors round to even.
    """
    for array in rows:
        bits = array.view(np.uint32)
        bits[bits & 0x1FFF == 0x1000] |= 1


def _bytes(start: int, end: int) -> bytes:
    return ctypes.string_at(start, end - start)


def replay_program(calls: Sequence[Call], machine: Target, out: Path) -> tuple[Path, Path]:
    """The program with the kernels as compiled for `machine`, and its file of calls."""
    out.mkdir(parents=True)
    kernels = list(dict.fromkeys((call.spec, call.target) for call in calls))
    objects = []
    for number, (spec, target) in enumerate(kernels):
        own = replace(target, pair_dot=machine.pair_dot)
        objects.append(out / f"kernel_{number}.o")
        objects[-1].write_bytes(compiled_group(spec, own, machine, f"kernel_{number}"))
    names = [f"_mlir_ciface_kernel_{number}" for number in range(len(kernels))]
    table = "".join(f"void {name}(void);\n" for name in names)
    table += "static void (*const kernels[])(void) = {" + ", ".join(names) + "};\n"
    (out / "kernels.h").write_text(table)
    command = [*zig_cc(machine), "-std=c11", "-O1", f"-I{out}", str(PROGRAM), *map(str, objects)]
    run_tool([*command, "-lm", "-o", str(out / "replay")], env=zig_environment())
    (out / "calls.bin").write_bytes(_file(calls, kernels))
    return out / "replay", out / "calls.bin"


def _file(calls: Sequence[Call], kernels: list[tuple[GroupSpec, CodegenTarget]]) -> bytes:
    blocks = itertools.chain.from_iterable(call.blocks for call in calls)
    contents = list(dict.fromkeys(b for block in blocks for b in (block.before, block.after)))

    def words(offset_of: dict[bytes, int]) -> np.ndarray:
        each = (call.words(kernels.index((call.spec, call.target)), offset_of) for call in calls)
        return np.array([len(calls), *itertools.chain.from_iterable(each)], np.int64)

    at = words(dict.fromkeys(contents, 0)).nbytes
    offset_of = {}
    for content in contents:
        offset_of[content] = at
        at += len(content)
    return words(offset_of).tobytes() + b"".join(contents)
