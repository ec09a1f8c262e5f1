"""Compile, link and load MLIR, and pass NumPy arrays as memref descriptors."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.backend.codegen import compile_module
from bessemer.backend.link import link_shared
from bessemer.backend.target import Target

WIDTHS = {"scalar": "f32", "vector": "vector<8xf32>"}


def load(mlir_text: str, folder: Path, target: Target | None = None, **options: Any) -> ctypes.CDLL:
    """The shared library of a module, loaded."""
    target = target or Target.native()
    compiled = compile_module(mlir_text, target, "test", **options)
    path = folder / "test.o"
    path.write_bytes(compiled.object)
    library = folder / "test.so"
    link_shared([path], library, target)
    return ctypes.CDLL(str(library))


def memref(array: np.ndarray[Any, Any]) -> Any:
    """A pointer to the descriptor of a C-contiguous array; the caller keeps the array alive."""
    assert array.flags.c_contiguous
    rank = array.ndim

    class Descriptor(ctypes.Structure):
        _fields_ = (
            ("allocated", ctypes.c_void_p),
            ("aligned", ctypes.c_void_p),
            ("offset", ctypes.c_int64),
            ("sizes", ctypes.c_int64 * rank),
            ("strides", ctypes.c_int64 * rank),
        )

    strides = [s // array.itemsize for s in array.strides]
    sizes, steps = (ctypes.c_int64 * rank)(*array.shape), (ctypes.c_int64 * rank)(*strides)
    return ctypes.byref(Descriptor(array.ctypes.data, array.ctypes.data, 0, sizes, steps))


def elementwise(body: str, kind: str = "vector", source: str = "f32", result: str = "f32") -> str:
    """MLIR of `f(x, y)`: y[i] = body(x[i]), by eights or one by one.

    In `body`, `%x` is the input, `%r` the result, and `{S}` and `{R}` are their types.
    """
    step = 8 if kind == "vector" else 1
    types = {
        key: f"vector<8x{element}>" if kind == "vector" else element
        for key, element in (("S", source), ("R", result))
    }
    load_op = "vector.load" if kind == "vector" else "memref.load"
    store_op = "vector.store" if kind == "vector" else "memref.store"
    tail = {key: f", {types[key]}" if kind == "vector" else "" for key in types}
    return f"""
    func.func @f(%in: memref<?x{source}>, %out: memref<?x{result}>)
        attributes {{llvm.emit_c_interface}} {{
      %c0 = arith.constant 0 : index
      %step = arith.constant {step} : index
      %n = memref.dim %in, %c0 : memref<?x{source}>
      scf.for %i = %c0 to %n step %step {{
        %x = {load_op} %in[%i] : memref<?x{source}>{tail["S"]}
        {body.format(**types)}
        {store_op} %r, %out[%i] : memref<?x{result}>{tail["R"]}
      }}
      return
    }}"""


def apply(
    library: ctypes.CDLL, x: np.ndarray[Any, Any], dtype: Any = np.float32
) -> np.ndarray[Any, Any]:
    """Call the `f` of `elementwise`; the length must be a multiple of 8."""
    assert x.size % 8 == 0
    out = np.zeros(x.shape, dtype)
    library._mlir_ciface_f(memref(x), memref(out))
    return out
