"""What the processor can do: multiply-adds per second and bytes read per second, measured here.

Two small functions are compiled through the same backend as models and run on the same thread pool:
a loop of multiply-adds that stay in registers, and a sum over more memory than any cache holds.
Their best of several runs is the peak that measured models are compared with.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.backend.target import Target
from bessemer.codegen.emit import Fn
from bessemer.errors import BessemerError
from bessemer.runtime.cpu import cpu_name, default_threads, host_arch
from bessemer.runtime.library import Context
from bessemer.runtime.memory import allocate
from bessemer.runtime.weights import available_memory

# Independent chains of the multiply-add loop: latency (4) times units (2 on x86 with 16 registers,
# up to 4 where there are 32), with room for the two operands.
CHAINS = {16: 12, 32: 24}
FMA_LOOPS = 4_000_000
"""Turns of that loop: some 10 ms."""
READ_VECTORS = 8
"""Vectors per turn of the reading loop, each with a sum of its own: two cache lines or more."""
# Memory that is read: four times the last cache, and enough that its start and end don't count.
CACHES_READ = 4
LEAST_READ_BYTES = 256 << 20
LINE = 64
REPEAT = 5

_WORDS = 3  # of a probe's arguments: count or bytes per thread, memory, results


@dataclass(frozen=True)
class Peaks:
    """threads: that took part.  flops: per second, a multiply-add being two.  bytes: read per
    second from memory.
    """

    threads: int
    flops: float
    bytes: float

    def best(self, other: Peaks) -> Peaks:
        """The higher of two measurements, each by itself."""
        return Peaks(self.threads, max(self.flops, other.flops), max(self.bytes, other.bytes))


def vector_lanes(target: Target) -> int:
    """f32 values of the widest vector that the processor has."""
    return 16 if "avx512f" in target.features else target.f32_lanes


def _registers(target: Target) -> int:
    return 16 if target.arch == "x86_64" and "avx512f" not in target.features else 32


def _task(name: str) -> tuple[Fn, list[str]]:
    """A pool task (see native/bessemer.h) and the words of its argument block."""
    fn = Fn(
        name,
        [("%args", "!llvm.ptr"), ("%tid", "i64"), ("%threads", "i64")],
    )
    words = []
    for i in range(_WORDS):
        at = fn.op(f"llvm.getelementptr %args[{i}] : (!llvm.ptr) -> !llvm.ptr, i64")
        words.append(fn.op(f"llvm.load {at} : !llvm.ptr -> i64"))
    return fn, words


def _keep(fn: Fn, value: str, kind: str, results: str) -> None:
    """Store a thread's result on a cache line of its own, so that computing it counts."""
    at = fn.add(results, fn.mul("%tid", fn.i64(LINE), "i64"), "i64")
    pointer = fn.op(f"llvm.inttoptr {at} : i64 to !llvm.ptr")
    fn.line(f"llvm.store {value}, {pointer} : {kind}, !llvm.ptr")


def fma_probe(target: Target) -> str:
    """MLIR of `fma`: each thread does count * chains * lanes multiply-adds."""
    lanes, chains = vector_lanes(target), CHAINS[_registers(target)]
    kind = f"vector<{lanes}xf32>"
    fn, (count, _, results) = _task("fma")
    # x <- x * 0.9999 + 0.001 stays near 10 and never becomes denormal.
    factor, addend = fn.splat(0.9999, lanes), fn.splat(1e-3, lanes)
    start = [(fn.splat(i + 0.5, lanes), kind) for i in range(chains)]
    turns = fn.cast_index(count, "i64", "index")
    with fn.loop(fn.index(0), turns, 1, start) as loop:
        loop.carry(*(fn.fma(x, factor, addend, lanes) for x in loop.args))
    total = loop.results[0]
    for x in loop.results[1:]:
        total = fn.arith("addf", total, x, type_=kind)
    _keep(fn, total, kind, results)
    return f"module {{\n{fn.text()}}}\n"


def read_probe(target: Target) -> str:
    """MLIR of `read`: each thread sums its own stretch of memory."""
    lanes = vector_lanes(target)
    kind = f"vector<{lanes}xi32>"
    fn, (nbytes, memory, results) = _task("read")
    base = fn.add(memory, fn.mul("%tid", nbytes, "i64"), "i64")
    pointer = fn.op(f"llvm.inttoptr {base} : i64 to !llvm.ptr")
    zero = fn.constant(f"arith.constant dense<0> : {kind}")
    end = fn.cast_index(nbytes, "i64", "index")
    step = READ_VECTORS * lanes * 4
    with fn.loop(fn.index(0), end, step, [(zero, kind)] * READ_VECTORS) as loop:
        at = fn.cast_index(loop.iv, "index", "i64")
        sums = []
        for i, total in enumerate(loop.args):
            place = fn.add(at, fn.i64(i * lanes * 4), "i64")
            source = fn.op(
                f"llvm.getelementptr {pointer}[{place}] : (!llvm.ptr, i64) -> !llvm.ptr, i8"
            )
            value = fn.op(f"llvm.load {source} : !llvm.ptr -> {kind}")
            sums.append(fn.arith("addi", total, value, type_=kind))
        loop.carry(*sums)
    total = loop.results[0]
    for x in loop.results[1:]:
        total = fn.arith("addi", total, x, type_=kind)
    _keep(fn, total, kind, results)
    return f"module {{\n{fn.text()}}}\n"


