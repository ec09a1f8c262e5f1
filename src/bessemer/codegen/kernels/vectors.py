"""What the scheduled kernels share: memrefs with their types, vector pieces of odd widths,
horizontal reductions, and the plan of a thread's scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bessemer.artifact.layout import STORAGE_BYTES, align
from bessemer.codegen.emit import Fn, memref_type
from bessemer.codegen.group import GroupSpec


def vector_type(width: int, element: str = "f32") -> str:
    return f"vector<{width}x{element}>"


@dataclass(frozen=True)
class Array:
    """A memref value with its MLIR type. Vector loads widen to f32, stores narrow from it."""

    name: str
    type: str
    element: str = "f32"

    def load(self, f: Fn, *at: str) -> str:
        return f.load(self.name, at, self.type)

    def store(self, f: Fn, value: str, *at: str) -> None:
        f.store(value, self.name, at, self.type)

    def vload(self, f: Fn, width: int, *at: str) -> str:
        return f.vload(self.name, at, self.type, width, self.element)

    def vstore(self, f: Fn, value: str, width: int, *at: str) -> None:
        f.vstore(value, self.name, at, self.type, width, self.element)

    def fetch(self, f: Fn, *at: str) -> None:
        """Have the processor fetch the line at these indices; the last one may pass its end."""
        where = f"{self.name}[{', '.join(at)}]"
        f.line(f"memref.prefetch {where}, read, locality<3>, data : {self.type}")


def operand(spec: GroupSpec, index: int) -> Array:
    """Operand `index` of the group's function."""
    given = spec.operands[index]
    return Array(f"%op{index}", given.type, given.element)


def pieces(n: int, lanes: int) -> list[tuple[int, int]]:
    """(offset, width) of vectors that cover n elements exactly: full ones, then powers of two."""
    found, at, width = [], 0, lanes
    while at < n:
        while width > n - at:
            width //= 2
        found.append((at, width))
        at += width
    return found


def columns(f: Fn, n: int, lanes: int) -> Iterator[tuple[str, int]]:
    """Cover n elements: yields (index, width) inside a loop over the full vectors, then the tail.

    The body of the Python `for` is emitted once for the loop and once for each tail piece.
    """
    full = n // lanes * lanes
    if full > lanes:
        with f.loop(f.index(0), f.index(full), lanes) as loop:
            yield loop.iv, lanes
    for offset, width in pieces(n, lanes):
        if offset >= full or full == lanes:
            yield f.index(offset), width


def greater(f: Fn, new: str, old: str, type_: str = "f32", mask: str = "i1") -> str:
    """new > old ? new : old, one instruction. A NaN in `new` is passed over: `old` stays."""
    above = f.op(f"arith.cmpf ogt, {new}, {old} : {type_}")
    operands = type_ if mask == "i1" else f"{mask}, {type_}"
    return f.op(f"arith.select {above}, {new}, {old} : {operands}")


def vgreater(f: Fn, new: str, old: str, width: int) -> str:
    """`greater` on lanes."""
    return greater(f, new, old, vector_type(width), vector_type(width, "i1"))


def vadd(f: Fn, a: str, b: str, width: int) -> str:
    return f.arith("addf", a, b, type_=vector_type(width))


def exp_falling(f: Fn, x: str, type_: str) -> str:
    """exp(x) for x <= 0, 0 below the normal numbers: a weight of a softmax."""
    return f.op(f"math.exp {x} fastmath<afn> : {type_}")


def tree(f: Fn, values: Sequence[str], combine: Callable[[Fn, str, str, int], str], w: int) -> str:
    """One vector of several, combined pairwise."""
    values = list(values)
    while len(values) > 1:
        pairs = [combine(f, a, b, w) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + (values[-1:] if len(values) % 2 else [])
    return values[0]


def horizontal(f: Fn, value: str, width: int, combine: Callable[[Fn, str, str, int], str]) -> str:
    """The lanes of a vector as one scalar, by halving: the order of a sum is always the same."""
    while width > 1:
        half = width // 2
        type_ = vector_type(width)
        low, high = (
            f.op(f"vector.shuffle {value}, {value} {picked} : {type_}, {type_}")
            for picked in (list(range(half)), list(range(half, width)))
        )
        value, width = combine(f, low, high, half), half
    return f.op(f"vector.extract {value}[0] : f32 from vector<1xf32>")


def row_sums(f: Fn, values: Sequence[str], width: int) -> str:
    """The sum over the lanes of each vector, all as one vector; their number is a power of two, at
    most the width. Vectors are folded in pairs while there are several, so that lanes stay busy.
    """
    held, groups = list(values), 1  # a vector has the partial sums of `groups` of the values
    while len(held) > 1:
        half = width // groups // 2
        pairs = zip(held[::2], held[1::2], strict=True)
        held = [_folded(f, a, b, width, half) for a, b in pairs]
        groups *= 2
    (value,) = held
    while width > groups:
        half = width // groups // 2
        value = _folded(f, value, None, width, half)
        width //= 2
    return value


def _folded(f: Fn, a: str, b: str | None, width: int, half: int) -> str:
    """Of each 2 * half lanes of a, then of b, the first and the second half added up."""
    low = [i for i in range(width if b is None else 2 * width) if i % (2 * half) < half]
    type_ = vector_type(width)
    first, second = (
        f.op(f"vector.shuffle {a}, {b or a} {picks} : {type_}, {type_}")
        for picks in (low, [i + half for i in low])
    )
    return vadd(f, first, second, len(low))


class ScratchPlan:
    """Named arrays laid one after another in the thread's scratch memory, cache-line aligned."""

    def __init__(self) -> None:
        self._arrays: dict[str, tuple[int, tuple[int, ...], str]] = {}
        self.nbytes = 0

    def add(self, name: str, shape: tuple[int, ...], element: str = "f32") -> None:
        size = STORAGE_BYTES[element]
        for length in shape:
            size *= length
        self._arrays[name] = (self.nbytes, shape, element)
        self.nbytes = align(self.nbytes + size)

    def offset(self, name: str) -> int:
        """Bytes from the start of the scratch to the array."""
        return self._arrays[name][0]

    def view(self, f: Fn, name: str) -> Array:
        """The array as a memref, in the function's `%scratch`."""
        at, shape, element = self._arrays[name]
        type_ = memref_type(shape, element)
        text = f"memref.view %scratch[{f.index(at)}][] : memref<?xi8> to {type_}"
        return Array(f.op(text, name), type_, element)
