"""Random graphs of all kinds of ops on rows, for comparing the generic lowering."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from bessemer.graph.core import Value
from bessemer.graph.dtypes import DType
from bessemer.graph.schema import build, constant, emit
from tests.codegen.payload_harness import Case, Stored, T, tensor, weight

SMOOTH = ("neg", "abs", "tanh", "sigmoid", "silu", "gelu", "sin", "relu", "softplus")
BINARY = ("add", "sub", "mul", "maximum", "minimum")


class _Pool:
    """Values of rank 2 and 3 whose first dimension is the rows."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.values = [tensor("x", T, 3, 8), tensor("y", T, 24), tensor("z", T, 2, 5)]
        self.stored: dict[str, Stored] = {}
        self._weights = 0

    def pick(self) -> Value:
        return self.rng.choice(self.values[-6:] if self.rng.random() < 0.7 else self.values)

    def weight(self, *shape: int) -> Value:
        self._weights += 1
        name = f"w{self._weights}"
        layout = "panels" if len(shape) == 2 and self.rng.random() < 0.5 else "plain"
        self.stored[name] = Stored(self.rng.choice(["f32", "f16", "bf16"]), layout)
        return weight(name, *shape)


def _elementwise(p: _Pool, x: Value) -> Value:
    if p.rng.random() < 0.4:
        return emit(p.rng.choice(SMOOTH), x)
    same = [v for v in p.values if v.shape == x.shape]
    other = p.rng.choice([*same, constant(0.75), _column(p, x)])
    return emit(p.rng.choice(BINARY), *p.rng.sample([x, other], 2))


def _column(p: _Pool, x: Value) -> Value:
    """Something with one column for each row of x."""
    op = p.rng.choice(["reduce_sum", "reduce_max", "reduce_mean", "reduce_min"])
    return emit(op, x, axes=(-1,), keepdims=True)


def _where(p: _Pool, x: Value) -> Value:
    return emit("where", emit("gt", x, constant(0.1)), x, emit("tanh", x))


def _reduce(p: _Pool, x: Value) -> Value:
    axis = -p.rng.randint(1, x.type.rank - 1)
    kept = emit("reduce_sum", x, axes=(axis,), keepdims=x.type.rank == 2)
    return emit("tanh", kept)


def _reshape(p: _Pool, x: Value) -> Value:
    size = int(np.prod([int(s) for s in x.shape[1:]]))  # type: ignore[arg-type]
    parts = [n for n in range(1, size + 1) if size % n == 0]
    first = p.rng.choice(parts)
    return emit("reshape", x, shape=p.rng.choice([(T, size), (T, first, size // first)]))


def _permute(p: _Pool, x: Value) -> Value:
    return x if x.type.rank == 2 else emit("permute", x, perm=(0, 2, 1))


def _slice(p: _Pool, x: Value) -> Value:
    axis = -p.rng.randint(1, x.type.rank - 1)
    size = int(x.shape[axis])  # type: ignore[arg-type]
    start = p.rng.randint(0, size - 1)
    stop = p.rng.randint(start + 1, size)
    return emit("slice", x, axis=axis, start=start, stop=stop, step=p.rng.randint(1, 2))


def _concat(p: _Pool, x: Value) -> Value:
    return emit("concat", x, emit("neg", x), _slice(p, x) if x.type.rank == 2 else x, axis=-1)


def _pad(p: _Pool, x: Value) -> Value:
    zeros = (0,) * (x.type.rank - 1)
    return emit("pad", x, low=(*zeros, 1), high=(*zeros, 2), value=0.5)


def _take(p: _Pool, x: Value) -> Value:
    size = int(x.shape[-1])  # type: ignore[arg-type]
    chosen = [p.rng.randrange(size) for _ in range(p.rng.randint(1, 6))]
    return emit("take", x, constant(np.array(chosen)), axis=-1)


def _gather(p: _Pool, x: Value) -> Value:
    size = int(x.shape[-1])  # type: ignore[arg-type]
    keys = emit("mod", emit("cast", emit("mul", x, constant(9.0)), dtype=DType.I64), constant(size))
    return emit("gather", x, keys, axis=-1)


def _sorted(p: _Pool, x: Value) -> Value:
    k = p.rng.randint(1, min(4, int(x.shape[-1])))  # type: ignore[arg-type]
    values, indices = build("topk", [x], k=k).outputs
    return emit("add", values, emit("cast", indices, dtype=DType.F32))


def _norm(p: _Pool, x: Value) -> Value:
    width = int(x.shape[-1])  # type: ignore[arg-type]
    op = p.rng.choice(["rms_norm", "layer_norm"])
    return emit(op, x, p.weight(width), eps=0.1)


def _linear(p: _Pool, x: Value) -> Value:
    n, k = p.rng.choice([3, 8, 33]), int(x.shape[-1])  # type: ignore[arg-type]
    return emit("linear", x, p.weight(n, k), activation=p.rng.choice(["none", "silu"]), scale=0.5)


def _scores(p: _Pool, x: Value) -> Value:
    if x.type.rank == 2:
        return emit("softmax", x)
    return emit("softmax", emit("matmul", x, emit("tanh", x), transpose_b=True))


def _scan(p: _Pool, x: Value) -> Value:
    return emit("mul", emit("cumsum", x, axis=-1), constant(0.25))


def _row_number(p: _Pool, x: Value) -> Value:
    numbers = emit("iota", size=T, dtype=DType.F32)
    shape = (T, *[1] * (x.type.rank - 1))
    return emit("add", x, emit("sin", emit("reshape", numbers, shape=shape)))


def _spread(p: _Pool, x: Value) -> Value:
    column = emit("reshape", emit("reduce_max", x, axes=(-1,)), shape=(*x.shape[:-1], 1))
    return emit("expand", column, shape=x.shape)


STEPS: list[Callable[[_Pool, Value], Value]] = [
    _elementwise, _elementwise, _elementwise, _where, _reduce, _reshape, _reshape, _permute,
    _slice, _concat, _pad, _take, _gather, _sorted, _norm, _linear, _scores, _scan, _row_number,
    _spread,
]  # fmt: skip


def random_case(seed: int, steps: int = 12) -> Case:
    """A graph of `steps` ops, with one to three outputs."""
    p = _Pool(seed)
    while len(p.values) < 3 + steps:
        made = p.rng.choice(STEPS)(p, p.pick())
        if all(int(s) <= 40 for s in made.shape[1:]):  # type: ignore[arg-type]
            p.values.append(made)
    last = [p.values[-1], *p.rng.sample(p.values[3:], p.rng.randint(0, 2))]
    return Case(f"random{seed}", last, p.stored)
