"""The ops that the definitions in `bessemer.models` use for what ATen has no word for.

Eager calls compute with torch what the graph ops of `graph/ops/compressed.py`, `streams.py` and
`rounding.py` mean, but hold no state: they see only the rows given, at positions 0, 1, 2, ...
Compressed rows therefore travel as values, aligned with the token rows that close their windows.
"""

from __future__ import annotations

import torch

from bessemer.graph.ops import compressed, rounding


@torch.library.custom_op("bessemer::rope", mutates_args=())
def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str, offset: int
) -> torch.Tensor:
    """x[B, T, H, D] with its elements from `offset` rotated by cos and sin [B, T, rotary / 2].

    style: "half" pairs element i with i + rotary / 2, "interleaved" 2i with 2i + 1.
    """
    end = offset + 2 * cos.shape[-1]
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    part = x[..., offset:end]
    if style == "half":
        a, b = part.chunk(2, -1)
        turned = torch.cat([a * c - b * s, b * c + a * s], -1)
    else:
        a, b = part[..., 0::2], part[..., 1::2]
        turned = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    return torch.cat([x[..., :offset], turned, x[..., end:]], -1)


@rope.register_fake
def _(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str, offset: int
) -> torch.Tensor:
    return torch.empty_like(x)


# --- hyper-connections ---------------------------------------------------------------------------


