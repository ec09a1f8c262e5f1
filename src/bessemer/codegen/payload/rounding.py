"""Round trips through narrow float formats."""

from __future__ import annotations

from bessemer.codegen.kernels.activation import FloatOps
from bessemer.codegen.kernels.rounding import rounded, scale_of
from bessemer.codegen.payload.attrs import integer
from bessemer.codegen.payload.builder import Body, Builder, Tensor
from bessemer.codegen.payload.scalar import Scalars
from bessemer.graph.core import Node
from bessemer.graph.dtypes import DType
from bessemer.graph.ops.rounding import NARROW


def round_trip(b: Builder, node: Node) -> None:
    """The result is a copy, then its blocks: a loop for their largest magnitudes, and one that
    rounds.
    """
    (x,) = node.inputs
    block, begin, end = (integer(node, name) for name in ("block", "begin", "end"))
    source = b.tensor(x)
    result = b.copied(source, b.target(node.out))
    if end > begin:
        shape = (*source.shape[:-1], end - begin)
        offsets = [*["0"] * (len(shape) - 1), str(begin)]
        part = b.part(source, offsets, shape)
        new = b.reshaped(_rounded(b, node, part, block), shape)
        result = b.inserted(b.copied(new, b.part(result, offsets, shape)), result, offsets, shape)
    b.env[node.out] = result


def _rounded(b: Builder, node: Node, part: Tensor, block: int) -> Tensor:
    """part[..., n] as [..., n / block, block], rounded."""
    narrow, o = NARROW[str(node.attrs["format"])], FloatOps(b.fn, 0)
    s = Scalars(b.fn, DType.F32)
    whole = b.copied(part, b.empty(part.shape, part.element))
    (*rows, count) = part.shape
    blocks = b.reshaped(whole, (*rows, int(str(count)) // block, block))
    dims = tuple(f"d{i}" for i in range(len(blocks.shape)))

    def largest(body: Body, old: list[str]) -> list[str]:
        return [s.maximum(old[0], s.abs(body.load(blocks, body.dims, DType.F32)))]

    start = b.filled(b.empty(blocks.shape[:-1], "f32"), s.const(0))
    axis = len(dims) - 1
    amax = b.generic(blocks.shape, [(start, dims[:-1])], largest, reduced=[axis])[0]

    def step(body: Body, old: list[str]) -> list[str]:
        scale = scale_of(o, body.load(amax, body.dims[:-1], DType.F32), narrow)
        value = s.div(body.load(blocks, body.dims, DType.F32), scale)
        return [s.mul(rounded(o, value, narrow), scale)]

    target = b.empty(blocks.shape, "f32")
    return b.generic(blocks.shape, [(target, dims)], step)[0]
