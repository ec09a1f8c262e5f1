"""The table's entries for the ops of `definition_ops`: each is the graph op of the same name.

State is the graph ops' own, so the compressed rows, which eager calls pass on as values, are not
operands here.
"""

from __future__ import annotations

from bessemer.graph import DType, Value, emit
from bessemer.importer.aten import Builder, aten
from bessemer.steering import DIRECTIONS, SCALES, SITES


@aten("bessemer.rope.default")
def _rope(b: Builder, x: Value, cos: Value, sin: Value, style: str, offset: int) -> Value:
    return b.emit("rope", x, cos, sin, style=style, offset=offset)


@aten("bessemer.sinkhorn.default")
def _sinkhorn(b: Builder, x: Value, iterations: int, eps: float) -> Value:
    return b.emit("sinkhorn", x, iterations=iterations, eps=float(eps))


@aten("bessemer.collapse_streams.default")
def _collapse_streams(b: Builder, x: Value, pre: Value) -> Value:
    return b.emit("collapse_streams", x, pre)


@aten("bessemer.mix_streams.default")
def _mix_streams(b: Builder, x: Value, y: Value, post: Value, comb: Value) -> Value:
    return b.emit("mix_streams", x, y, post, comb)


@aten("bessemer.round_trip.default")
def _round_trip(b: Builder, x: Value, format: str, block: int, begin: int, end: int) -> Value:
    return b.emit("round_trip", x, format=format, block=block, begin=begin, end=end)


@aten("bessemer.round_f16.default")
def _round_f16(b: Builder, x: Value) -> Value:
    return b.emit("cast", b.emit("cast", x, dtype=DType.F16), dtype=DType.F32)


@aten("bessemer.hadamard.default")
def _hadamard(b: Builder, x: Value) -> Value:
    return b.emit("hadamard", x)


@aten("bessemer.block_compress.default")
def _block_compress(
    b: Builder,
    kv: Value,
    gate: Value,
    bias: Value,
    norm: Value,
    cos: Value,
    sin: Value,
    positions: Value,
    layer: int,
    stream: str,
    rate: int,
    overlap: bool,
    eps: float,
    round: str,
) -> tuple[Value, Value]:
    visible = b.emit(
        "block_compress",
        *(kv, gate, bias, norm, cos, sin, positions),
        layer=layer,
        stream=stream,
        rate=rate,
        overlap=overlap,
        eps=float(eps),
        round=round,
    )
    # The rows are state: whoever is given them as a value takes them from there.
    return b.fill(0.0, b.outs[0]), visible


@aten("bessemer.index_topk.default")
def _index_topk(
    b: Builder,
    q: Value,
    weights: Value,
    rows: Value,
    visible: Value,
    layer: int,
    rate: int,
    k: int,
    scale: float,
) -> Value:
    return b.emit("index_topk", q, weights, visible, layer=layer, k=k, scale=float(scale))


@aten("bessemer.compressed_attention.default")
def _compressed_attention(
    b: Builder,
    q: Value,
    kv: Value,
    sinks: Value,
    rows: Value | None,
    visible: Value | None,
    indices: Value | None,
    layer: int,
    scale: float,
    window: int,
    rate: int,
) -> Value:
    given = [v for v in (visible, indices) if v is not None]
    return b.emit(
        "compressed_attention",
        *(q, kv, b.positions, sinks, *given),
        layer=layer,
        scale=float(scale),
        window=window,
        has_sinks=True,
        has_visible=visible is not None,
        has_indices=indices is not None,
    )


@aten("bessemer.steer.default")
def _steer(b: Builder, y: Value, layer: int, layers: int, site: int) -> Value:
    width = y.shape[-1]
    directions = emit("state", name=DIRECTIONS, dtype=DType.F32, shape=(layers, width))
    scales = emit("state", name=SCALES, dtype=DType.F32, shape=(SITES,))
    direction = b.reshape(b.slice(directions, 0, layer, layer + 1), (width,))
    scale = b.slice(scales, 0, site, site + 1)
    share = b.emit("reduce_sum", b.emit("mul", y, direction), axes=(-1,), keepdims=True)
    return b.emit("sub", y, b.emit("mul", b.emit("mul", share, scale), direction))
