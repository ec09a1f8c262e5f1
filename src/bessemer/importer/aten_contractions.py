"""ATen to graph: matrix products, embedding, norms, attention and experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from bessemer.graph import DType, Value
from bessemer.graph.dims import Dim, Shape, Size, product
from bessemer.importer.aten import Builder, NoMapping, aten

# torch's rms_norm takes this epsilon when it is given none.
_F32_EPSILON = float(np.finfo(np.float32).eps)


@aten("linear.default")
def _linear(b: Builder, x: Value, weight: Value, bias: Value | None = None) -> Value:
    if weight.type.rank != 2:
        raise NoMapping("linear with a weight that is not a matrix")
    if bias is None:
        return b.emit("linear", x, weight)
    return b.emit("linear", x, weight, bias, has_bias=True)


@aten("matmul.default", "mm.default", "bmm.default")
def _matmul(b: Builder, x: Value, y: Value) -> Value:
    # vectors become matrices for the product
    if x.type.rank == 1:
        x = b.reshape(x, (1, *x.shape))
    if y.type.rank == 1:
        y = b.reshape(y, (*y.shape, 1))
    return b.reshape(b.emit("matmul", x, y), b.out.shape)


@aten("dot.default", "mv.default", "vdot.default")
def _dot(b: Builder, x: Value, y: Value) -> Value:
    return _matmul(b, x, y)


def _affine(b: Builder, base: Value, x: Value, y: Value, beta: Any, alpha: Any) -> Value:
    result = b.emit("matmul", x, y)
    if alpha != 1:
        result = b.emit("mul", result, b.scalar(float(alpha), DType.F32))
    if beta != 1:
        base = b.emit("mul", base, b.scalar(float(beta), DType.F32))
    return b.emit("add", result, base)


@aten("addmm.default", "baddbmm.default")
def _addmm(b: Builder, base: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _affine(b, base, x, y, beta, alpha)


@aten("outer.default")
def _outer(b: Builder, x: Value, y: Value) -> Value:
    return b.emit("mul", b.reshape(x, (*x.shape, 1)), b.reshape(y, (1, *y.shape)))


# --- einsum ----------------------------------------------------------------------------------


def _spelled(equation: str, operands: list[Value]) -> tuple[list[str], str]:
    """Input terms and the output term of an equation, blanks removed."""
    text = equation.replace(" ", "")
    left, arrow, result = text.partition("->")
    terms = left.split(",")
    if "." in text:
        raise NoMapping("einsum with an ellipsis")
    if len(terms) != len(operands) or any(len(set(t)) != len(t) for t in terms):
        raise NoMapping(f"einsum {equation!r}")
    if not arrow:
        letters = sorted(set(left) - {","})
        result = "".join(c for c in letters if left.count(c) == 1)
    return terms, result


def _pair(b: Builder, x: Value, y: Value, terms: list[str], result: str) -> Value:
    """A product of two as one matmul: batch, free and summed letters brought together.

    The free letters of the first operand stay apart (the second broadcasts over them), so that
    token rows are not merged with anything.
    """
    sizes: dict[str, Size] = {}
    for term, value in zip(terms, (x, y), strict=True):
        sizes.update(zip(term, value.shape, strict=True))
    first, second = terms
    batch = [c for c in first if c in second and c in result]
    summed = [c for c in first if c in second and c not in result]
    rows = [c for c in first if c not in second]
    columns = [c for c in second if c not in first]
    if any(c not in result for c in rows + columns):
        raise NoMapping("einsum that sums over a letter of one operand only")
    if any(isinstance(sizes[c], Dim) for c in columns):
        return _pair(b, y, x, [second, first], result)

    def arranged(value: Value, term: str, order: list[str], shape: list[Size]) -> Value:
        return b.reshape(b.permute(value, [term.index(c) for c in order]), tuple(shape))

    depth = product(tuple(sizes[c] for c in summed))
    width = product(tuple(sizes[c] for c in columns))
    lead = [sizes[c] for c in batch]
    free: list[Size] = [sizes[c] for c in rows] or [1]
    left = arranged(x, first, [*batch, *rows, *summed], [*lead, *free, depth])
    ones: list[Size] = [1] * (len(free) - 1)
    right = arranged(y, second, [*batch, *summed, *columns], [*lead, *ones, depth, width])
    order = [*batch, *rows, *columns]
    split = b.reshape(b.emit("matmul", left, right), tuple(sizes[c] for c in order))
    return b.permute(split, [order.index(c) for c in result])


@aten("einsum.default")
def _einsum(b: Builder, equation: str, operands: list[Value], **kwargs: Any) -> Value:
    terms, result = _spelled(equation, operands)
    if len(operands) == 1:
        gone = [i - len(terms[0]) for i, c in enumerate(terms[0]) if c not in result]
        x = operands[0]
        if gone:
            x = b.emit("reduce_sum", x, axes=tuple(gone), keepdims=False)
        kept = [c for c in terms[0] if c in result]
        return b.permute(x, [kept.index(c) for c in result])
    if len(operands) != 2:
        raise NoMapping(f"einsum of {len(operands)} operands")
    return _pair(b, operands[0], operands[1], terms, result)


# --- embedding and norms ---------------------------------------------------------------------


@aten("embedding.default")
def _embedding(b: Builder, weight: Value, indices: Value, *options: Any, **kwargs: Any) -> Value:
    return b.emit("embedding", weight, indices)


@aten("layer_norm.default")
def _layer_norm(
    b: Builder,
    x: Value,
    normalized_shape: list[Size],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Value:
    _last_axis_only(x, normalized_shape)
    if weight is None and bias is not None:
        raise NoMapping("layer_norm with a bias but no weight")
    operands = [p for p in (weight, bias) if p is not None]
    return b.emit("layer_norm", x, *operands, eps=float(eps))


@aten("rms_norm.default")
def _rms_norm(
    b: Builder,
    x: Value,
    normalized_shape: list[Size],
    weight: Value | None = None,
    eps: float | None = None,
) -> Value:
    _last_axis_only(x, normalized_shape)
    operands = [] if weight is None else [weight]
    return b.emit("rms_norm", x, *operands, eps=_F32_EPSILON if eps is None else float(eps))


def _last_axis_only(x: Value, normalized_shape: list[Size]) -> None:
    if len(normalized_shape) != 1:
        raise NoMapping(f"a norm over {len(normalized_shape)} axes of {x.type}")


# --- attention and experts -------------------------------------------------------------------


def _token_major(b: Builder, x: Value) -> Value:
    """[B, H, T, D] to [B, T, H, D]."""
    return b.permute(x, (0, 2, 1, 3))


@aten("bessemer.attention.default")
def _attention(
    b: Builder,
    q: Value,
    k: Value,
    v: Value,
    sinks: Value | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> Value:
    operands = [_token_major(b, x) for x in (q, k, v)]
    return b.emit(
        "attention",
        *operands,
        b.positions,
        *([] if sinks is None else [sinks]),
        layer=layer,
        scale=float(scale),
        window=window,
        softcap=float(softcap),
        has_sinks=sinks is not None,
    )


@aten("scaled_dot_product_attention.default")
def _sdpa(
    b: Builder,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    if attn_mask is not None:
        raise NoMapping(
            "scaled_dot_product_attention with an explicit mask; use is_causal=True, or write the "
            "masked softmax with matmul and softmax"
        )
    if not is_causal:
        raise NoMapping("scaled_dot_product_attention that is not causal")
    if dropout_p:
        raise NoMapping("attention dropout; call model.eval() first")
    rows = b.positions.shape[1]
    if query.shape[-2] != rows or key.shape[-2] != rows:
        raise NoMapping("causal attention whose rows are not the tokens of the call")
    operands = [_token_major(b, _heads(b, x, rows)) for x in (query, key, value)]
    width = query.shape[-1]
    if isinstance(width, Dim):
        raise NoMapping("attention with a head width that depends on the length")
    factor = width**-0.5 if scale is None else float(scale)
    result = b.emit("attention", *operands, b.positions, layer=b.next_layer(), scale=factor)
    return b.reshape(_token_major(b, result), b.out.shape)


def _heads(b: Builder, x: Value, rows: Size) -> Value:
    """[..., T, D] as [1, H, T, D]."""
    heads = product(tuple(x.shape[:-2]))
    shape: Shape = (1, heads, rows, x.shape[-1])
    return b.reshape(x, shape)


def _gate_first(b: Builder, x: Value, interleaved: bool, last: bool) -> Value:
    """Gate and up rows split apart: [E, 2F, ...] to [E, 2, F, ...], or [E, ..., 2F] when `last`."""
    experts, rows = x.shape[0], x.shape[-1 if last else 1]
    assert isinstance(rows, int)
    pair = (rows // 2, 2) if interleaved else (2, rows // 2)
    if not last:
        split = b.reshape(x, (experts, *pair, *x.shape[2:]))
        perm = [0, 2, 1, *range(3, split.type.rank)] if interleaved else range(split.type.rank)
    else:
        split = b.reshape(x, (*x.shape[:-1], *pair))
        at, of = (-1, -2) if interleaved else (-2, -1)
        rank = split.type.rank
        perm = [0, rank + at, rank + of, *range(1, rank - 2)]
    return b.permute(split, list(perm))


@aten("bessemer.moe.default")
def _moe(
    b: Builder,
    x: Value,
    indices: Value,
    scores: Value,
    gate_up: Value,
    down: Value,
    gate_up_bias: Value | None,
    down_bias: Value | None,
    activation: str,
    alpha: float,
    limit: float,
    interleaved: bool,
    transposed: bool,
) -> Value:
    weights = [
        _gate_first(b, gate_up, interleaved, last=transposed),
        b.permute(down, (0, 2, 1)) if transposed else down,
    ]
    biases = []
    if gate_up_bias is not None:
        biases.append(_gate_first(b, gate_up_bias, interleaved, last=False))
    if down_bias is not None:
        biases.append(down_bias)
    return b.emit(
        "moe",
        x,
        indices,
        scores,
        *weights,
        *biases,
        activation=activation,
        alpha=alpha,
        limit=limit,
        has_gate_up_bias=gate_up_bias is not None,
        has_down_bias=down_bias is not None,
    )


@aten("bessemer.sequence_length.default")
def _sequence_length(b: Builder, positions: Value) -> Value:
    return b.sequence_length()
