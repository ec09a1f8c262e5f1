"""Writing MLIR as text: one function at a time, with loops as context managers.

MLIR is parsed from text since that is what `inspect` shows and `mlir-opt` reads. A `Fn` hands out
SSA names, places constants once at the function's entry, and indents regions.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

INDENT = "  "


def f32_literal(value: float) -> str:
    """An exact MLIR literal of a float32 (hexadecimal where decimal text can't say it)."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0] if math.isfinite(value) else None
    if bits is None:
        special = {math.inf: 0x7F800000, -math.inf: 0xFF800000}.get(value, 0x7FC00000)
        return f"0x{special:08X}"
    return f"{struct.unpack('<f', struct.pack('<I', bits))[0]:.9e}"


@dataclass
class Loop:
    """An open `scf.for`: its induction variable, its carried values, and what it yields."""

    iv: str
    args: list[str]
    yielded: list[str]
    results: list[str]

    def carry(self, *values: str) -> None:
        """The carried values of the next iteration."""
        self.yielded = list(values)


class Fn:
    """A `func.func` under construction. Every method that computes returns an SSA name."""

    def __init__(
        self,
        name: str,
        args: Sequence[tuple[str, str]],
        *,
        private: bool = False,
        attributes: str = "",
        results: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._args = list(args)
        self._private = private
        self._attributes = attributes
        self._results = list(results)
        self._constants: dict[str, str] = {}
        self._lines: list[str] = []
        self._depth = 2
        self._count = 0

    # --- text -----------------------------------------------------------------------------------

    def fresh(self, hint: str = "v") -> str:
        self._count += 1
        return f"%{hint}{self._count}"

    def line(self, text: str) -> None:
        self._lines.append(INDENT * self._depth + text)

    def comment(self, text: str) -> None:
        self.line(f"// {text}")

    def op(self, text: str, hint: str = "v") -> str:
        """One op with one result: `f.op("arith.addi %a, %b : index")`."""
        name = self.fresh(hint)
        self.line(f"{name} = {text}")
        return name

    def text(self) -> str:
        args = ", ".join(f"{n}: {t}" for n, t in self._args)
        results = f" -> ({', '.join(self._results)})" if self._results else ""
        attributes = f" attributes {{{self._attributes}}}" if self._attributes else ""
        visibility = "private " if self._private else ""
        pad = INDENT * 2
        constants = [f"{pad}{name} = {text}" for text, name in self._constants.items()]
        head = f"{INDENT}func.func {visibility}@{self.name}({args}){results}{attributes} {{"
        tail = [] if self._results else [f"{pad}return"]
        return "\n".join([head, *constants, *self._lines, *tail, f"{INDENT}}}"]) + "\n"

    # --- constants ------------------------------------------------------------------------------

    def constant(self, text: str, hint: str = "c") -> str:
        """A constant op, placed once at the entry: `f.constant("arith.constant 1 : i64")`."""
        if text not in self._constants:
            self._constants[text] = self.fresh(hint)
        return self._constants[text]

    def index(self, value: int) -> str:
        return self.constant(f"arith.constant {value} : index", f"i{max(value, 0)}_")

    def i64(self, value: int) -> str:
        return self.constant(f"arith.constant {value} : i64")

    def f32(self, value: float) -> str:
        return self.constant(f"arith.constant {f32_literal(value)} : f32")

    def splat(self, value: float, lanes: int) -> str:
        """A vector<lanes x f32> of one value."""
        return self.constant(
            f"arith.constant dense<{f32_literal(value)}> : vector<{lanes}xf32>", "cv"
        )

    # --- index arithmetic -----------------------------------------------------------------------

    def _binary(self, op: str, a: str, b: str, type_: str) -> str:
        return self.op(f"{op} {a}, {b} : {type_}")

    def add(self, a: str, b: str, type_: str = "index") -> str:
        return self._binary("arith.addi", a, b, type_)

    def sub(self, a: str, b: str, type_: str = "index") -> str:
        return self._binary("arith.subi", a, b, type_)

    def mul(self, a: str, b: str, type_: str = "index") -> str:
        return self._binary("arith.muli", a, b, type_)

    def div(self, a: str, b: str, type_: str = "index") -> str:
        """Floor division of numbers that are not negative."""
        return self._binary("arith.divui", a, b, type_)

    def rem(self, a: str, b: str, type_: str = "index") -> str:
        return self._binary("arith.remui", a, b, type_)

    def min(self, a: str, b: str, type_: str = "index") -> str:
        return self._binary("arith.minsi", a, b, type_)

    def max(self, a: str, b: str, type_: str = "index") -> str:
        return self._binary("arith.maxsi", a, b, type_)

    def offset(self, base: str, by: int) -> str:
        """base + a known number."""
        return base if by == 0 else self.add(base, self.index(by))

    def cmp(self, predicate: str, a: str, b: str, type_: str = "index") -> str:
        """An i1: predicate is slt, sle, sgt, sge, eq, ne."""
        return self.op(f"arith.cmpi {predicate}, {a}, {b} : {type_}")

    def select(self, cond: str, a: str, b: str, type_: str) -> str:
        return self.op(f"arith.select {cond}, {a}, {b} : {type_}")

    def cast_index(self, value: str, from_type: str, to_type: str) -> str:
        """Between index and an integer type."""
        return self.op(f"arith.index_cast {value} : {from_type} to {to_type}")

    # --- float arithmetic, scalars and vectors --------------------------------------------------

    def arith(self, op: str, *operands: str, type_: str) -> str:
        """`f.arith("mulf", a, b, type_="vector<8xf32>")`; math ops are named `math.exp` etc."""
        name = op if "." in op else f"arith.{op}"
        return self.op(f"{name} {', '.join(operands)} : {type_}")

    def fma(self, a: str, b: str, c: str, lanes: int) -> str:
        """a * b + c on vectors, one rounding."""
        return self.op(f"vector.fma {a}, {b}, {c} : vector<{lanes}xf32>")

    def broadcast(self, scalar: str, lanes: int, element: str = "f32") -> str:
        return self.op(f"vector.broadcast {scalar} : {element} to vector<{lanes}x{element}>")

    def load(self, memref: str, indices: Sequence[str], type_: str) -> str:
        return self.op(f"memref.load {memref}[{', '.join(indices)}] : {type_}")

    def store(self, value: str, memref: str, indices: Sequence[str], type_: str) -> None:
        self.line(f"memref.store {value}, {memref}[{', '.join(indices)}] : {type_}")

    def vload(
        self, memref: str, indices: Sequence[str], type_: str, lanes: int, element: str = "f32"
    ) -> str:
        """`lanes` consecutive elements of the last axis; f16 and bf16 are widened to f32."""
        at = ", ".join(indices)
        got = self.op(f"vector.load {memref}[{at}] : {type_}, vector<{lanes}x{element}>")
        return self.widen(got, element, lanes)

    def vstore(
        self,
        value: str,
        memref: str,
        indices: Sequence[str],
        type_: str,
        lanes: int,
        element: str = "f32",
    ) -> None:
        """Store f32 lanes; rounded to f16 or bf16 (nearest even) where the memory is that."""
        value = self.narrow(value, element, lanes)
        at = ", ".join(indices)
        self.line(f"vector.store {value}, {memref}[{at}] : {type_}, vector<{lanes}x{element}>")

    def widen(self, value: str, element: str, lanes: int | None = None) -> str:
        """f16 or bf16 (a scalar when lanes is None) to f32."""
        if element == "f32":
            return value
        a, b = (
            (element, "f32")
            if lanes is None
            else (
                f"vector<{lanes}x{element}>",
                f"vector<{lanes}xf32>",
            )
        )
        return self.op(f"arith.extf {value} : {a} to {b}")

    def narrow(self, value: str, element: str, lanes: int | None = None) -> str:
        if element == "f32":
            return value
        a, b = (
            ("f32", element)
            if lanes is None
            else (
                f"vector<{lanes}xf32>",
                f"vector<{lanes}x{element}>",
            )
        )
        return self.op(f"arith.truncf {value} : {a} to {b}")

    # --- regions --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loop(
        self, low: str, high: str, step: str | int = 1, carried: Sequence[tuple[str, str]] = ()
    ) -> Iterator[Loop]:
        """`scf.for`. carried: (initial value, type) pairs; set the next ones with `Loop.carry`."""
        step = self.index(step) if isinstance(step, int) else step
        loop = Loop(
            self.fresh("i"),
            [self.fresh("a") for _ in carried],
            [],
            [self.fresh("r") for _ in carried],
        )
        head = f"scf.for {loop.iv} = {low} to {high} step {step}"
        if carried:
            pairs = zip(loop.args, carried, strict=True)
            inits = ", ".join(f"{a} = {init}" for a, (init, _) in pairs)
            types = ", ".join(t for _, t in carried)
            head = f"{', '.join(loop.results)} = {head} iter_args({inits}) -> ({types})"
        self.line(head + " {")
        self._depth += 1
        yield loop
        if carried:
            if len(loop.yielded) != len(carried):
                raise ValueError("a loop must carry as many values as it began with")
            self.line(f"scf.yield {', '.join(loop.yielded)} : {', '.join(t for _, t in carried)}")
        self._depth -= 1
        self.line("}")

    @contextlib.contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """`scf.if` without results."""
        self.line(f"scf.if {condition} {{")
        self._depth += 1
        yield
        self._depth -= 1
        self.line("}")

    @contextlib.contextmanager
    def otherwise(self) -> Iterator[None]:
        """The else region of the `when` that was just closed."""
        self._lines[-1] = self._lines[-1].replace("}", "} else {", 1)
        self._depth += 1
        yield
        self._depth -= 1
        self.line("}")


def memref_type(
    shape: Sequence[int | str], element: str, strides: Sequence[int] | None = None
) -> str:
    """`memref<?x64xf32>`; with strides (in elements, all known) `memref<..., strided<[..]>>`."""
    element = "i8" if element == "q8_0" else element  # blocks of bytes
    dims = "x".join("?" if isinstance(s, str) else str(s) for s in shape)
    body = f"{dims}x{element}" if dims else element
    if strides is None or list(strides) == contiguous_strides(shape):
        return f"memref<{body}>"
    return f"memref<{body}, strided<[{', '.join(map(str, strides))}]>>"


def contiguous_strides(shape: Sequence[int | str]) -> list[int] | None:
    """Row-major strides; None when a size other than the first is unknown."""
    strides = [1]
    for size in reversed(list(shape)[1:]):
        if isinstance(size, str):
            return None
        strides.insert(0, strides[0] * size)
    return strides if shape else []
