"""Compiles many generic groups into one library and compares them with the NumPy references."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.artifact.layout import PANEL_ROWS
from bessemer.backend.codegen import compile_module
from bessemer.backend.link import link_shared
from bessemer.backend.target import Target
from bessemer.codegen.group import GroupSpec, Operand, signature
from bessemer.codegen.payload import (
    GenericGroup,
    PayloadSpec,
    Stored,
    emit_generic_group,
    group_operands,
    row_wise,
)
from bessemer.graph.core import TensorType, Value, topological
from bessemer.graph.dims import Dim, evaluate_size
from bessemer.graph.dtypes import DType
from bessemer.graph.evaluate import evaluate_node
from bessemer.graph.schema import Env, emit, param

CHUNK = 40  # most rows of a call; no test has more
CANARY = 256  # bytes behind the scratch that a group must leave alone
T, R = Dim.sym("T"), Dim.sym("R")
_LEAVES = ("input", "param", "state")


def tensor(name: str, *shape: Any, dtype: DType = DType.F32) -> Value:
    """An input of a group."""
    return emit("input", name=name, dtype=dtype, shape=shape)


def index(name: str, *shape: Any) -> Value:
    return tensor(name, *shape, dtype=DType.I64)


def weight(name: str, *shape: int) -> Value:
    return param(name, TensorType(DType.F32, shape))


def state(name: str, *shape: int, dtype: DType = DType.F32) -> Value:
    return emit("state", name=name, dtype=dtype, shape=shape)


@dataclass
class Case:
    """A piece of graph under test. stored: leaf name -> storage of a weight. both: compile it for
    all rows at once, too, where rows can be split.
    """

    name: str
    outputs: Sequence[Value]
    stored: Mapping[str, Stored] = field(default_factory=dict)
    updates: Mapping[Value, Value] = field(default_factory=dict)
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    both: bool = True

    def __post_init__(self) -> None:
        nodes = topological(list(self.outputs))
        leaves = [n.out for n in nodes if n.op in _LEAVES]
        self.leaves = {str(v.node.attrs["name"]): v for v in leaves}
        self.spec = PayloadSpec(
            tuple(n for n in nodes if n.op not in _LEAVES),
            tuple(leaves),
            tuple(self.outputs),
            {v: self.stored.get(k, Stored()) for k, v in self.leaves.items() if v.op == "param"},
            dict(self.updates),
        )
        self.splits = row_wise(self.spec.nodes, self.spec.outputs) and not self.updates

    @property
    def operands(self) -> tuple[Operand, ...]:
        names = [*self.leaves, *["" for _ in self.spec.destinations]]
        return tuple(
            Operand(o.element, o.shape, self.strides.get(name), o.role)
            for name, o in zip(names, group_operands(self.spec), strict=True)
        )

    def modes(self) -> list[str]:
        if not self.splits:
            return ["whole"]
        return ["whole", "rows"] if self.both else ["rows"]

    def shape(self, value: Value, rows: int) -> tuple[int, ...]:
        sizes = {"T": rows, "R": max(rows // 2, 1)}
        return tuple(evaluate_size(s, sizes) for s in value.shape)

    def data(self, rows: int, seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
        """Random contents of the leaves; f32 weights already rounded to their storage."""
        rng = np.random.default_rng(seed)
        found = {}
        for name, value in self.leaves.items():
            shape = self.shape(value, rows)
            if value.dtype == DType.BOOL:
                array = rng.integers(0, 2, shape).astype(bool)
            elif value.dtype.is_float:
                array = (scale * rng.standard_normal(shape)).astype(value.dtype.numpy)
            else:
                array = rng.integers(-9, 10, shape).astype(value.dtype.numpy)
            found[name] = rounded(array, self.stored.get(name, Stored()).dtype)
        return found

    def reference(self, data: Mapping[str, np.ndarray], rows: int) -> list[np.ndarray]:
        env = Env(sizes={"T": rows, "R": max(rows // 2, 1)})
        values = {v: data[k] for k, v in self.leaves.items()}
        for node in self.spec.nodes:
            results = evaluate_node(node, [values[v] for v in node.inputs], env)
            values.update(zip(node.outputs, results, strict=True))
        return [values[v] for v in self.outputs]


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "f16":
        return array.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        return (bf16(array).astype(np.uint32) << 16).view(np.float32)
    return array


def bf16(array: np.ndarray) -> np.ndarray:
    """Bits of an array in bf16, cut (tests round before they compare)."""
    return (np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16)


def stored(array: np.ndarray, storage: Stored) -> np.ndarray:
    """The memory of a weight: narrowed, and packed into panels of rows where it says so."""
    if storage.layout == "panels":
        *lead, n, k = array.shape
        padded = np.zeros((*lead, -(-n // PANEL_ROWS) * PANEL_ROWS, k), array.dtype)
        padded[..., :n, :] = array
        array = padded.reshape(*lead, -1, PANEL_ROWS, k).swapaxes(-1, -2)
    if storage.dtype == "bf16":
        array = bf16(array)
    elif storage.dtype == "f16":
        array = array.astype(np.float16)
    return np.ascontiguousarray(array)


def _memref(array: np.ndarray) -> Any:
    rank = array.ndim

    class Memref(ctypes.Structure):
        _fields_ = (
            ("allocated", ctypes.c_void_p),
            ("aligned", ctypes.c_void_p),
            ("offset", ctypes.c_int64),
            *((("sizes", ctypes.c_int64 * rank), ("strides", ctypes.c_int64 * rank)) * (rank > 0)),
        )

    strides = [s // array.itemsize for s in array.strides]
    counts = [(ctypes.c_int64 * rank)(*n) for n in (array.shape, strides)] if rank else []
    return Memref(array.ctypes.data, array.ctypes.data, 0, *counts)


def _strided(array: np.ndarray, strides: tuple[int, ...] | None) -> np.ndarray:
    """A copy whose memory has these strides (in elements), NaN or rubbish in between."""
    if strides is None:
        return np.ascontiguousarray(array)
    room = np.full(array.shape[0] * strides[0], 99, array.dtype)
    steps = tuple(s * array.itemsize for s in strides)
    view = np.lib.stride_tricks.as_strided(room, array.shape, steps)
    view[...] = array
    return view


class Library:
    """All modes of all cases, compiled into one shared library."""

    def __init__(self, cases: Iterable[Case], folder: Path, target: Target | None = None) -> None:
        self.cases = {c.name: c for c in cases}
        self.groups: dict[tuple[str, str], GenericGroup] = {}
        text = []
        for case in self.cases.values():
            for mode in case.modes():
                name = f"{case.name}_{mode}"
                group = emit_generic_group(
                    name,
                    case.spec,
                    split_rows=mode == "rows",
                    chunk=CHUNK,
                    operands=case.operands,
                )
                self.groups[case.name, mode] = group
                text += [group.text, _entry(name, group)]
        machine = target or Target.native()
        module = f"module {{\n{''.join(text)}}}\n"
        compiled = compile_module(module, machine, "payloads")
        (folder / "payloads.o").write_bytes(compiled.object)
        link_shared([folder / "payloads.o"], folder / "payloads.so", machine)
        self._library = ctypes.CDLL(str(folder / "payloads.so"))

    def run(
        self,
        name: str,
        data: Mapping[str, np.ndarray],
        rows: int,
        mode: str = "whole",
        threads: int = 1,
    ) -> list[np.ndarray]:
        """The outputs; an updated state is among them, its leaf's array being left alone."""
        case, group = self.cases[name], self.groups[name, mode]
        storages = [case.stored.get(leaf, Stored()) for leaf in case.leaves]
        inputs = [
            _strided(stored(data[leaf], s), case.strides.get(leaf))
            for leaf, s in zip(case.leaves, storages, strict=True)
        ]
        memory: dict[Value, np.ndarray] = {}
        for value in case.spec.destinations:
            shape = case.shape(value, rows)
            memory[value] = np.frombuffer(
                bytearray(b"\x01" * max(int(np.prod(shape)) * value.dtype.size, 1)),
                value.dtype.numpy,
                int(np.prod(shape)),
            ).reshape(shape)
        own = [*inputs, *(memory[v] for v in case.spec.destinations)]
        before = [a.tobytes() for a in inputs]
        units = rows if case.splits and mode == "rows" else 1
        if mode == "rows" and "R" in str(case.outputs[0].shape[0]):
            units = max(rows // 2, 1)
        for i in reversed(range(threads)):
            self._call(name, mode, units * i // threads, units * (i + 1) // threads, units, own)
        for array, bytes_, value in zip(inputs, before, case.spec.inputs, strict=True):
            changed = value in case.updates.values()
            assert changed or array.tobytes() == bytes_, f"{name} wrote to an input"
        assert group.thread_scratch_bytes % 64 == 0
        changed = dict(zip(case.spec.inputs, inputs, strict=True))
        updated = {v: changed[s] for v, s in case.updates.items()}
        return [updated[v] if v in updated else memory[v] for v in case.outputs]

    def _call(
        self, name: str, mode: str, begin: int, end: int, rows: int, own: Sequence[np.ndarray]
    ) -> None:
        nbytes = self.groups[name, mode].thread_scratch_bytes
        room = np.full(nbytes + CANARY + 64, 0xFF, np.uint8)
        scratch = room[-room.ctypes.data % 64 :]
        held = [_memref(a) for a in (scratch, *own)]
        numbers = [ctypes.c_int64(n) for n in (begin, end, rows)]
        function = self._library[f"_mlir_ciface_{name}_{mode}_entry"]
        function.restype = None
        function(*numbers, *(ctypes.byref(h) for h in held))
        assert (scratch[nbytes : nbytes + CANARY] == 0xFF).all(), "wrote behind its scratch"

    def check(
        self,
        name: str,
        rows: int,
        data: Mapping[str, np.ndarray] | None = None,
        *,
        rtol: float = 2e-6,
        atol: float = 2e-6,
        exact: bool = False,
    ) -> None:
        """All modes and several splits give what the references give."""
        case = self.cases[name]
        data = data or case.data(rows)
        expected = case.reference(data, rows)
        for mode in case.modes():
            for threads in (1, 3) if mode == "rows" else (1,):
                got = self.run(name, data, rows, mode, threads)
                for a, b in zip(got, expected, strict=True):
                    what = f"{name}, {mode}, {rows} rows, {threads} threads"
                    assert a.shape == b.shape, what
                    if exact or b.dtype.kind != "f":
                        np.testing.assert_array_equal(a, b, what)
                    else:
                        np.testing.assert_allclose(a, b, rtol, atol, err_msg=what)


def _entry(name: str, group: GenericGroup) -> str:
    """A function with the C interface that calls the group's."""
    args = signature(GroupSpec("generic", group.operands))
    names, types = ", ".join(n for n, _ in args), ", ".join(t for _, t in args)
    shown = ", ".join(f"{n}: {t}" for n, t in args)
    head = f"func.func @{name}_entry({shown}) attributes {{llvm.emit_c_interface}}"
    return f"  {head} {{\n    func.call @{name}({names}) : ({types}) -> ()\n    return\n  }}\n"
