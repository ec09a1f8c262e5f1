"""DeepSeek V4: attention over a window and compressed blocks, hyper-connections, routed experts.

Every layer attends to the last `sliding_window` tokens through one row that is key and value of all
heads, rotated at its tail; the output is rotated back. Layers of type `compressed_sparse_attention`
also see older tokens in overlapping blocks, of which an indexer picks the best;
`heavily_compressed_attention` sees all of its longer blocks. Parameter names are those of
transformers' DeepseekV4ForCausalLM, which is the numerical reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bessemer.errors import UnsupportedError
from bessemer.graph.ops.compressed import ROUNDINGS
from bessemer.importer import experts  # noqa: F401  (the op moe)
from bessemer.models import DefinitionOptions
from bessemer.models.deepseek_v4_config import (
    SPARSE,
    WINDOW_ONLY,
    check_sizes,
    low_precision_refusals,
)
from bessemer.models.hyper_connections import HyperConnection, HyperHead, mixed, rms_normalised
from bessemer.models.rotary import RotaryTables
from bessemer.steering import ATTENTION_SITE, FFN_SITE

ops = torch.ops.bessemer

# Keeps the normalisation of routing weights from dividing by zero, as in the reference.
ROUTING_EPS = 1e-20
SCORES = {
    "sqrtsoftplus": lambda x: nn.functional.softplus(x).sqrt(),
    "sigmoid": torch.sigmoid,
}

Table = tuple[torch.Tensor, torch.Tensor]


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * rms_normalised(x, self.eps)


class Positions:
    """Rotary tables of a call, each computed once: of the tokens, and of the blocks they close."""

    def __init__(self, tables: nn.ModuleDict, positions: torch.Tensor) -> None:
        self.tables, self.positions = tables, positions
        self.done: dict[tuple[str, int], Table] = {}

    def table(self, kind: str, back: int = 0) -> Table:
        """cos and sin [B, T, rotary / 2] of a kind of layer, `back` positions before each token."""
        if (kind, back) not in self.done:
            self.done[kind, back] = self.tables[kind](self.positions - back)
        return self.done[kind, back]


class Compressor(nn.Module):
    """Blocks of token rows pooled into one row each, in one stream of a layer's state."""

    def __init__(self, config: Any, layer: int, stream: str, width: int, low: bool) -> None:
        super().__init__()
        kind = config.layer_types[layer]
        self.layer, self.stream = layer, stream
        self.rate, self.overlap = config.compress_rates[kind], kind == SPARSE
        self.eps = config.rms_norm_eps
        self.round = {"kv": "e4m3", "index": "e2m1"}[stream] if low else "none"
        both = 2 * width if self.overlap else width
        self.kv_proj = linear(config.hidden_size, both)
        self.gate_proj = linear(config.hidden_size, both)
        self.position_bias = nn.Parameter(torch.empty(self.rate, both))
        self.kv_norm = RMSNorm(width, config.rms_norm_eps)

    def rows(self, x: torch.Tensor, at: Positions) -> Table:
        """x[B, T, hidden] -> the rows of closed blocks [B, T, D], and how many each token sees."""
        return ops.block_compress(
            self.kv_proj(x),
            self.gate_proj(x),
            self.position_bias,
            self.kv_norm.weight,
            *at.table("compress", self.rate - 1),
            at.positions,
            self.layer,
            self.stream,
            self.rate,
            self.overlap,
            self.eps,
            self.round,
        )


class IndexScorer(nn.Module):
    """The weight of each index head, by token."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weights_proj = linear(config.hidden_size, config.index_n_heads)


class Indexer(Compressor):
    """Picks the compressed rows that a token attends to: the best by the index heads' scores."""

    def __init__(self, config: Any, layer: int, low: bool) -> None:
        width, heads = config.index_head_dim, config.index_n_heads
        super().__init__(config, layer, "index", width, low)
        self.heads, self.width, self.low = heads, width, low
        self.k, self.scale = config.index_topk, width**-0.5 * heads**-0.5
        self.q_b_proj = linear(config.q_lora_rank, heads * width)
        self.scorer = IndexScorer(config)

    def forward(self, x: torch.Tensor, q_residual: torch.Tensor, at: Positions) -> torch.Tensor:
        """-> indices i64[B, T, k] of compressed rows, ascending, then -1."""
        rows, visible = self.rows(x, at)
        cos, sin = at.table("compress")
        q = self.q_b_proj(q_residual).unflatten(-1, (self.heads, self.width))
        q = ops.rope(q, cos, sin, "interleaved", self.width - 2 * cos.shape[-1])
        if self.low:
            q = ops.round_trip(ops.hadamard(q), "e2m1", ROUNDINGS["e2m1"], 0, self.width)
        weights = self.scorer.weights_proj(x)
        return ops.index_topk(q, weights, rows, visible, self.layer, self.rate, self.k, self.scale)


