"""The ops that passes create, and the two (attention, moe) that the importer captures whole.

All work on `x[..., K]` whose leading dimensions are rows. A "gated" activation takes a gate and
an up projection: `act(gate) * up`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bessemer.graph.core import TensorType
from bessemer.graph.dtypes import DType
from bessemer.graph.ops.elementwise import ACTIVATIONS, sigmoid
from bessemer.graph.schema import REQUIRED, GraphError, OpSchema, register

# Gated activations that clamp the gate and the up projection first.
CLAMPED = ("silu_clamped", "swiglu_clamped")


def gated(gate: np.ndarray, up: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    """act(gate) * up. Clamped ones first limit both, g = min(gate, limit) and u = clip(up, -limit,
    limit): `silu_clamped` is silu(g) * u, `swiglu_clamped` (gpt-oss's) is
    (u + 1) * g * sigmoid(alpha * g).
    """
    name = attrs["activation"]
    if name not in CLAMPED:
        return (ACTIVATIONS[name](gate) * up).astype(gate.dtype)
    limit, alpha = np.float32(attrs["limit"]), np.float32(attrs["alpha"])
    g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    if name == "silu_clamped":
        return (g * sigmoid(g) * u).astype(gate.dtype)
    return ((u + 1) * g * sigmoid(alpha * g)).astype(gate.dtype)


def _check_activation(attrs: Mapping[str, Any], clamped: bool = False) -> None:
    name = attrs["activation"]
    if name not in ACTIVATIONS and not (clamped and name in CLAMPED):
        raise GraphError(f"unknown activation {name!r}")


def optional_operands(
    attrs: Mapping[str, Any], values: Sequence[Any], names: Sequence[str]
) -> dict:
    """Optional operands in their fixed order, those whose `has_...` attribute holds."""
    rest = iter(values)
    found = {n: next(rest) if attrs[f"has_{n}"] else None for n in names}
    if next(rest, None) is not None:
        raise GraphError(f"more operands than {', '.join(n for n in names if attrs[f'has_{n}'])}")
    return found


# --- linear ------------------------------------------------------------------------------------


def _linear_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    x, w, *rest = types
    _check_activation(attrs)
    optional = optional_operands(attrs, rest, ("bias", "residual"))
    if w.rank != 2 or x.shape[-1] != w.shape[1]:
        raise GraphError(f"linear({x}, {w}): weights are [N, K] with K the last size of x")
    result = TensorType(x.dtype, (*x.shape[:-1], w.shape[0]))
    bias, residual = optional["bias"], optional["residual"]
    if bias is not None and bias.shape != (w.shape[0],):
        raise GraphError(f"bias {bias} of linear with {w.shape[0]} outputs")
    if residual is not None and residual != result:
        raise GraphError(f"residual {residual} of linear that gives {result}")
    return result


def _linear(x: np.ndarray, w: np.ndarray, *rest: Any) -> np.ndarray:
    *operands, attrs = rest
    optional = optional_operands(attrs, operands, ("bias", "residual"))
    y = x @ w.T
    if optional["bias"] is not None:
        y = y + optional["bias"]
    y = ACTIVATIONS[attrs["activation"]](y)
    if attrs["scale"] != 1.0:
        y = y * np.float32(attrs["scale"])
    return y if optional["residual"] is None else y + optional["residual"]


register(
    OpSchema(
        "linear",
        (2, 4),
        {"activation": "none", "scale": 1.0, "has_bias": False, "has_residual": False},
        _linear_type,
        _linear,
        doc="residual + scale * act(x @ w.T + bias); w[N, K].",
    )
)


def _glu_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    x, w, *rest = types
    _check_activation(attrs, clamped=True)
    optional_operands(attrs, rest, ("bias",))
    if w.rank != 3 or w.shape[0] != 2 or x.shape[-1] != w.shape[2]:
        raise GraphError(f"glu_linear({x}, {w}): weights are [2, N, K]")
    return TensorType(x.dtype, (*x.shape[:-1], w.shape[1]))


def _glu_linear(x: np.ndarray, w: np.ndarray, *rest: Any) -> np.ndarray:
    *operands, attrs = rest
    bias = optional_operands(attrs, operands, ("bias",))["bias"]
    gate, up = x @ w[0].T, x @ w[1].T
    if bias is not None:
        gate, up = gate + bias[0], up + bias[1]
    return gated(gate, up, attrs)


_GATED = {"activation": "silu", "alpha": 1.702, "limit": 7.0}
register(
    OpSchema(
        "glu_linear",
        (2, 3),
        {**_GATED, "has_bias": False},
        _glu_type,
        _glu_linear,
        doc="act(x @ w[0].T + bias[0]) * (x @ w[1].T + bias[1]); w[2, N, K], bias[2, N].",
    )
)

# --- norms -------------------------------------------------------------------------------------


def _norm_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    x, *weights = types
    for w in weights:
        if w.shape != (x.shape[-1],):
            raise GraphError(f"norm of {x} with a weight {w}")
    return x


def rms_norm(x: np.ndarray, *rest: Any) -> np.ndarray:
    *w, attrs = rest
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(attrs["eps"]))
    y = x * scale
    return (y * w[0] if w else y).astype(x.dtype)


def _layer_norm(x: np.ndarray, *rest: Any) -> np.ndarray:
    *wb, attrs = rest
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    y = centred / np.sqrt(variance + np.float32(attrs["eps"]))
    if wb:
        y = y * wb[0]
    return (y + wb[1] if len(wb) > 1 else y).astype(x.dtype)


register(
    OpSchema(
        "rms_norm",
        (1, 2),
        {"eps": REQUIRED},
        _norm_type,
        rms_norm,
        doc="x / sqrt(mean(x^2) + eps) * w over the last axis.",
    )
)
register(
    OpSchema(
        "layer_norm",
        (1, 3),
        {"eps": REQUIRED},
        _norm_type,
        _layer_norm,
        doc="(x - mean) / sqrt(var + eps) * w + b over the last axis.",
    )
)

# --- rope --------------------------------------------------------------------------------------


def _rope_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    x, cos, sin = types
    if attrs["style"] not in ("half", "interleaved"):
        raise GraphError(f"rope style {attrs['style']!r} is neither half nor interleaved")
    if x.rank < 3 or cos != sin or cos.shape[:-1] != x.shape[:-2]:
        raise GraphError(f"rope({x}, {cos}, {sin}): x[..., T, H, D] with tables [..., T, rotary/2]")
    half, width, offset = cos.shape[-1], x.shape[-1], attrs["offset"]
    if isinstance(half, int) and isinstance(width, int) and not 0 <= offset <= width - 2 * half:
        raise GraphError(f"rope rotates {2 * half} of {width} elements, from element {offset}")
    return x


def rotate(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, style: str, offset: int = 0
) -> np.ndarray:
    """x[..., D] with 2 * half elements from `offset` rotated; the tables' leading dimensions
    broadcast to those of x."""
    half = cos.shape[-1]
    end = offset + 2 * half
    rotated = x[..., offset:end]
    if style == "half":
        a, b = rotated[..., :half], rotated[..., half:]
        parts = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        parts = np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rotated.shape)
    return np.concatenate([x[..., :offset], parts, x[..., end:]], axis=-1).astype(x.dtype)


def _rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    return rotate(x, cos[..., None, :], sin[..., None, :], attrs["style"], attrs["offset"])


register(
    OpSchema(
        "rope",
        (3, 3),
        {"style": "half", "offset": 0},
        _rope_type,
        _rope,
        doc="Rotary embedding of 2*half elements of each head, the first ones or those from "
        "`offset`: x[..., T, H, D] with cos and sin [..., T, half]. half pairs i with i+half, "
        "interleaved pairs 2i with 2i+1.",
    )
)

# --- attention ---------------------------------------------------------------------------------


def _attention_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    q, k, v, positions, *rest = types
    optional_operands(attrs, rest, ("sinks",))
    if not (q.rank == k.rank == v.rank >= 3):
        raise GraphError(f"attention({q}, {k}, {v}) needs [..., T, heads, width]")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise GraphError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    if q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        raise GraphError(f"attention({q}, {k}, {v}) with unequal widths or heads")
    if q.shape[:-2] != k.shape[:-2] or positions.shape != q.shape[:-2]:
        raise GraphError(f"attention({q}, {k}, {v}, {positions}) with unequal rows")
    return TensorType(q.dtype, (*q.shape[:-1], v.shape[-1]))


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    allowed: np.ndarray,
    attrs: Mapping[str, Any],
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention of q[T, Hq, D] over k[S, Hkv, D], v[S, Hkv, Dv]; allowed[T, S]. Rows without an
    allowed key give zeros. A sink is one more score of its head that carries no value.
    """
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.einsum("thd,shd->hts", q, k) * np.float32(attrs["scale"])
    if attrs["softcap"]:
        cap = np.float32(attrs["softcap"])
        scores = np.tanh(scores / cap) * cap
    scores = np.where(allowed[None], scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    top = np.where(np.isneginf(top), 0, top)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    p = p / np.where(total == 0, 1, total)
    return np.einsum("hts,shv->thv", p, v).astype(q.dtype)


def _attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, *rest: Any
) -> np.ndarray:
    *operands, attrs, env = rest
    sinks = optional_operands(attrs, operands, ("sinks",))["sinks"]
    shape = (*q.shape[:-1], v.shape[-1])
    q, k, v = (a.reshape(-1, *a.shape[-2:]) for a in (q, k, v))
    at = positions.reshape(-1)
    k, v, key_at = env.extend_kv(attrs["layer"], k, v, at)
    allowed = key_at[None] <= at[:, None]
    if attrs["window"]:
        allowed &= key_at[None] > at[:, None] - attrs["window"]
    return attend(q, k, v, allowed, attrs, sinks).reshape(shape)


_ATTENTION = {"layer": REQUIRED, "scale": REQUIRED, "window": 0, "softcap": 0.0, "has_sinks": False}
for _name, _doc in {
    "attention": "Causal attention of rows over the layer's KV cache, which it first extends.",
    "flash_attention": "`attention` for many rows: blocks of keys with an online softmax.",
    "gqa_decode_attention": "`attention` of one row: the query heads of a KV head together.",
}.items():
    register(
        OpSchema(
            _name,
            (4, 5),
            _ATTENTION,
            _attention_type,
            _attention,
            needs_env=True,
            doc=_doc + " (q[..., T, Hq, D], k[..., T, Hkv, D], v[..., T, Hkv, Dv], positions "
            "[..., T], sinks[Hq]?) -> [..., T, Hq, Dv]. window 0 and softcap 0 mean none.",
        )
    )

# --- mixture of experts ------------------------------------------------------------------------


def _expert_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    x, indices, w, *rest = types
    _check_activation(attrs, clamped=attrs["gated"])
    optional_operands(attrs, rest, ("bias",))
    if w.rank != (4 if attrs["gated"] else 3) or w.shape[-1] != x.shape[-1]:
        raise GraphError(f"expert_linear({x}, {indices}, {w}): weights are [E, (2,) N, K]")
    if x.shape[:-1] not in (indices.shape[:-1], indices.shape):
        raise GraphError(f"expert_linear({x}, {indices}): x is [..., K] or [..., k, K]")
    return TensorType(x.dtype, (*indices.shape, w.shape[-2]))


def _expert_linear(x: np.ndarray, indices: np.ndarray, w: np.ndarray, *rest: Any) -> np.ndarray:
    *operands, attrs = rest
    bias = optional_operands(attrs, operands, ("bias",))["bias"]
    if x.ndim == indices.ndim:
        x = np.broadcast_to(x[..., None, :], (*indices.shape, x.shape[-1]))
    result = np.zeros((*indices.shape, w.shape[-2]), x.dtype)
    for expert in np.unique(indices):
        chosen = indices == expert
        one = (x[chosen], w[expert], *(() if bias is None else (bias[expert],)))
        if attrs["gated"]:
            result[chosen] = _glu_linear(*one, {**attrs, "has_bias": bias is not None})
        else:
            plain = {**attrs, "scale": 1.0, "has_bias": bias is not None, "has_residual": False}
            result[chosen] = _linear(*one, plain)
    return result


register(
    OpSchema(
        "expert_linear",
        (3, 4),
        {**_GATED, "activation": "none", "gated": False, "has_bias": False},
        _expert_type,
        _expert_linear,
        doc="For each row and chosen expert e = indices[..., j]: linear, or glu_linear when gated, "
        "with w[e]. x[..., K] or [..., k, K]; indices[..., k]; w[E, N, K] or [E, 2, N, K]; "
        "bias[E, N] or [E, 2, N] -> [..., k, N]. Only chosen experts' weights are touched.",
    )
)


def _moe_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    x, indices, scores, gate_up, down, *rest = types
    _check_activation(attrs, clamped=True)
    optional_operands(attrs, rest, ("gate_up_bias", "down_bias"))
    if indices.shape != scores.shape or indices.dtype != DType.I64:
        raise GraphError(f"moe: indices {indices} and scores {scores}")
    if gate_up.rank != 4 or gate_up.shape[1] != 2 or down.rank != 3:
        raise GraphError(f"moe: gate_up {gate_up} is [E, 2, F, H], down {down} is [E, H, F]")
    return x


def _moe(
    x: np.ndarray,
    indices: np.ndarray,
    scores: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    *rest: Any,
) -> np.ndarray:
    *operands, attrs = rest
    bias = optional_operands(attrs, operands, ("gate_up_bias", "down_bias"))

    def expert(x: np.ndarray, w: np.ndarray, b: np.ndarray | None, gated: bool) -> np.ndarray:
        extra = () if b is None else (b,)
        name = attrs["activation"] if gated else "none"
        now = {**attrs, "gated": gated, "has_bias": b is not None, "activation": name}
        return _expert_linear(x, indices, w, *extra, now)

    hidden = expert(x, gate_up, bias["gate_up_bias"], True)
    each = expert(hidden, down, bias["down_bias"], False)
    return np.sum(each * scores[..., None], axis=-2, dtype=x.dtype)


register(
    OpSchema(
        "moe",
        (5, 7),
        {**_GATED, "has_gate_up_bias": False, "has_down_bias": False},
        _moe_type,
        _moe,
        doc="Routed experts: sum over chosen experts of score * down(glu(x)). x[..., H], "
        "indices and scores [..., k], gate_up[E, 2, F, H], down[E, H, F], gate_up_bias[E, 2, F], "
        "down_bias[E, H].",
    )
)

# --- rows --------------------------------------------------------------------------------------


def _select_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    x, rows = types
    if rows.rank != 1 or rows.dtype.is_float:
        raise GraphError(f"select_rows({x}, {rows})")
    axis = attrs["axis"] + x.rank
    return TensorType(x.dtype, (*x.shape[:axis], rows.shape[0], *x.shape[axis + 1 :]))


register(
    OpSchema(
        "select_rows",
        (2, 2),
        {"axis": -2},
        _select_type,
        lambda x, rows, attrs: np.take(x, rows, axis=attrs["axis"]),
        doc="The token rows whose logits are wanted: x[..., T, H], rows[R] -> [..., R, H].",
    )
)
