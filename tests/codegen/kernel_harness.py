"""Compiles a group's scheduled kernel and calls it from NumPy, split into ranges like threads."""

from __future__ import annotations

import ctypes
import itertools
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from bessemer.artifact.layout import PAGE, KVLayer, StateLayout
from bessemer.backend.codegen import compile_module
from bessemer.backend.link import link_shared
from bessemer.backend.target import Target
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import (
    KERNELS,
    ROWS,
    BlockUnits,
    CodegenTarget,
    GroupSpec,
    Operand,
    signature,
)

CANARY = 4096  # bytes behind the scratch that a kernel must leave alone
# Those of AVX-512, AVX2, and of 128 bits; LLVM splits what this machine has no registers for.
LANES = (16, 8, 4)


def codegen_target(
    lanes: int = 8, kv: str = "f32", registers: int = 16, pair_dot: str | None = None
) -> CodegenTarget:
    """pair_dot: None for this machine's instruction at its own width, else the generic form."""
    native = Target.native()
    if pair_dot is None:
        pair_dot = native.pair_dot if native.f32_lanes == lanes else ""
    return CodegenTarget(lanes, registers, 64, kv, pair_dot, native.loads_halves)


def aligned(nbytes: int) -> np.ndarray:
    """uint8[nbytes] on a page boundary, filled with a pattern that reads as NaN."""
    room = np.full(nbytes + PAGE, 0xFF, np.uint8)
    start = -room.ctypes.data % PAGE
    return room[start : start + nbytes]


