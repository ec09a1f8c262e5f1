"""Reductions, running sums and selections."""

from __future__ import annotations

from bessemer.codegen.payload.attrs import axis_of, integer, integers, number
from bessemer.codegen.payload.builder import Body, Builder, Tensor, Yield
from bessemer.codegen.payload.scalar import MEMORY, Scalars
from bessemer.graph.core import Node
from bessemer.graph.dtypes import DType

_KINDS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
}


def reduce(b: Builder, node: Node) -> None:
    """sum, max, min or prod over some axes, what is reduced being computed in the same loop."""
    (x,) = node.inputs
    s, kind = Scalars(b.fn, x.dtype), _KINDS[node.op]
    domain = b.shape(x)
    axes = [a % len(domain) for a in integers(node, "axes")]
    start = b.filled(b.target(node.out), s.neutral(kind))
    kept = tuple(f"d{i}" for i in range(len(domain)) if i not in axes)
    b.env[node.out] = b.generic(
        domain,
        [(start, kept)],
        lambda body, old: [s.accumulate(kind, old[0], body.read(x, body.dims))],
        reduced=axes,
    )[0]


def cumsum(b: Builder, node: Node) -> None:
    """Running sums along an axis: a loop over the axis that carries the sums so far."""
    (x,) = node.inputs
    source, fn = b.tensor(x), b.fn
    axis = axis_of(node, len(source.shape))
    others = tuple(s for i, s in enumerate(source.shape) if i != axis)
    box = tuple(1 if i == axis else s for i, s in enumerate(source.shape))
    s = Scalars(fn, x.dtype)
    sums = b.filled(b.empty(others, source.element), s.const(0))
    result = b.target(node.out)
    carried = [(result.ssa, result.type), (sums.ssa, sums.type)]
    with fn.loop(fn.index(0), b.extent(source.shape[axis]), 1, carried) as loop:
        at = [loop.iv if i == axis else "0" for i in range(len(box))]
        whole, held = (
            Tensor(name, t.shape, t.element)
            for name, t in zip(loop.args, (result, sums), strict=True)
        )
        one = b.part(source, at, box, drop=(axis,))
        grown = b.generic(
            others,
            [(held, tuple(f"d{i}" for i in range(len(others))))],
            lambda body, old: [s.add(old[0], body.load(one, body.dims, x.dtype))],
        )[0]
        loop.carry(b.inserted(grown, whole, at, box).ssa, grown.ssa)
    b.env[node.out] = Tensor(loop.results[0], result.shape, result.element)


def sinkhorn(b: Builder, node: Node) -> None:
    """Matrices divided by their column sums, then in a loop by row sums and column sums."""
    (x,) = node.inputs
    source, fn = b.tensor(x), b.fn
    s = Scalars(fn, x.dtype)
    dims = tuple(f"d{i}" for i in range(len(source.shape)))
    small = s.const(number(node, "eps"))

    def scaled(held: Tensor, axis: int, into: Tensor) -> Tensor:
        kept = tuple(d for i, d in enumerate(dims) if i != axis)
        sizes = tuple(n for i, n in enumerate(held.shape) if i != axis)
        start = b.filled(b.empty(sizes, held.element), s.const(0))
        sums = b.generic(
            held.shape,
            [(start, kept)],
            lambda body, old: [s.add(old[0], body.load(held, dims, x.dtype))],
            reduced=[axis],
        )[0]

        def step(body: Body, old: list[str]) -> list[str]:
            total = s.add(body.load(sums, kept, x.dtype), small)
            return [s.div(body.load(held, dims, x.dtype), total)]

        return b.generic(held.shape, [(into, dims)], step)[0]

    rows, columns = len(dims) - 1, len(dims) - 2
    start = scaled(source, columns, b.target(node.out))
    turns = fn.index(integer(node, "iterations") - 1)
    with fn.loop(fn.index(0), turns, 1, [(start.ssa, start.type)]) as loop:
        held = Tensor(loop.args[0], start.shape, start.element)
        by_rows = scaled(held, rows, b.empty(start.shape, start.element))
        new = scaled(by_rows, columns, b.empty(start.shape, start.element))
        loop.carry(b.copied(new, held).ssa)
    b.env[node.out] = Tensor(loop.results[0], start.shape, start.element)


def argmax(b: Builder, node: Node) -> None:
    """Index of the first maximum along an axis; NaN counts as the largest, as in NumPy."""
    (x,) = node.inputs
    axis = integers(node, "axes")[0] % x.type.rank
    domain = b.shape(x)
    kept = tuple(f"d{i}" for i in range(len(domain)) if i != axis)
    shape = tuple(s for i, s in enumerate(domain) if i != axis)
    keys, found = _first(b, shape, b.target(node.out))

    def step(body: Body, old: list[str]) -> list[str]:
        key = sort_key(b, x.dtype, body.read(x, body.dims), nan_first=True)
        return _better(b, body, key, axis, old, None)

    b.env[node.out] = b.generic(domain, [(keys, kept), (found, kept)], step, reduced=[axis])[1]


