"""Attention over a window of rows and over blocks of older rows, each block pooled into one.

Keys and values are one row for all heads. Besides the rows of its window a layer keeps compressed
rows: row s pools the token rows of window s, positions `s * rate` to `s * rate + rate - 1`. Three
ops share this state, ordered by their operands: `block_compress` closes windows, `index_topk` picks
compressed rows by score, `compressed_attention` attends. Their eager meaning needs all positions
from 0; rows that were rewound (positions at or after the first of a call) are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bessemer.graph.core import TensorType
from bessemer.graph.dtypes import DType
from bessemer.graph.ops.fused import attend, optional_operands, rms_norm, rotate
from bessemer.graph.ops.reduction import softmax
from bessemer.graph.ops.rounding import (
    check_blocks,
    check_power_of_two,
    hadamard,
    round_trip,
)
from bessemer.graph.schema import (
    LAST_POSITION,
    REQUIRED,
    Env,
    GraphError,
    OpSchema,
    WindowState,
    register,
)

STREAMS = ("kv", "index")
# How compressed rows are rounded, with the elements of a block that share a scale.
ROUNDINGS = {"none": 0, "e4m3": 64, "e2m1": 32}

# --- block_compress ----------------------------------------------------------------------------


def _compress_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    kv, gate, bias, norm, cos, sin, positions = types
    shown = f"block_compress({', '.join(map(str, types))})"
    width, row = kv.shape[-1], norm.shape[-1]
    if attrs["stream"] not in STREAMS or attrs["rate"] < 1:
        raise GraphError(f"{shown}: stream {attrs['stream']!r}, rate {attrs['rate']}")
    if kv != gate or bias.shape != (attrs["rate"], width):
        raise GraphError(f"{shown}: kv and gate [..., T, W], bias [rate, W]")
    if not isinstance(row, int) or width != (2 * row if attrs["overlap"] else row):
        raise GraphError(f"{shown}: W is D, or 2 D with overlap")
    half = cos.shape[-1]
    if cos != sin or cos.shape[:-1] != kv.shape[:-1] or not isinstance(half, int) or 2 * half > row:
        raise GraphError(f"{shown}: tables [..., T, rotary / 2]")
    if positions.shape != kv.shape[:-1] or positions.dtype != DType.I64:
        raise GraphError(f"{shown}: positions are i64[..., T]")
    _check_rounding(attrs["round"], row, 2 * half)
    return TensorType(DType.I64, positions.shape)


def _check_rounding(round_: str, row: int, rotary: int) -> None:
    if round_ not in ROUNDINGS:
        raise GraphError(f"compressed rows are rounded by {round_!r}; known: {list(ROUNDINGS)}")
    if round_ == "e4m3":
        check_blocks(row - rotary, round_, ROUNDINGS[round_])
    elif round_ == "e2m1":
        check_power_of_two(row)
        check_blocks(row, round_, ROUNDINGS[round_])


def pool_window(kv: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """One row of token rows kv[N, D]: their average by the softmax of gate[N, D] over N."""
    return np.asarray(np.sum(kv * softmax(gate, axis=0), axis=0), np.float32)


def round_row(row: np.ndarray, round_: str, rotary: int) -> np.ndarray:
    """A finished compressed row as the cache holds it, in f32. E4M3 spares the trailing `rotary`
    elements, and the row is rounded to f16 after it; E2M1 comes after a Hadamard rotation.
    """
    if round_ == "e4m3":
        plain = row.shape[-1] - rotary
        head = round_trip(row[..., :plain], "e4m3", ROUNDINGS[round_])
        return np.concatenate([head, row[..., plain:]], -1).astype(np.float16).astype(np.float32)
    return round_trip(hadamard(row), "e2m1", ROUNDINGS[round_]) if round_ == "e2m1" else row


def _block_compress(
    kv: np.ndarray,
    gate: np.ndarray,
    bias: np.ndarray,
    norm: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    attrs: Mapping[str, Any],
    env: Env,
) -> np.ndarray:
    rate, width = attrs["rate"], norm.shape[-1]
    state = env.windows.setdefault((attrs["layer"], attrs["stream"]), WindowState())
    at = positions.reshape(-1)
    kv, gate = kv.reshape(-1, kv.shape[-1]), gate.reshape(-1, gate.shape[-1])
    cos, sin = cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1])
    state.rewind(int(at.min(initial=LAST_POSITION)), rate)
    for t, position in enumerate(at):
        state.pending[int(position)] = (kv[t], gate[t] + bias[position % rate])
        if (position + 1) % rate:
            continue
        window = range(position + 1 - rate, position + 1)
        tokens, gates = state.window(window)
        if attrs["overlap"]:
            before = range(window.start - rate, window.start)
            older, older_gates = state.window(before)
            tokens = np.concatenate([older[:, :width], tokens[:, width:]])
            gates = np.concatenate([older_gates[:, :width], gates[:, width:]])
        row = rms_norm(pool_window(tokens, gates), norm, attrs)
        row = rotate(row, cos[t], sin[t], "interleaved", width - 2 * cos.shape[-1])
        state.rows[position // rate] = round_row(row, attrs["round"], 2 * cos.shape[-1])
    return (positions + 1) // rate


register(
    OpSchema(
        "block_compress",
        (7, 7),
        {
            "layer": REQUIRED,
            "stream": "kv",
            "rate": REQUIRED,
            "overlap": False,
            "eps": REQUIRED,
            "round": "none",
        },
        _compress_type,
        _block_compress,
        needs_env=True,
        doc="(kv[..., T, W], gate[..., T, W], bias[rate, W], norm[D], cos and sin [..., T, rotary "
        "/ 2], positions[..., T]) -> visible i64[..., T]. Each token row whose position p closes a "
        "window, (p + 1) % rate == 0, makes compressed row p // rate of the layer's stream: over "
        "the window's rows j, the sum of softmax(gate_j + bias[j % rate]) * kv_j, by element; "
        "rms_norm with `norm`; the trailing `rotary` elements rotated in pairs by the tables of "
        "the closing row (of position p + 1 - rate); rounded as `round` says. With overlap W = 2 D "
        "and the softmax runs over the previous window's rows too: theirs are the first D elements "
        "of kv and gate, the current window's the last D; window 0 has no previous one. visible = "
        "(p + 1) // rate is the number of compressed rows that a token may see.",
    )
)

# --- index_topk --------------------------------------------------------------------------------


def _index_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    q, weights, visible = types
    if q.rank < 3 or weights.shape != q.shape[:-1] or visible.shape != q.shape[:-2]:
        raise GraphError(f"index_topk({q}, {weights}, {visible}): q[..., T, H, D], weights [T, H]")
    if visible.dtype != DType.I64 or attrs["k"] < 1:
        raise GraphError(f"index_topk({q}, {weights}, {visible}) of {attrs['k']} rows")
    return TensorType(DType.I64, (*q.shape[:-2], attrs["k"]))


def choose(scores: np.ndarray, k: int) -> np.ndarray:
    """The k best of scores[S], as ascending indices, then -1. Among equal scores the lowest index
    wins; a score that is no number counts as the least.
    """
    order = np.argsort(-np.where(np.isnan(scores), -np.inf, scores), kind="stable")[:k]
    return np.concatenate([np.sort(order), np.full(k - len(order), -1)]).astype(np.int64)


def _index_topk(
    q: np.ndarray, weights: np.ndarray, visible: np.ndarray, attrs: Mapping[str, Any], env: Env
) -> np.ndarray:
    rows = env.windows[attrs["layer"], "index"].stacked(int(visible.max(initial=0)), q.shape[-1])
    flat, weights = q.reshape(-1, *q.shape[-2:]), weights.reshape(-1, q.shape[-2])
    products = np.maximum(np.einsum("thd,sd->ths", flat, rows), 0)
    scores = np.einsum("ths,th->ts", products, weights) * np.float32(attrs["scale"])
    chosen = [choose(scores[t, :n], attrs["k"]) for t, n in enumerate(visible.reshape(-1).tolist())]
    return np.array(chosen, np.int64).reshape(*visible.shape, attrs["k"])


register(
    OpSchema(
        "index_topk",
        (3, 3),
        {"layer": REQUIRED, "k": REQUIRED, "scale": REQUIRED},
        _index_type,
        _index_topk,
        needs_env=True,
        doc="(q[..., T, H, D], weights[..., T, H], visible i64[..., T]) -> i64[..., T, k]. The "
        "score of compressed row s < visible of the layer's index stream is scale * the sum over "
        "heads of weights[h] * relu(q[h] . row[s]). The k best, as ascending indices, then -1 "
        "where there are fewer. Among equal scores the lowest index wins.",
    )
)

# --- compressed_attention ----------------------------------------------------------------------


def _attention_operands(values: Sequence[Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
    return optional_operands(attrs, values, ("sinks", "visible", "indices"))


def _attention_type(types: Sequence[TensorType], attrs: Mapping[str, Any]) -> TensorType:
    q, kv, positions, *rest = types
    given = _attention_operands(rest, attrs)
    shown = f"compressed_attention({', '.join(map(str, types))})"
    if q.rank < 3 or kv.shape != (*q.shape[:-2], q.shape[-1]) or kv.dtype != q.dtype:
        raise GraphError(f"{shown}: q[..., T, H, D] and kv[..., T, D]")
    if attrs["window"] < 1 or positions.shape != q.shape[:-2]:
        raise GraphError(f"{shown}: positions[..., T], and a window of {attrs['window']}")
    sinks, visible, indices = given["sinks"], given["visible"], given["indices"]
    if sinks is not None and sinks.shape != (q.shape[-2],):
        raise GraphError(f"{shown}: sinks are [H]")
    if visible is not None and visible != positions:
        raise GraphError(f"{shown}: visible is i64[..., T]")
    if indices is not None and (visible is None or indices.shape[:-1] != visible.shape):
        raise GraphError(f"{shown}: indices are i64[..., T, k], and need visible")
    return q


def _allowed_rows(visible: np.ndarray, indices: np.ndarray | None, count: int) -> np.ndarray:
    """bool[T, S]: the compressed rows that each token attends to."""
    if indices is None:
        return np.arange(count)[None] < visible[:, None]
    allowed = np.zeros((len(visible), count + 1), bool)
    np.put_along_axis(allowed, np.where(indices < 0, count, indices), True, axis=-1)
    return allowed[:, :count]


def _compressed_attention(
    q: np.ndarray, kv: np.ndarray, positions: np.ndarray, *rest: Any
) -> np.ndarray:
    *operands, attrs, env = rest
    given = _attention_operands(operands, attrs)
    shape, at = q.shape, positions.reshape(-1)
    q, kv = q.reshape(-1, *q.shape[-2:]), kv.reshape(-1, kv.shape[-1])
    rows, _, key_at = env.extend_kv(attrs["layer"], kv, kv, at)
    allowed = (key_at <= at[:, None]) & (key_at > at[:, None] - attrs["window"])
    if given["visible"] is not None:
        visible = given["visible"].reshape(-1)
        count = int(visible.max(initial=0))
        older = env.windows[attrs["layer"], "kv"].stacked(count, kv.shape[-1])
        indices = given["indices"]
        chosen = None if indices is None else indices.reshape(len(visible), indices.shape[-1])
        allowed = np.concatenate([allowed, _allowed_rows(visible, chosen, count)], 1)
        rows = np.concatenate([rows, older])
    one_head = rows[:, None]
    return attend(
        q, one_head, one_head, allowed, {**attrs, "softcap": 0.0}, given["sinks"]
    ).reshape(shape)


register(
    OpSchema(
        "compressed_attention",
        (3, 6),
        {
            "layer": REQUIRED,
            "scale": REQUIRED,
            "window": REQUIRED,
            "has_sinks": False,
            "has_visible": False,
            "has_indices": False,
        },
        _attention_type,
        _compressed_attention,
        needs_env=True,
        doc="(q[..., T, H, D], kv[..., T, D], positions[..., T], sinks[H]?, visible i64[..., T]?, "
        "indices i64[..., T, k]?) -> [..., T, H, D]. The row kv is key and value of every head. "
        "Extends the layer's rows by kv and attends over those at positions (p - window, p] and, "
        "in the same softmax, over the compressed rows s < visible of the layer's kv stream; over "
        "those among them that `indices` names where it is given (-1 names none). A sink is one "
        "more score of its head that carries no value.",
    )
)