def descriptor(array: np.ndarray) -> ctypes.Structure:
    """MLIR's memref descriptor of an array (its strides are kept)."""
    rank = array.ndim

    class Memref(ctypes.Structure):
        _fields_ = [
            ("allocated", ctypes.c_void_p),
            ("aligned", ctypes.c_void_p),
            ("offset", ctypes.c_int64),
            ("sizes", ctypes.c_int64 * rank),
            ("strides", ctypes.c_int64 * rank),
        ]

    strides = [s // array.itemsize for s in array.strides]
    sizes = (ctypes.c_int64 * rank)(*array.shape)
    at = array.ctypes.data
    return Memref(at, at, 0, sizes, (ctypes.c_int64 * rank)(*strides))


def compiled_group(
    spec: GroupSpec, target: CodegenTarget, machine: Target, name: str = "group"
) -> bytes:
    """An object file with the kernel as the function `_mlir_ciface_NAME`."""
    fn = Fn(name, signature(spec), attributes="llvm.emit_c_interface")
    KERNELS[spec.kind].emit(fn, spec, target)
    return compile_module(f"module {{\n{fn.text()}}}\n", machine, spec.kind).object


@cache
def _library(spec: GroupSpec, target: CodegenTarget, machine: Target) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        path.write_bytes(compiled_group(spec, target, machine))
        link_shared([path], out, machine)
        return ctypes.CDLL(str(out))


def units_of(spec: GroupSpec, rows: int) -> int:
    units = KERNELS[spec.kind].units(spec)
    if units == ROWS:
        return rows
    if isinstance(units, BlockUnits):
        return units.heads * -(-rows // units.block)
    assert isinstance(units, int)
    return units


class CompiledKernel:
    """A kernel as a callable: `kernel(rows, operands, literals, threads=3, order="reversed")`."""

    def __init__(
        self, spec: GroupSpec, target: CodegenTarget, machine: Target | None = None
    ) -> None:
        self.spec, self.target = spec, target
        library = _library(spec, target, machine or Target.native())
        # A name of its own for each instance: argument types are set per object.
        self.function = library["_mlir_ciface_group"]
        self.function.restype = None
        self.scratch_bytes = KERNELS[spec.kind].thread_scratch(spec, target)

    def __call__(
        self,
        rows: int,
        operands: Sequence[np.ndarray],
        literals: Sequence[int] = (),
        *,
        threads: int = 1,
        order: str = "forward",
    ) -> None:
        """Run all units, split over `threads`, in "forward", "reversed" or "concurrent" order."""
        units = units_of(self.spec, rows)
        bounds = [units * i // threads for i in range(threads + 1)]
        ranges = list(itertools.pairwise(bounds))
        if order == "concurrent":
            workers = [
                threading.Thread(target=self.run, args=(*r, rows, operands, literals))
                for r in ranges
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            return
        for begin, end in reversed(ranges) if order == "reversed" else ranges:
            self.run(begin, end, rows, operands, literals)

    def run(
        self,
        begin: int,
        end: int,
        rows: int,
        operands: Sequence[np.ndarray],
        literals: Sequence[int],
    ) -> None:
        scratch = aligned(self.scratch_bytes + CANARY)
        held = [descriptor(a) for a in (scratch[: self.scratch_bytes], *operands)]
        pointers = [ctypes.byref(d) for d in held]
        numbers = [ctypes.c_int64(n) for n in literals]
        head = [ctypes.c_int64(n) for n in (begin, end, rows)]
        self.function(*head, *pointers, *numbers)
        assert (scratch[self.scratch_bytes :] == 0xFF).all(), "wrote behind its scratch"


def row_operand(
    element: str, shape: tuple[int, ...], row_stride: int | None = None, rows: int | str = ROWS
) -> Operand:
    """An operand [rows, *shape]; with a row stride, a slice of a wider buffer."""
    if row_stride is None:
        return Operand(element, (rows, *shape))
    inner = [1]
    for size in reversed(shape[1:]):
        inner.insert(0, inner[0] * size)
    return Operand(element, (rows, *shape), (row_stride, *inner))


class Cache:
    """State memory whose cache rows are NaN until a kernel writes them, and its update kernel."""

    def __init__(
        self,
        layers: Sequence[KVLayer],
        target: CodegenTarget,
        *,
        capacity: int = 256,
        chunk: int = 64,
        slots: int = 1,
        slot: int = 0,
    ) -> None:
        self.target = target
        self.layout = StateLayout(tuple(layers), target.kv_dtype, capacity, chunk, slots)
        self.state = aligned(self.layout.nbytes)
        header = self.layout.header()
        self.state[: header.nbytes] = header.view(np.uint8)
        self.state = self.state.view(np.int8)
        self.slot = slot
        self.held: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def slots(self, rows: int) -> np.ndarray:
        return np.full(rows, self.slot, np.int64)

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """What the cache keeps of x."""
        if self.target.kv_dtype == "f32":
            return x
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)

    def append(
        self, entry: int, k: np.ndarray, v: np.ndarray, positions: np.ndarray, **how: object
    ) -> None:
        """Write rows by the kernel; `held` keeps what NumPy says the cache holds."""
        layer = self.layout.layers[entry]
        spec = kv_update_spec(layer)
        kernel = CompiledKernel(spec, self.target)
        operands = (k, v, positions, self.slots(len(positions)), self.state)
        kernel(len(positions), operands, (entry,), **how)  # type: ignore[arg-type]
        new = (self.rounded(k), self.rounded(v), positions)
        old = self.held.get(entry)
        if old is not None:
            keep = old[2] < positions.min()
            joined = (np.concatenate([o[keep], n]) for o, n in zip(old, new, strict=True))
            self.held[entry] = tuple(joined)  # type: ignore[assignment]
        else:
            self.held[entry] = new

    def region(self, entry: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Views of the layer's keys [Hkv, blocks, D, 32] and values [Hkv, rows, Dv], its rows."""
        layer = self.layout.layers[entry]
        words = self.layout.header()
        k_at, v_at, rows = (int(n) for n in words[8 + 4 * entry :][:3])
        base = self.layout.header_bytes + self.slot * int(words[2])
        dtype = np.dtype({"f16": np.float16, "f32": np.float32}[self.target.kv_dtype])

        def view(at: int, shape: tuple[int, ...]) -> np.ndarray:
            nbytes = int(np.prod(shape)) * dtype.itemsize
            return self.state[base + at :][:nbytes].view(dtype).reshape(shape)

        keys = view(k_at, (layer.kv_heads, rows // 32, layer.key_width, 32))
        return keys, view(v_at, (layer.kv_heads, rows, layer.value_width)), rows


def kv_update_spec(layer: KVLayer) -> GroupSpec:
    return GroupSpec(
        "kv_update",
        (
            row_operand("f32", (layer.kv_heads, layer.key_width)),
            row_operand("f32", (layer.kv_heads, layer.value_width)),
            Operand("i64", (ROWS,)),
            Operand("i64", (ROWS,)),
            Operand("i8", (ROWS,), role="state"),
        ),
        ("entry",),
    )