@torch.library.custom_op("bessemer::sinkhorn", mutates_args=())
def sinkhorn(x: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """x[..., N, N]: columns, then alternately rows and columns divided by their sums plus eps."""
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x


@sinkhorn.register_fake
def _(x: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("bessemer::collapse_streams", mutates_args=())
def collapse_streams(x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """The sum over n of pre[..., n] * x[..., n, :]: x[..., N, D], pre[..., N] -> [..., D]."""
    return (pre.unsqueeze(-1) * x).sum(-2)


@collapse_streams.register_fake
def _(x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-2], x.shape[-1]))


@torch.library.custom_op("bessemer::mix_streams", mutates_args=())
def mix_streams(
    x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """post[..., n] * y + the sum over j of comb[..., j, n] * x[..., j, :], for every stream n."""
    return post.unsqueeze(-1) * y.unsqueeze(-2) + comb.transpose(-1, -2) @ x


@mix_streams.register_fake
def _(x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


# --- low precision -------------------------------------------------------------------------------


@torch.library.custom_op("bessemer::round_trip", mutates_args=())
def round_trip(x: torch.Tensor, format: str, block: int, begin: int, end: int) -> torch.Tensor:
    """Elements begin..end of the last axis through e4m3 or e2m1 and back, in blocks."""
    result = x.clone()
    if end > begin:
        rounded = rounding.round_trip(x[..., begin:end].numpy(), format, block)
        result[..., begin:end] = torch.from_numpy(rounded)
    return result


@round_trip.register_fake
def _(x: torch.Tensor, format: str, block: int, begin: int, end: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("bessemer::round_f16", mutates_args=())
def round_f16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to f16 and widened again. An op, since activations of a graph are f32 otherwise."""
    return x.to(torch.float16).to(torch.float32)


@round_f16.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("bessemer::hadamard", mutates_args=())
def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x[..., D] @ H / sqrt(D), H the Hadamard matrix in Sylvester's order."""
    return torch.from_numpy(rounding.hadamard(x.numpy()))


@hadamard.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


# --- compressed attention ------------------------------------------------------------------------


def _pool(kv: torch.Tensor, gate: torch.Tensor, rate: int, overlap: bool) -> torch.Tensor:
    """Pooled windows [B, S, D] of token rows [B, S * rate, W]."""
    batch, rows, width = kv.shape
    shape = (batch, rows // rate, rate, width)
    kv, gate = kv.reshape(shape), gate.reshape(shape)
    if overlap:
        half = width // 2
        before = (0, 0, 0, 0, 1, 0)  # one window more in front, the last one dropped
        pad = torch.nn.functional.pad
        older = pad(kv[..., :half], before)[:, :-1]
        older_gate = pad(gate[..., :half], before, value=float("-inf"))[:, :-1]
        kv = torch.cat([older, kv[..., half:]], 2)
        gate = torch.cat([older_gate, gate[..., half:]], 2)
    return (kv * gate.softmax(2)).sum(2)


@torch.library.custom_op("bessemer::block_compress", mutates_args=())
def block_compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    layer: int,
    stream: str,
    rate: int,
    overlap: bool,
    eps: float,
    round: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of `rate` token rows pooled into one compressed row each.

    kv, gate[B, T, W], bias[rate, W], norm[D], cos and sin[B, T, rotary / 2] -> rows f32[B, T, D]
    with the compressed row of each token row that closes a window (zeros elsewhere), and
    visible i64[B, T], how many compressed rows a token may see. See the graph op.
    """
    width, rotary = norm.shape[0], 2 * cos.shape[-1]
    count = kv.shape[1] // rate
    closed = slice(rate - 1, count * rate, rate)
    used = slice(0, count * rate)
    gates = gate[:, used] + bias.repeat(count, 1)
    pooled = _pool(kv[:, used], gates, rate, overlap)
    scale = torch.rsqrt(pooled.square().mean(-1, keepdim=True) + eps)
    pooled = pooled * scale * norm
    turned = rope(
        pooled.unsqueeze(2), cos[:, closed], sin[:, closed], "interleaved", width - rotary
    )
    finished = compressed.round_row(turned.squeeze(2).numpy(), round, rotary)
    rows = kv.new_zeros((*kv.shape[:2], width))
    rows[:, closed] = torch.from_numpy(finished)
    return rows, (positions + 1) // rate


@block_compress.register_fake
def _(
    kv: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    layer: int,
    stream: str,
    rate: int,
    overlap: bool,
    eps: float,
    round: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return kv.new_empty((*kv.shape[:2], norm.shape[0])), torch.empty_like(positions)


@torch.library.custom_op("bessemer::index_topk", mutates_args=())
def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    visible: torch.Tensor,
    layer: int,
    rate: int,
    k: int,
    scale: float,
) -> torch.Tensor:
    """The k best compressed rows of each token, i64[B, T, k], ascending, then -1.

    q[B, T, H, D], weights[B, T, H], rows[B, T, D] and visible as `block_compress` gives them. A
    row's score is scale * the sum over heads of weights * relu(q . row). Among equal scores the
    lowest index wins.
    """
    keys = rows[:, rate - 1 :: rate]
    products = torch.relu(torch.einsum("bthd,bsd->bths", q, keys))
    scores = torch.einsum("bths,bth->bts", products, weights) * scale
    chosen = [
        compressed.choose(one[:count].numpy(), k)
        for one, count in zip(scores.flatten(0, 1), visible.flatten().tolist(), strict=True)
    ]
    flat = torch.stack([torch.from_numpy(c) for c in chosen])
    return flat.reshape(*visible.shape, k)


@index_topk.register_fake
def _(
    q: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    visible: torch.Tensor,
    layer: int,
    rate: int,
    k: int,
    scale: float,
) -> torch.Tensor:
    return visible.new_empty((*visible.shape, k))


@torch.library.custom_op("bessemer::compressed_attention", mutates_args=())
def compressed_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    sinks: torch.Tensor,
    rows: torch.Tensor | None,
    visible: torch.Tensor | None,
    indices: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int,
    rate: int,
) -> torch.Tensor:
    """Attention of q[B, T, H, D] over the window's rows of kv[B, T, D] and compressed rows.

    The row kv is key and value of every head; sinks[H]. rows, visible: as `block_compress` gives
    them, or None where the layer compresses nothing. indices i64[B, T, k]: the compressed rows to
    attend to; None for all visible ones. -> [B, T, H, D].
    """
    row = torch.arange(q.shape[1])
    seen = (row[None] <= row[:, None]) & (row[None] > row[:, None] - window)
    allowed, keys = seen.expand(q.shape[0], -1, -1), kv
    if rows is not None and visible is not None:
        older = rows[:, rate - 1 :: rate]
        number = torch.arange(older.shape[1])
        if indices is None:
            some = number < visible.unsqueeze(-1)
        else:
            some = (indices.unsqueeze(-1) == number).any(-2)
        allowed, keys = torch.cat([allowed, some], -1), torch.cat([kv, older], 1)
    scores = torch.einsum("bthd,bsd->bhts", q, keys) * scale
    scores = scores.masked_fill(~allowed.unsqueeze(1), float("-inf"))
    sink = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return torch.einsum("bhts,bsd->bthd", weights, keys).contiguous()


@compressed_attention.register_fake
def _(
    q: torch.Tensor,
    kv: torch.Tensor,
    sinks: torch.Tensor,
    rows: torch.Tensor | None,
    visible: torch.Tensor | None,
    indices: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int,
    rate: int,
) -> torch.Tensor:
    return q.new_empty(q.shape)


# --- steering ------------------------------------------------------------------------------------


@torch.library.custom_op("bessemer::steer", mutates_args=())
def steer(y: torch.Tensor, layer: int, layers: int, site: int) -> torch.Tensor:
    """Where a session may steer a sublayer's output y[B, T, H]: y - scale * (y . d) * d.

    d is the layer's direction and scale that of the site (0: attention, 1: FFN), both state of a
    session. Eager calls have none and give y.
    """
    return y.clone()


@steer.register_fake
def _(y: torch.Tensor, layer: int, layers: int, site: int) -> torch.Tensor:
    return torch.empty_like(y)
