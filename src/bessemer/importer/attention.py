"""Attention as one op: `bessemer::attention`, registered with transformers' interfaces.

The cache, the causal mask, sliding windows and grouped heads are the op's meaning, so neither a
cache object nor a mask is ever traced. Models choose it by the name `IMPLEMENTATION`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from bessemer.errors import UnsupportedError

IMPLEMENTATION = "bessemer"

# What transformers hands to an attention function besides the operands and does not change the
# result of a causal forward without cache and padding.
_HARMLESS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "cumulative_seqlens",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@torch.library.custom_op("bessemer::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Causal attention of q[B, Hq, T, D] over k[B, Hkv, T, D], v[B, Hkv, T, Dv] -> [B, T, Hq, Dv].

    window 0 and softcap 0 mean none. Eager calls see only the rows given (no cache).
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    row = torch.arange(q.shape[2], device=q.device)
    hidden = row[None, :] > row[:, None]
    if window:
        hidden |= row[None, :] <= row[:, None] - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous()


@attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _check(module: torch.nn.Module, extra: dict[str, Any], dropout: float) -> None:
    where = type(module).__name__
    if not getattr(module, "is_causal", True) or extra.pop("is_causal", True) is False:
        raise UnsupportedError(f"{where}: attention that is not causal can't be compiled")
    if dropout:
        raise UnsupportedError(f"{where}: dropout {dropout} in attention; call model.eval() first")
    left = [k for k, v in extra.items() if k not in _HARMLESS and v is not None]
    if left:
        raise UnsupportedError(
            f"{where}: attention is called with {', '.join(sorted(left))}, "
            "which Bessemer's attention op doesn't know"
        )


def _interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls in place of its eager one.

    The window comes from `masks.note_windows`, not from `sliding_window`: eager attention obeys
    the mask alone.
    """
    _check(module, extra, dropout)
    if attention_mask is not None:
        raise UnsupportedError(
            f"{type(module).__name__} builds an attention mask of its own (a bias such as ALiBi, "
            "or a mask that is not causal or sliding); Bessemer's attention op is causal only"
        )
    if not hasattr(module, "bessemer_window"):
        raise UnsupportedError(f"{type(module).__name__}: attention outside the decoder's layers")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = torch.ops.bessemer.attention(
        query,
        key,
        value,
        s_aux,
        int(module.layer_idx),
        scale,
        module.bessemer_window,
        float(softcap or 0.0),
    )
    return out, None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask function of the op: it masks by itself."""
    return None


AttentionInterface.register(IMPLEMENTATION, _interface)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
