"""RMSNorm x / sqrt(mean(x^2) + eps) * w and LayerNorm (x - mean) / sqrt(var + eps) * w + b.

Over the last axis of x[rows, ..., K]; a thread takes a range of rows. Sums are f32, in as many
partial sums as a vector has lanes.
"""

from __future__ import annotations

from collections.abc import Callable

from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec, Kernel, Operand, register
from bessemer.codegen.kernels.activation import FloatOps

Element = Callable[[FloatOps, str], str]


def _width(operand: Operand) -> int:
    width = operand.shape[-1]
    assert isinstance(width, int)
    return width


def _sum(fn: Fn, target: CodegenTarget, width: int, element: Element) -> str:
    """Sum of element(k) for k < width, in f32."""
    lanes = target.lanes
    vector, scalar = FloatOps(fn, lanes), FloatOps(fn, 0)
    even = width - width % lanes
    start = [(fn.splat(0.0, lanes), vector.type)]
    with fn.loop(fn.index(0), fn.index(even), lanes, start) as loop:
        loop.carry(vector("addf", loop.args[0], element(vector, loop.iv)))
    total = fn.op(f"vector.reduction <add>, {loop.results[0]} : {vector.type} into f32")
    if even < width:
        with fn.loop(fn.index(even), fn.index(width), 1, [(total, "f32")]) as tail:
            tail.carry(scalar("addf", tail.args[0], element(scalar, tail.iv)))
        total = tail.results[0]
    return total


def _map(
    fn: Fn,
    target: CodegenTarget,
    width: int,
    out: tuple[str, Operand],
    at: list[str],
    body: Element,
) -> None:
    """out[at, k] = body(k) for k < width."""
    lanes = target.lanes
    vector, scalar = FloatOps(fn, lanes), FloatOps(fn, 0)
    even = width - width % lanes
    with fn.loop(fn.index(0), fn.index(even), lanes) as loop:
        fn.vstore(body(vector, loop.iv), out[0], [*at, loop.iv], out[1].type, lanes)
    if even < width:
        with fn.loop(fn.index(even), fn.index(width)) as tail:
            fn.store(body(scalar, tail.iv), out[0], [*at, tail.iv], out[1].type)


def _reader(fn: Fn, source: tuple[str, Operand], at: list[str]) -> Element:
    name, operand = source

    def read(o: FloatOps, k: str) -> str:
        if o.lanes:
            return fn.vload(name, [*at, k], operand.type, o.lanes, operand.element)
        return fn.widen(fn.load(name, [*at, k], operand.type), operand.element)

    return read


def _rms_row(
    fn: Fn, spec: GroupSpec, target: CodegenTarget, named: list[tuple[str, Operand]], at: list[str]
) -> None:
    width = _width(named[0][1])
    x = _reader(fn, named[0], at)
    w = _reader(fn, named[1], []) if len(named) == 3 else None
    scalar = FloatOps(fn, 0)
    squares = _sum(fn, target, width, lambda o, k: (lambda v: o("mulf", v, v))(x(o, k)))
    mean = scalar("divf", squares, fn.f32(float(width)))
    root = scalar("math.sqrt", scalar("addf", mean, fn.f32(spec.attr("eps"))))
    scale = scalar("divf", fn.f32(1.0), root)

    def normed(o: FloatOps, k: str) -> str:
        y = o("mulf", x(o, k), o.splat(scale))
        return o("mulf", y, w(o, k)) if w else y

    _map(fn, target, width, named[-1], at, normed)


def _layer_row(
    fn: Fn, spec: GroupSpec, target: CodegenTarget, named: list[tuple[str, Operand]], at: list[str]
) -> None:
    width = _width(named[0][1])
    x = _reader(fn, named[0], at)
    affine = [_reader(fn, source, []) for source in named[1:-1]]
    scalar = FloatOps(fn, 0)
    count = fn.f32(float(width))
    mean = scalar("divf", _sum(fn, target, width, x), count)

    def centred(o: FloatOps, k: str) -> str:
        return o("subf", x(o, k), o.splat(mean))

    squares = _sum(fn, target, width, lambda o, k: (lambda v: o("mulf", v, v))(centred(o, k)))
    variance = scalar("divf", squares, count)
    root = scalar("math.sqrt", scalar("addf", variance, fn.f32(spec.attr("eps"))))
    scale = scalar("divf", fn.f32(1.0), root)

    def normed(o: FloatOps, k: str) -> str:
        y = o("mulf", centred(o, k), o.splat(scale))
        if affine:
            y = o("mulf", y, affine[0](o, k))
        return o("addf", y, affine[1](o, k)) if len(affine) > 1 else y

    _map(fn, target, width, named[-1], at, normed)


def emit(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
    """Operands: x[rows, ..., K], [w[K]], [b[K]], out[rows, ..., K]; attr eps."""
    named = [(f"%op{i}", o) for i, o in enumerate(spec.operands)]
    row_of = _rms_row if spec.kind == "rms_norm" else _layer_row
    inner = named[0][1].shape[1:-1]
    with fn.loop("%begin", "%end") as rows:
        if not inner:
            row_of(fn, spec, target, named, [rows.iv])
            return
        assert len(inner) == 1
        assert isinstance(inner[0], int)
        with fn.loop(fn.index(0), fn.index(inner[0])) as heads:
            row_of(fn, spec, target, named, [rows.iv, heads.iv])


for _kind in ("rms_norm", "layer_norm"):
    register(Kernel(_kind, "rows", emit))
