"""What users call the values of a lowered graph: the layer, the stage, and the weight or op.

Names come from the graph's structure (which operand of the attention a value becomes) and from the
names of its weights; a weight of an unknown name stands for itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bessemer.graph import Graph, Node, Value

# A weight of a layer: the layer's number, and the name inside it.
_IN_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks?|blk)\.(\d+)\.(.+)$")
# What only puts the parts of q, k and v together.
_ASSEMBLY = frozenset({"reshape", "slice", "permute", "concat", "expand"})
_NORMS = frozenset({"rms_norm", "layer_norm"})
# What the operands of a layer's op are, in order.
_ROLES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("attention", "flash_attention", "gqa_decode_attention"), ("q", "k", "v")),
    "compressed_attention": ("q", "KV"),
    "index_topk": ("index q",),
}

# Name of a layer's weight, by its first match -> stage. Norms:
_NORM_STAGES = (
    (r"q_a_(layer)?norm", "q latent norm"),
    (r"kv_a_(layer)?norm", "KV latent norm"),
    (r"kv_norm", "KV norm"),
    (r"q_(layer)?norm|query_norm", "q norm"),
    (r"k_(layer)?norm|key_norm", "k norm"),
    (r"post_(feedforward|mlp|ffn)_?(layer)?norm", "norm after MLP"),
    (r"post_self_attn_(layer)?norm", "norm after attention"),
    (r"pre_feedforward_(layer)?norm|ffn_norm|mlp_norm|ln_2", "MLP norm"),
    (r"input_(layer)?norm|attn_norm|attention_norm|ln_1", "attention norm"),
    (r"post_attention_(layer)?norm", "MLP norm"),
)
# With this norm in the layer, the one called post_attention is what its name says.
_LATER_NORM = re.compile(r"(pre|post)_feedforward_(layer)?norm")
# Matrices:
_LINEAR_STAGES = (
    (r"(^|\.)(qkv|qkv_proj|query_key_value)(\.|$)", "q, k, v"),
    (r"(^|\.)q(_b)?_proj(\.|$)", "q"),
    (r"(^|\.)k_proj(\.|$)", "k"),
    (r"(^|\.)v_proj(\.|$)", "v"),
    (r"(^|\.)(attn|attention)_hc\.", "attention hyper-connections"),
    (r"(^|\.)ffn_hc\.", "MLP hyper-connections"),
    (r"(^|\.)q_a_proj_to_\w*compressor\w*(\.|$)", "q latent, KV and compressor"),
    (r"(^|\.)q_compressor_indexer_q(\.|$)", "q and index q"),
    (r"(^|\.)q_a_proj_kv_a\w*(\.|$)", "q and KV latent"),
    (r"(^|\.)q_a_proj_kv\w*(\.|$)", "q latent and KV"),
    (r"(^|\.)q_a_proj(\.|$)", "q latent"),
    (r"(^|\.)kv_a_proj\w*(\.|$)", "KV latent"),
    (r"(^|\.)kv_b_proj(\.|$)", "k, v"),
    (r"(attn|attention)\.(o_proj|o_b_proj|out_proj|dense|c_proj)(\.|$)", "output projection"),
    (r"(attn|attention)\.o_a_proj(\.|$)", "output latent"),
    (r"(^|\.)(router|mlp\.gate|block_sparse_moe\.gate)\.", "router"),
    (r"(^|\.)(gate_up|gate_up_proj|up_gate)(\.|$)", "gate and up"),
    (r"(^|\.)gate_proj(\.|$)", "gate"),
    (r"(^|\.)(up_proj|fc1|c_fc|dense_h_to_4h)(\.|$)", "up"),
    (r"(^|\.)(down_proj|fc2|c_proj|dense_4h_to_h)(\.|$)", "down"),
)
# The matrix that gives logits: one of its own, or the embedding.
_HEAD = re.compile(r"(^|\.)(lm_head|embed\w*|output|head|wte)(\.|$)")
_OP_STAGES = {
    "embedding": "embedding",
    "index_topk": "index top-k indices",
    "select_rows": "wanted row",
    "reduce_sum": "sum",
    "reduce_mean": "mean",
    "reduce_max": "maximum",
}


@dataclass(frozen=True)
class StageName:
    """layer: None outside of the layers.  name: what the stage is.  of: the weight, or the op."""

    layer: int | None
    name: str
    of: str


def name_stages(graph: Graph, values: Sequence[Value]) -> list[StageName]:
    """A name for each of `values`, which are in the order in which they are computed. A value that
    belongs to no layer by a weight or an attention belongs to that of the one before.
    """
    roles, owners = _attention_roles(graph)
    later_norms = {x[0] for n in graph.nodes() for w in _weights(n) if (x := _later_norm(w))}
    stream = next((n.types[0].shape[1:] for n in graph.nodes() if n.op == "embedding"), None)
    of_token, users = _depending_on_ids(graph), graph.uses()
    found: list[StageName] = []
    layer: int | None = None
    for value in values:
        node = value.node
        if node not in of_token:
            found.append(StageName(None, f"positions, {node.op}", node.op))
            continue
        weights = _weights(node)
        placed = [m for w in weights if (m := _IN_LAYER.search(w))]
        if placed:
            layer = int(placed[0][1])
        elif node in owners:
            layer = owners[node]
        elif node.op in _NORMS and not weights:
            layer = _layer_of_use(value, users, layer)
        elif weights:
            layer = None
        inner = placed[0][2] if placed else (weights[0] if weights else "")
        name = _stage(value, inner, layer, layer in later_norms)
        role = roles.get(node)
        if node.op == "rope" and role is None:
            name = "rotated back" if "attention" in node.inputs[0].op else "rotated"
        elif role is not None and node.op == "rope":
            name = f"{role} rotated"
        elif role is not None and node.op in _NORMS and not weights:
            name = f"{role} norm"
        elif role is not None and node.op in ("concat", "expand"):
            name = f"{role} assembled"
        elif node.op == "add" and layer is not None and value.shape[1:] == stream:
            name = "residual"
        is_attention = "attention" in node.op
        found.append(StageName(layer, name, node.op if is_attention else inner or node.op))
    return found


def _depending_on_ids(graph: Graph) -> set[Node]:
    found: set[Node] = set()
    for node in graph.nodes():
        is_ids = node.op == "input" and node.attrs["name"] == "ids"
        if is_ids or any(v.node in found for v in node.inputs):
            found.add(node)
    return found


def _weights(node: Node) -> list[str]:
    return [str(v.node.attrs["name"]) for v in node.inputs if v.op == "param"]


def _later_norm(weight: str) -> tuple[int] | None:
    """The layer of a norm around the MLP that leaves `post_attention` its literal meaning."""
    placed = _IN_LAYER.search(weight)
    return (int(placed[1]),) if placed and _LATER_NORM.search(placed[2]) else None


def _attention_roles(graph: Graph) -> tuple[dict[Node, str], dict[Node, int]]:
    """Which nodes make the q, k and v of an attention, and the layers of these and of the attention
    itself.
    """
    roles: dict[Node, str] = {}
    owners: dict[Node, int] = {}
    for node in graph.nodes():
        layer = node.attrs.get("layer")
        if not isinstance(layer, int):
            continue
        owners[node] = layer
        for operand, role in zip(node.inputs, _ROLES.get(node.op, ()), strict=False):
            stack = [operand.node]
            while stack:
                source = stack.pop()
                if source.op in ("input", "param", "constant"):
                    continue
                roles.setdefault(source, role)
                owners.setdefault(source, layer)
                if source.op in _ASSEMBLY:
                    stack += [v.node for v in source.inputs]
                elif source.op == "rope":
                    stack.append(source.inputs[0].node)
    return roles, owners


def _layer_of_use(value: Value, users: dict[Value, list[Node]], layer: int | None) -> int | None:
    """The layer whose weights a norm without a weight of its own is made for."""
    for user in users.get(value, []):
        for weight in _weights(user):
            placed = _IN_LAYER.search(weight)
            return int(placed[1]) if placed else None
    return layer


def _stage(value: Value, inner: str, layer: int | None, has_later_norm: bool) -> str:
    node = value.node
    if node.op in _NORMS:
        return _norm(inner, layer, has_later_norm)
    if node.op in ("linear", "glu_linear", "expert_linear"):
        return _matrix(node, inner, layer)
    if "attention" in node.op:
        return "attention"
    if node.op == "topk":
        return "top-k" if value.dtype.is_float else "top-k indices"
    return _OP_STAGES.get(node.op, node.op.replace("_", " "))


def _norm(inner: str, layer: int | None, has_later_norm: bool) -> str:
    if layer is None:
        return "final norm"
    for pattern, name in _NORM_STAGES:
        if re.search(pattern, inner):
            after = name == "MLP norm" and inner.startswith("post_attention") and has_later_norm
            return "norm after attention" if after else name
    return "norm"


def _matrix(node: Node, inner: str, layer: int | None) -> str:
    if layer is None:
        return "logits" if _HEAD.search(inner) else inner.removesuffix(".weight")
    name = next((s for p, s in _LINEAR_STAGES if re.search(p, inner)), "")
    if node.op == "expert_linear":
        name = "experts " + ("gate and up" if node.attrs["gated"] else "down")
    elif "shared_expert" in inner:
        name = f"shared expert {name}".strip()
    elif name in ("gate and up", "gate", "up", "down"):
        name = f"MLP {name}"
    parts = [name or inner.removesuffix(".weight")]
    activation = node.attrs.get("activation", "none")
    if node.op == "linear" and activation != "none":
        parts.append(str(activation))
    if node.attrs.get("has_residual"):
        parts.append("residual")
    return " + ".join(parts)