class Probes:
    """The compiled probes, and memory to read."""

    def __init__(self, read_bytes: int | None = None) -> None:
        """Compile them for this machine. Raises CompileError."""
        self.target = Target.native()
        self._dll = _library(self.target)
        self._dll.bsm_pool_create.restype = ctypes.c_void_p
        self._dll.bsm_pool_create.argtypes = [ctypes.c_int64]
        self._dll.bsm_pool_destroy.restype = None
        self._dll.bsm_pool_destroy.argtypes = [ctypes.c_void_p]
        self._dll.bsm_fork.restype = None
        self._dll.bsm_fork.argtypes = [ctypes.c_void_p] * 3
        self._memory = allocate(read_bytes or _read_bytes(), huge=True)
        self._memory[::4096] = 1  # pages of their own, not the one page of zeros

    def measure(self, threads: int, repeat: int = REPEAT) -> Peaks:
        """The best of `repeat` runs of each probe on `threads` threads."""
        pool = self._dll.bsm_pool_create(threads)
        if pool is None:
            raise BessemerError(f"no memory for a pool of {threads} threads")
        try:
            chains = CHAINS[_registers(self.target)]
            flops = 2 * FMA_LOOPS * chains * vector_lanes(self.target) * threads
            step = READ_VECTORS * vector_lanes(self.target) * 4
            share = self._memory.size // threads // step * step
            fma = self._best("fma", pool, threads, FMA_LOOPS, repeat)
            read = self._best("read", pool, threads, share, repeat)
        finally:
            self._dll.bsm_pool_destroy(pool)
        return Peaks(threads, flops / fma, share * threads / read)

    def _best(self, name: str, pool: int, threads: int, count: int, repeat: int) -> float:
        """Seconds of the fastest run; one before it wakes the threads."""
        context = Context(pool=pool, threads=threads)
        results = np.zeros(LINE * (threads + 1), np.uint8)
        aligned = results.ctypes.data + -results.ctypes.data % LINE
        words = (ctypes.c_int64 * _WORDS)(count, self._memory.ctypes.data, aligned)
        task = ctypes.cast(getattr(self._dll, name), ctypes.c_void_p)
        best = float("inf")
        for _ in range(repeat + 1):
            start = time.perf_counter()
            self._dll.bsm_fork(ctypes.addressof(context), task, ctypes.addressof(words))
            best = min(best, time.perf_counter() - start)
        return best


@cache
def _library(target: Target) -> ctypes.CDLL:
    """The probes and the thread pool, compiled, linked and loaded."""
    from bessemer.backend.codegen import compile_module
    from bessemer.backend.link import compile_native, link_shared

    with tempfile.TemporaryDirectory(prefix="bessemer-") as name:
        folder = Path(name)
        objects = compile_native(target, folder / "native")
        for stem, text in (("fma", fma_probe(target)), ("read", read_probe(target))):
            path = folder / f"{stem}.o"
            path.write_bytes(compile_module(text, target, stem, exports=[stem]).object)
            objects.append(path)
        link_shared(objects, folder / "probes.so", target)
        return ctypes.CDLL(str(folder / "probes.so"))


def _read_bytes() -> int:
    """More than the last cache, less than half of the free memory."""
    wanted = max(LEAST_READ_BYTES, CACHES_READ * last_cache_bytes())
    free = available_memory()
    return min(wanted, free // 2) if free else wanted


def last_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the largest cache of the first processor; 0 where the system doesn't tell."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    largest = 0
    for path in root.glob("index*/size"):
        text = path.read_text(encoding="ascii", errors="replace").strip()
        if text[:-1].isdigit() and text[-1:] in units:
            largest = max(largest, int(text[:-1]) * units[text[-1]])
    return largest


def describe_machine() -> dict[str, Any]:
    """Processor, cores that may be used, caches and memory."""
    return {
        "cpu": cpu_name(),
        "arch": host_arch(),
        "cores": default_threads({}),
        "last_cache_bytes": last_cache_bytes(),
    }