class AttentionCompressor(Compressor):
    """The compressed rows that attention sees, and those of them that the indexer picks."""

    def __init__(self, config: Any, layer: int, low: bool) -> None:
        super().__init__(config, layer, "kv", config.head_dim, low)
        if self.overlap:
            self.indexer = Indexer(config, layer, low)

    def forward(
        self, x: torch.Tensor, q_residual: torch.Tensor, at: Positions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        rows, visible = self.rows(x, at)
        return rows, visible, self.indexer(x, q_residual, at) if self.overlap else None


class Attention(nn.Module):
    def __init__(self, config: Any, layer: int, low: bool) -> None:
        super().__init__()
        kind = config.layer_types[layer]
        self.layer, self.low = layer, low
        self.heads, self.width = config.num_attention_heads, config.head_dim
        self.window, self.eps = config.sliding_window, config.rms_norm_eps
        self.groups, self.rank = config.o_groups, config.o_lora_rank
        self.table = "main" if kind == WINDOW_ONLY else "compress"
        joined = self.heads * self.width
        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_norm = RMSNorm(config.q_lora_rank, self.eps)
        self.q_b_proj = linear(config.q_lora_rank, joined)
        self.kv_proj = linear(config.hidden_size, self.width)
        self.kv_norm = RMSNorm(self.width, self.eps)
        self.o_a_proj = linear(joined // self.groups, self.groups * self.rank)
        self.o_b_proj = linear(self.groups * self.rank, config.hidden_size)
        self.sinks = nn.Parameter(torch.empty(self.heads))
        if kind != WINDOW_ONLY:
            self.compressor = AttentionCompressor(config, layer, low)
        self.rate = self.compressor.rate if kind != WINDOW_ONLY else 0

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        """x[B, T, hidden] -> [B, T, hidden]."""
        cos, sin = at.table(self.table)
        tail = self.width - 2 * cos.shape[-1]
        q_residual = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(q_residual).unflatten(-1, (self.heads, self.width))
        q = ops.rope(rms_normalised(q, self.eps), cos, sin, "interleaved", tail)
        kv = self.kv_norm(self.kv_proj(x)).unsqueeze(-2)
        kv = ops.rope(kv, cos, sin, "interleaved", tail).squeeze(-2)
        if self.low:
            kv = ops.round_f16(ops.round_trip(kv, "e4m3", ROUNDINGS["e4m3"], 0, tail))
        rows, visible, indices = (
            self.compressor(x, q_residual, at) if self.rate else (None, None, None)
        )
        out = ops.compressed_attention(
            *(q, kv, self.sinks, rows, visible, indices),
            self.layer,
            self.width**-0.5,
            self.window,
            self.rate,
        )
        # The values are rotated as the keys are: turned back, a value's weight depends on how far
        # away it is, not on where.
        return self.output(ops.rope(out, cos, -sin, "interleaved", tail))

    def output(self, heads: torch.Tensor) -> torch.Tensor:
        """heads[B, T, H, D] through a projection of each group of heads, then one of all groups."""
        joined = heads.flatten(2)
        width = joined.shape[-1] // self.groups
        parts = [
            nn.functional.linear(
                joined[..., g * width : (g + 1) * width],
                self.o_a_proj.weight[g * self.rank : (g + 1) * self.rank],
            )
            for g in range(self.groups)
        ]
        return self.o_b_proj(torch.cat(parts, -1))


class MLP(nn.Module):
    """silu(g) * u with g = min(gate, limit) and u = clip(up, -limit, limit)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.gate_proj = linear(hidden, inner)
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)
        up = self.up_proj(x).clamp(min=-self.limit, max=self.limit)
        return self.down_proj(nn.functional.silu(gate) * up)


class Router(nn.Module):
    """Which experts a token goes to, and with which weights: the best by score and a bias that
    counts for the choice alone, or those that a table gives the token's id.
    """

    def __init__(self, config: Any, hashed: bool) -> None:
        super().__init__()
        count, self.k = config.n_routed_experts, config.num_experts_per_tok
        self.hashed, self.factor = hashed, config.routed_scaling_factor
        self.score = SCORES[config.scoring_func]
        self.weight = nn.Parameter(torch.empty(count, config.hidden_size))
        if hashed:
            # Numbers of experts are exact in f32, and tables of a graph are f32.
            self.register_buffer("tid2eid", torch.empty(config.vocab_size, self.k))
            self.table_limits = {"tid2eid": count}
        else:
            self.register_buffer("e_score_correction_bias", torch.empty(count))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x[T, hidden], ids[T] -> indices i64[T, k], weights f32[T, k]."""
        scores = self.score(nn.functional.linear(x, self.weight))
        if self.hashed:
            indices = self.tid2eid[ids].long()
        else:
            biased = scores + self.e_score_correction_bias
            indices = biased.topk(self.k, dim=-1).indices
        weights = scores.gather(1, indices)
        weights = weights / (weights.sum(-1, keepdim=True) + ROUTING_EPS)
        return indices, weights * self.factor


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        count, hidden = config.n_routed_experts, config.hidden_size
        inner, self.limit = config.moe_intermediate_size, config.swiglu_limit
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """x[T, hidden] -> [T, hidden]."""
        return ops.moe(
            *(x, indices, weights, self.gate_up_proj, self.down_proj, None, None),
            "silu_clamped",
            1.0,
            self.limit,
            False,
            False,
        )


class FeedForward(nn.Module):
    """The routed experts, and one that every token goes to."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.gate = Router(config, config.mlp_layer_types[layer] == "hash_moe")
        self.experts = Experts(config)
        self.shared_experts = MLP(config)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x[B, T, hidden], ids[B, T] -> [B, T, hidden]."""
        flat = x.flatten(0, 1)
        routed = self.experts(flat, *self.gate(flat, ids.flatten()))
        return routed.unflatten(0, x.shape[:2]) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, config: Any, layer: int, options: DefinitionOptions) -> None:
        super().__init__()
        self.layer, self.layers = layer, config.num_hidden_layers
        self.steering = options.steering
        self.self_attn = Attention(config, layer, options.low_precision)
        self.mlp = FeedForward(config, layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn_hc = HyperConnection(config)
        self.ffn_hc = HyperConnection(config)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, at: Positions) -> torch.Tensor:
        """x[B, T, N, hidden] -> the same."""
        post, comb, one = self.attn_hc(x)
        y = self.steered(self.self_attn(self.input_layernorm(one), at), ATTENTION_SITE)
        x = mixed(x, y, post, comb)
        post, comb, one = self.ffn_hc(x)
        y = self.steered(self.mlp(self.post_attention_layernorm(one), ids), FFN_SITE)
        return mixed(x, y, post, comb)

    def steered(self, y: torch.Tensor, site: int) -> torch.Tensor:
        return ops.steer(y, self.layer, self.layers, site) if self.steering else y


class Decoder(nn.Module):
    def __init__(self, config: Any, options: DefinitionOptions) -> None:
        super().__init__()
        self.streams = config.hc_mult
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [Layer(config, i, options) for i in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_head = HyperHead(config)
        self.tables = nn.ModuleDict(
            {
                kind: RotaryTables(config.qk_rope_head_dim, config.rope_parameters[kind])
                for kind in ("main", "compress")
            }
        )

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        at = Positions(self.tables, positions)
        x = self.embed_tokens(ids).unsqueeze(2).expand(-1, -1, self.streams, -1)
        for layer in self.layers:
            x = layer(x, ids, at)
        return self.norm(self.hc_head(x))


class DeepseekV4(nn.Module):
    """ids, positions i64[1, T] -> logits f32[1, T, vocab]."""

    def __init__(self, config: Any, options: DefinitionOptions) -> None:
        super().__init__()
        check(config, options)
        self.model = Decoder(config, options)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(ids, positions))


def check(config: Any, options: DefinitionOptions) -> None:
    """Raises CheckpointError for numbers of a config that can't be right, UnsupportedError for
    parts that this definition doesn't have.
    """
    check_sizes(config)
    refusals = {
        f"scoring_func {config.scoring_func!r}": config.scoring_func not in SCORES,
        f"hidden_act {config.hidden_act!r}": config.hidden_act != "silu",
        "biases of attention or MLP": config.attention_bias or config.mlp_bias,
        f"{config.num_key_value_heads} KV heads": config.num_key_value_heads != 1,
        f"{config.n_shared_experts} shared experts": config.n_shared_experts != 1,
    }
    found = [what for what, refused in refusals.items() if refused]
    if found:
        raise UnsupportedError(f"DeepSeek V4 with {'; '.join(found)} is not supported")
    unrounded = low_precision_refusals(config) if options.low_precision else []
    if unrounded:
        raise UnsupportedError(f"--low-precision can't round this model: {'; '.join(unrounded)}")