def topk(b: Builder, node: Node) -> None:
    """The k largest of the last axis: k passes, each of which finds the first element, in the order
    (value descending, index ascending), that comes after the one found before. NaN comes last.
    """
    (x,) = node.inputs
    source, fn = b.tensor(x), b.fn
    outer, width = source.shape[:-1], source.shape[-1]
    dims = tuple(f"d{i}" for i in range(len(outer)))
    values, indices = (b.target(v) for v in node.outputs)
    scalars = Scalars(fn, DType.I64)
    previous = b.filled(b.empty(outer, "i64"), scalars.const(0))
    before = b.filled(b.empty(outer, "i64"), scalars.const(-1))
    start = [values, indices, previous, before]
    k = integer(node, "k")
    with fn.loop(fn.index(0), fn.index(k), 1, [(t.ssa, t.type) for t in start]) as loop:
        held = [Tensor(n, t.shape, t.element) for n, t in zip(loop.args, start, strict=True)]
        keys, found = _first(b, outer, b.empty(outer, "i64"))

        def step(body: Body, old: list[str]) -> list[str]:
            key = sort_key(b, x.dtype, body.load(source, body.dims, x.dtype), nan_first=False)
            last = [body.load(t, dims, DType.I64) for t in held[2:]]
            return _better(b, body, key, len(outer), old, last)

        keys, found = b.generic(
            (*outer, width), [(keys, dims), (found, dims)], step, reduced=[len(outer)]
        )
        at, box = [*["0"] * len(outer), loop.iv], (*outer, 1)
        chosen = b.empty(outer, MEMORY[x.dtype])
        chosen = b.generic(outer, [(chosen, dims)], _looked_up(b, source, found, x.dtype))[0]
        loop.carry(
            b.inserted(chosen, held[0], at, box).ssa,
            b.inserted(found, held[1], at, box).ssa,
            b.copied(keys, held[2]).ssa,
            b.copied(found, held[3]).ssa,
        )
    for value, name, tensor in zip(node.outputs, loop.results[:2], start[:2], strict=True):
        b.env[value] = Tensor(name, tensor.shape, tensor.element)


def _looked_up(b: Builder, source: Tensor, found: Tensor, dtype: DType) -> Yield:
    """A loop body: the element of `source` at the index found for each of its rows."""

    def body(inside: Body, old: list[str]) -> list[str]:
        index = b.fn.cast_index(inside.load(found, inside.dims, DType.I64), "i64", "index")
        at = [*(inside.ssa_index(d) for d in inside.dims), index]
        return [b.element(source, at, dtype)]

    return body


def _first(b: Builder, shape: tuple, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and indices of a search that has found nothing: index -1."""
    s = Scalars(b.fn, DType.I64)
    keys = b.filled(b.empty(shape, "i64"), s.const(0))
    return keys, b.filled(indices, s.const(-1))


def _better(
    b: Builder, body: Body, key: str, axis: int, old: list[str], last: list[str] | None
) -> list[str]:
    """(key, index) of the better of the best so far and this element. Indices grow, so that the
    first of equal ones stays. last: only elements behind this (key, index) count, if it is one.
    """
    fn, s = b.fn, Scalars(b.fn, DType.I64)
    index = fn.cast_index(body.ssa_index(body.dims[axis]), "index", "i64")
    none = s.compare("lt", old[1], s.const(0))
    better = fn.op(f"arith.ori {none}, {s.compare('gt', key, old[0])} : i1")
    if last is not None:
        unlimited = s.compare("lt", last[1], s.const(0))
        same = s.compare("eq", key, last[0])
        later = fn.op(f"arith.andi {same}, {s.compare('gt', index, last[1])} : i1")
        behind = fn.op(f"arith.ori {later}, {s.compare('lt', key, last[0])} : i1")
        behind = fn.op(f"arith.ori {behind}, {unlimited} : i1")
        better = fn.op(f"arith.andi {better}, {behind} : i1")
    return [s.select(better, key, old[0]), s.select(better, index, old[1])]


def sort_key(b: Builder, dtype: DType, value: str, *, nan_first: bool) -> str:
    """An i64 that is larger where the value is larger, and equal for 0 and -0.

    A float's bits are a sign and a magnitude; both zeros have magnitude 0.
    """
    fn, whole = b.fn, Scalars(b.fn, DType.I64)
    if not dtype.is_float:
        return Scalars(fn, dtype).cast(value, DType.I64)
    s = Scalars(fn, DType.F32)
    value = Scalars(fn, dtype).cast(value, DType.F32)
    narrow = Scalars(fn, DType.I32)
    bits = narrow.cast(fn.op(f"arith.bitcast {value} : f32 to i32"), DType.I64)
    magnitude = whole.op("arith.andi", bits, whole.const(0x7FFFFFFF))
    negative = whole.compare("lt", bits, whole.const(0))
    key = whole.select(negative, whole.neg(magnitude), magnitude)
    nan = whole.const((1 << 32) if nan_first else -(1 << 32))
    is_nan = s.compare("ne", value, value)
    return whole.select(is_nan, nan, key)
