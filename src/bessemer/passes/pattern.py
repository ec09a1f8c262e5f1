"""Patterns over values, so that a fusion reads like its equation.

    x, eps = var("x"), scalar("eps")
    RMS = x * op("rsqrt", mean(square(x)) + eps)
    found = match(RMS, value)        # {"x": Value, "eps": 1e-6}, or None

A pattern is matched upward, from a result to its operands. `add`, `mul`, `maximum` and `minimum`
match in either order; a variable that occurs twice must be the same value both times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bessemer.graph import Value

COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "eq", "ne"})
# Scalars of equations (such as sqrt(2/pi)) reach the graph rounded to f32 once or twice.
SCALAR_TOLERANCE = 1e-6

Found = Mapping[str, Any]


class Pattern:
    """Base of patterns; arithmetic on patterns makes patterns."""

    def matches(self, value: Value, found: Found) -> Iterator[Found]:
        raise NotImplementedError

    def __add__(self, other: Pattern | float) -> Pattern:
        return op("add", self, other)

    __radd__ = __add__

    def __mul__(self, other: Pattern | float) -> Pattern:
        return op("mul", self, other)

    __rmul__ = __mul__

    def __sub__(self, other: Pattern | float) -> Pattern:
        return op("sub", self, other)

    def __rsub__(self, other: Pattern | float) -> Pattern:
        return op("sub", other, self)

    def __truediv__(self, other: Pattern | float) -> Pattern:
        return op("div", self, other)

    def __rtruediv__(self, other: Pattern | float) -> Pattern:
        return op("div", other, self)

    def __or__(self, other: Pattern) -> Pattern:
        return _Either((self, other))


@dataclass(frozen=True)
class _Var(Pattern):
    name: str
    accepts: Callable[[Value], bool] | None = None

    def matches(self, value: Value, found: Found) -> Iterator[Found]:
        held = found.get(self.name)
        if held is not None:
            if held == value:
                yield found
        elif self.accepts is None or self.accepts(value):
            yield {**found, self.name: value}


@dataclass(frozen=True)
class _Scalar(Pattern):
    name: str

    def matches(self, value: Value, found: Found) -> Iterator[Found]:
        number = scalar_of(value)
        if number is None:
            return
        held = found.get(self.name)
        if held is None:
            yield {**found, self.name: number}
        elif held == number:
            yield found


@dataclass(frozen=True)
class _Literal(Pattern):
    number: float

    def matches(self, value: Value, found: Found) -> Iterator[Found]:
        number = scalar_of(value)
        if number is not None and abs(number - self.number) <= SCALAR_TOLERANCE * abs(self.number):
            yield found


@dataclass(frozen=True)
class _Op(Pattern):
    name: str
    operands: tuple[Pattern, ...]
    attrs: tuple[tuple[str, Any], ...]

    def matches(self, value: Value, found: Found) -> Iterator[Found]:
        node = value.node
        if node.op != self.name or len(node.inputs) != len(self.operands):
            return
        if any(node.attrs[k] != v for k, v in self.attrs):
            return
        orders = [self.operands]
        if node.op in COMMUTATIVE and len(self.operands) == 2:
            orders.append(self.operands[::-1])
        for order in orders:
            yield from _each(order, node.inputs, found)


@dataclass(frozen=True)
class _Either(Pattern):
    choices: tuple[Pattern, ...]

    def matches(self, value: Value, found: Found) -> Iterator[Found]:
        for choice in self.choices:
            yield from choice.matches(value, found)


@dataclass(frozen=True)
class _Named(Pattern):
    name: str
    pattern: Pattern

    def matches(self, value: Value, found: Found) -> Iterator[Found]:
        for inner in self.pattern.matches(value, found):
            yield {**inner, self.name: value}


def _each(
    patterns: tuple[Pattern, ...], values: tuple[Value, ...], found: Found
) -> Iterator[Found]:
    if not patterns:
        yield found
        return
    for inner in patterns[0].matches(values[0], found):
        yield from _each(patterns[1:], values[1:], inner)


def var(name: str, accepts: Callable[[Value], bool] | None = None) -> Pattern:
    """Any value (that `accepts` lets through), bound to a name."""
    return _Var(name, accepts)


def scalar(name: str) -> Pattern:
    """A constant of one element, bound to a name as a Python number."""
    return _Scalar(name)


def op(name: str, *operands: Pattern | float, **attrs: Any) -> Pattern:
    """A node of that op, with those attribute values; numbers stand for scalar constants."""
    parts = tuple(p if isinstance(p, Pattern) else _Literal(float(p)) for p in operands)
    return _Op(name, parts, tuple(attrs.items()))


def named(name: str, pattern: Pattern) -> Pattern:
    """Binds the value that a pattern matches."""
    return _Named(name, pattern)


def mean(x: Pattern) -> Pattern:
    """The mean over the last axis, kept as an axis of one."""
    return op("reduce_mean", x, axes=(-1,), keepdims=True)


def match(pattern: Pattern, value: Value) -> dict[str, Any] | None:
    """The first way in which the pattern holds at a value: names to values and numbers."""
    for found in pattern.matches(value, {}):
        return dict(found)
    return None


def scalar_of(value: Value) -> float | None:
    """The number that a constant of one element holds."""
    if value.op != "constant":
        return None
    array = value.node.attrs["value"]
    if not isinstance(array, np.ndarray) or array.size != 1:
        return None
    return array.reshape(-1)[0].item()
