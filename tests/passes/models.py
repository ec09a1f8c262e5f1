"""Small graphs in the form in which the importer gives them, written by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from bessemer.graph import (
    Dim,
    DType,
    Env,
    Graph,
    Node,
    TensorType,
    Value,
    constant,
    emit,
    evaluate,
    param,
    topological,
)

T = Dim.sym("T")
F32, I64 = DType.F32, DType.I64
VIEWS = {"slice", "reshape"}
LEAVES = {"input", "param", "constant"}


def weight(name: str, *shape: int) -> Value:
    return param(name, TensorType(F32, shape))


def linear(x: Value, name: str, width: int) -> Value:
    return emit("linear", x, weight(name, width, x.shape[-1]))


def ids_and_positions() -> tuple[Value, Value]:
    return tuple(emit("input", name=n, dtype=I64, shape=(1, T)) for n in ("ids", "positions"))


def rms_norm(x: Value, w: Value, eps: float = 1e-5) -> Value:
    energy = emit("reduce_mean", emit("pow", x, constant(2.0)), axes=(-1,), keepdims=True)
    scale = emit("rsqrt", emit("add", energy, constant(eps)))
    return emit("mul", w, emit("mul", x, scale))


def rope_tables(positions: Value, head: int) -> tuple[Value, Value]:
    """cos and sin as [1, T, head], each frequency twice."""
    frequencies = constant((1e4 ** (-np.arange(0, head, 2) / head)).astype(np.float32))
    at = emit("cast", emit("reshape", positions, shape=(1, T, 1)), dtype=F32)
    angles = emit("mul", at, frequencies)
    both = emit("concat", angles, angles, axis=-1)
    return tuple(emit("mul", emit(f, both), constant(1.0)) for f in ("cos", "sin"))


def rotate_half(x: Value) -> Value:
    width = x.shape[-1]
    a = emit("slice", x, axis=-1, start=0, stop=width // 2)
    b = emit("slice", x, axis=-1, start=width // 2, stop=width)
    return emit("concat", emit("neg", b), a, axis=-1)


def apply_rope(x: Value, cos: Value, sin: Value) -> Value:
    """x[1, H, T, D] with tables [1, T, D]."""
    cos, sin = (emit("reshape", t, shape=(1, 1, T, t.shape[-1])) for t in (cos, sin))
    return emit("add", emit("mul", x, cos), emit("mul", rotate_half(x), sin))


def heads_first(x: Value, heads: int, head: int) -> Value:
    return emit("permute", emit("reshape", x, shape=(1, T, heads, head)), perm=(0, 2, 1, 3))


def tokens_first(x: Value) -> Value:
    return emit("permute", x, perm=(0, 2, 1, 3))


@dataclass(frozen=True)
class Shape:
    layers: int = 2
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    head: int = 4
    inner: int = 24
    vocab: int = 29


def attention_block(x: Value, positions: Value, tables: tuple, layer: int, s: Shape) -> Value:
    at = f"model.layers.{layer}.self_attn"
    q, k, v = (
        heads_first(linear(x, f"{at}.{n}_proj.weight", h * s.head), h, s.head)
        for n, h in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads))
    )
    q, k = (tokens_first(apply_rope(y, *tables)) for y in (q, k))
    y = emit("attention", q, k, tokens_first(v), positions, layer=layer, scale=s.head**-0.5)
    y = emit("reshape", y, shape=(1, T, s.heads * s.head))
    return linear(y, f"{at}.o_proj.weight", s.hidden)


def mlp_block(x: Value, layer: int, s: Shape) -> Value:
    at = f"model.layers.{layer}.mlp"
    gate, up = (linear(x, f"{at}.{n}_proj.weight", s.inner) for n in ("gate", "up"))
    return linear(emit("mul", emit("silu", gate), up), f"{at}.down_proj.weight", s.hidden)


def llama(s: Shape | None = None) -> Graph:
    """A Llama with tied embeddings."""
    s = s or Shape()
    ids, positions = ids_and_positions()
    embed = weight("model.embed_tokens.weight", s.vocab, s.hidden)
    x = emit("embedding", embed, ids)
    tables = rope_tables(positions, s.head)
    for layer in range(s.layers):
        at = f"model.layers.{layer}"
        y = rms_norm(x, weight(f"{at}.input_layernorm.weight", s.hidden))
        x = emit("add", x, attention_block(y, positions, tables, layer, s))
        y = rms_norm(x, weight(f"{at}.post_attention_layernorm.weight", s.hidden))
        x = emit("add", x, mlp_block(y, layer, s))
    x = rms_norm(x, weight("model.norm.weight", s.hidden))
    return Graph("llama", {"logits": emit("linear", x, embed)})


Reader = Callable[[str], np.ndarray]


def random_reader(graph: Graph, seed: int = 0) -> Reader:
    """Values for every parameter that the graph or its weights read."""
    rng = np.random.default_rng(seed)
    held: dict[str, np.ndarray] = {}
    for node in topological([*graph.roots, *graph.weights.values()]):
        if node.op == "param" and node.attrs["name"] not in held:
            shape = node.types[0].shape
            held[node.attrs["name"]] = (rng.standard_normal(shape) * 0.5).astype(np.float32)
    return held.__getitem__


def logits_of_imported(graph: Graph, read: Reader, chunks: list[list[int]]) -> np.ndarray:
    """Logits of all tokens of an imported graph, fed chunk by chunk."""
    return np.concatenate([y["logits"][0] for y in _calls(graph, read, chunks, batch=True)])


def logits_of_lowered(graph: Graph, read: Reader, chunks: list[list[int]]) -> np.ndarray:
    """Logits of all tokens of a lowered graph, fed chunk by chunk."""
    return np.concatenate([y["logits"] for y in _calls(graph, read, chunks, batch=False)])


def _calls(
    graph: Graph, read: Reader, chunks: list[list[int]], batch: bool
) -> list[dict[str, np.ndarray]]:
    env, at, found = Env(), 0, []
    for chunk in chunks:
        ids, positions = np.array(chunk), np.arange(at, at + len(chunk))
        inputs = {
            "ids": ids[None] if batch else ids,
            "positions": positions[None] if batch else positions,
            "output_rows": np.arange(len(chunk)),
            "sequence_length": np.array(sum(map(len, chunks))),
        }
        found.append(evaluate(graph, inputs, read, env))
        at += len(chunk)
    return found


def layers_of(graph: Graph, skipped: Collection[Node] = ()) -> list[list[tuple]]:
    """Ops from one attention to the next, without names of weights, layer numbers and windows."""
    layers: list[list[tuple]] = [[]]
    for node in graph.nodes():
        if node.op in LEAVES or node in skipped:
            continue
        attrs = tuple((k, str(v)) for k, v in node.attrs.items() if k not in ("layer", "window"))
        layers[-1].append((node.op, tuple(map(str, node.types)), attrs))
        if node.op.endswith("attention"):
            layers.append([])
    return layers
