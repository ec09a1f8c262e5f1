"""Routed experts as one op: `bessemer::moe`, registered with transformers' ExpertsInterface."""

from __future__ import annotations

import torch
from transformers.integrations.moe import ExpertsInterface, _default_apply_gate

from bessemer.errors import UnsupportedError
from bessemer.graph.ops.fused import CLAMPED
from bessemer.importer.attention import IMPLEMENTATION

# ACT2FN class (or torch class) -> the activation's name in a graph.
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
}


@torch.library.custom_op("bessemer::moe", mutates_args=())
def moe(
    x: torch.Tensor,
    indices: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    interleaved: bool,
    transposed: bool,
) -> torch.Tensor:
    """Sum over the chosen experts of score * down(act(gate) * up): x[T, H] -> [T, H].

    gate_up[E, 2F, H] and down[E, H, F]; with their last two axes swapped when `transposed`. Rows
    of gate_up are all gates, then all ups; or gate, up, gate, up, ... when `interleaved`.
    """
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    both = torch.einsum("th,tknh->tkn", x, gate_up[indices])
    if gate_up_bias is not None:
        both = both + gate_up_bias[indices]
    gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
    if activation in CLAMPED:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swiglu_clamped":
        hidden = (up + 1) * gate * torch.sigmoid(alpha * gate)
    elif activation == "silu_clamped":
        hidden = torch.nn.functional.silu(gate) * up
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        gelu = torch.nn.GELU(approximate)
        act = gelu if "gelu" in activation else getattr(torch.nn.functional, activation)
        hidden = act(gate) * up
    each = torch.einsum("tkf,tkhf->tkh", hidden, down[indices])
    if down_bias is not None:
        each = each + down_bias[indices]
    return (each * scores[..., None]).sum(1)


@moe.register_fake
def _(
    x: torch.Tensor,
    indices: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    interleaved: bool,
    transposed: bool,
) -> torch.Tensor:
    return torch.empty_like(x)


def _gate(experts: torch.nn.Module) -> tuple[str, float, float]:
    """Name, alpha and limit of the experts' gated activation. Raises UnsupportedError."""
    name = type(experts).__name__
    if type(experts)._apply_gate is _default_apply_gate:
        kind = type(experts.act_fn).__name__
        if kind not in _ACTIVATIONS:
            raise UnsupportedError(f"{name}: the experts' activation {kind} is not supported")
        return _ACTIVATIONS[kind], 1.702, 7.0
    if name == "GptOssExperts":
        return "swiglu_clamped", float(experts.alpha), float(experts.limit)
    raise UnsupportedError(f"{name}: experts with a gate function of their own are not supported")


def _forward(
    experts: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The experts function that transformers calls in place of its eager loop."""
    name = type(experts).__name__
    if not experts.has_gate or experts.has_post_expert_norm or experts._is_expert_parallel:
        raise UnsupportedError(f"{name}: experts without a gate, or with a norm, are not supported")
    activation, alpha, limit = _gate(experts)
    return torch.ops.bessemer.moe(
        hidden_states,
        top_k_index,
        top_k_weights,
        experts.gate_up_proj,
        experts.down_proj,
        experts.gate_up_proj_bias if experts.has_bias else None,
        experts.down_proj_bias if experts.has_bias else None,
        activation,
        alpha,
        limit,
        not experts.is_concatenated,
        experts.is_transposed,
    )


ExpertsInterface.register(IMPLEMENTATION, _forward)
