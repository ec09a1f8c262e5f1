"""Sizes of dimensions: an int, or a linear expression in named symbols such as `T`.

`T` is the number of token rows of a call, `R` the number of rows whose logits are wanted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Dim:
    """`const + sum(coefficient * symbol)`, with at least one symbol. Build with `Dim.sym`."""

    terms: tuple[tuple[str, int], ...]
    const: int = 0

    @staticmethod
    def sym(name: str) -> Dim:
        return Dim(((name, 1),))

    @staticmethod
    def _make(terms: Mapping[str, int], const: int) -> Size:
        kept = tuple(sorted((n, c) for n, c in terms.items() if c))
        return Dim(kept, const) if kept else const

    def __add__(self, other: Size) -> Size:
        terms = dict(self.terms)
        if isinstance(other, Dim):
            for name, c in other.terms:
                terms[name] = terms.get(name, 0) + c
            return Dim._make(terms, self.const + other.const)
        return Dim._make(terms, self.const + other)

    __radd__ = __add__

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Size) -> Size:
        return self + other * -1

    def __rsub__(self, other: int) -> Size:
        return (self * -1) + other

    def __mul__(self, other: Size) -> Size:
        if isinstance(other, Dim):
            raise TypeError(f"product of symbolic sizes ({self}) * ({other}) is not a linear size")
        return Dim._make({n: c * other for n, c in self.terms}, self.const * other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        """Exact division only; raises TypeError when it does not divide."""
        if isinstance(other, Dim):
            ratio = self.terms[0][1] // dict(other.terms).get(self.terms[0][0], 1 << 62)
            if ratio and other * ratio == self:
                return ratio
            raise TypeError(f"({self}) is not a multiple of ({other})")
        if other == 0 or self.const % other or any(c % other for _, c in self.terms):
            raise TypeError(f"({self}) is not a multiple of {other}")
        return Dim._make({n: c // other for n, c in self.terms}, self.const // other)

    def evaluate(self, values: Mapping[str, int]) -> int:
        """The number for given symbol values; KeyError names a symbol without value."""
        return self.const + sum(c * values[n] for n, c in self.terms)

    def substitute(self, values: Mapping[str, Size]) -> Size:
        total: Size = self.const
        for name, c in self.terms:
            total = total + values.get(name, Dim.sym(name)) * c
        return total

    def __str__(self) -> str:
        parts = [n if c == 1 else f"{c}*{n}" for n, c in self.terms]
        if self.const:
            parts.append(str(self.const))
        return " + ".join(parts)

    __repr__ = __str__


Size = int | Dim
Shape = tuple[Size, ...]

_TERM = re.compile(r"^(?:(-?\d+)\*)?([A-Za-z_]\w*)$")


def parse_size(text: str) -> Size:
    """The size that `str(size)` printed. Raises ValueError otherwise."""
    total: Size = 0
    for part in (p.strip() for p in text.split("+")):
        if re.fullmatch(r"-?\d+", part):
            total = total + int(part)
            continue
        found = _TERM.match(part)
        if not found:
            raise ValueError(f"not a size: {text!r}")
        total = total + Dim.sym(found[2]) * int(found[1] or 1)
    return total


def product(shape: Shape) -> Size:
    """Number of elements. At most one dimension may be symbolic (TypeError otherwise)."""
    total: Size = 1
    for size in shape:
        total = size * total if isinstance(size, Dim) else total * size
    return total


def evaluate_size(size: Size, values: Mapping[str, int]) -> int:
    return size.evaluate(values) if isinstance(size, Dim) else size


def substitute_size(size: Size, values: Mapping[str, Size]) -> Size:
    return size.substitute(values) if isinstance(size, Dim) else size


def is_static(shape: Shape) -> bool:
    return not any(isinstance(s, Dim) for s in shape)
