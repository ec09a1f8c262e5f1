"""Every architecture, lowered: it computes what was imported, and nothing hot is left unfused."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

from bessemer.graph import Graph, Node, parse_graph, print_graph, topological
from bessemer.importer import import_model
from bessemer.passes import Lowered, lower
from tests.importer.cases import difference, imported, run, tokens
from tests.passes.models import LEAVES, VIEWS, layers_of, logits_of_lowered
from tests.tiny_models import ARCHITECTURES, DYNAMIC_ROPE, LONG_ROPE, tiny

# f32 on both sides; merged layers and moved residuals sum in another order.
TOLERANCE = 1e-5
LAYERS = 3


def ops(**counts: int) -> Counter[str]:
    return Counter(counts)


def model(layer: Counter[str], rest: Counter[str], head: Counter[str]) -> Counter[str]:
    """Three equal layers, what differs among them, and what comes before and after."""
    total = Counter(rest) + head
    for _ in range(LAYERS):
        total += layer
    return total


ATTENTION = ops(rope=2, flash_attention=1)
# q, k and v as one; the output and the down projection add their residual.
DENSE = ATTENTION + ops(linear=3, glu_linear=1, rms_norm=2)
HEAD = ops(embedding=1, linear=1, rms_norm=1, select_rows=2)
NONE = ops()
# Norms behind the blocks: the residual is added to the norm's result.
SANDWICH = DENSE + ops(rms_norm=2, add=2)
QK_NORMS = ops(rms_norm=2)
ROUTED = ATTENTION + ops(linear=3, rms_norm=2, expert_linear=2, mul=1, reduce_sum=1, add=1, topk=1)
PLAIN_MLP = ATTENTION + ops(linear=4)
# The choice of groups of experts, elementwise on one number for each expert.
_GROUPS = ops(scatter=1, ne=1, logical_not=1, where=1, topk=2, mul=2, reduce_sum=1)
_MLA = ATTENTION + ops(linear=4, rms_norm=4, concat=2, glu_linear=1)
# A dense layer, then two with routed experts, whose router and shared down projection are linear.
_V2 = ops(linear=1 + 2 * 2, expert_linear=4, softmax=2, reduce_max=2, add=2)
_V3 = ops(linear=1 + 2 * 2, expert_linear=4, add=6, div=2, gather=2, reduce_sum=4, topk=2)


# Two hyper-connections, each one linear layer, sigmoids and a Sinkhorn iteration; attention with
# one linear layer of x, one of q, one for each of two groups of heads and one of all; experts.
_HC = ops(linear=1, rms_norm=1, sigmoid=2, add=3, mul=2, softmax=1)
_HC += ops(sinkhorn=1, collapse_streams=1, mix_streams=1)
_V4_ATTENTION = ops(linear=5, rms_norm=4, rope=3, compressed_attention=1, concat=1)
_V4_ROUTER = ops(linear=1, softplus=1, sqrt=1, gather=1, reduce_sum=1, add=1, div=1, mul=1)
_V4_EXPERTS = ops(expert_linear=2, mul=1, reduce_sum=1, glu_linear=1, linear=1, rms_norm=1)
_V4 = _HC + _HC + _V4_ATTENTION + _V4_ROUTER + _V4_EXPERTS
# A table of experts, two learned choices; blocks of three streams, an index, and rotary tables at
# the beginning of two lengths of blocks; the last collapse.
_V4_KINDS = ops(take=1, cast=1, topk=2, add=2) + ops(block_compress=3, index_topk=1, rope=1)
_V4_KINDS += ops(sub=2, cast=2, mul=2, cos=2, sin=2)
_V4_KINDS += ops(linear=1, rms_norm=1, mul=1, add=2, sigmoid=1, collapse_streams=1)


def twice(counts: Counter[str]) -> Counter[str]:
    return counts + counts


EXPECTED: dict[str, Counter[str]] = {
    "llama": model(DENSE, NONE, HEAD),
    "qwen2": model(DENSE, NONE, HEAD),
    "qwen3": model(DENSE + QK_NORMS, NONE, HEAD),
    "mistral": model(DENSE, NONE, HEAD),
    # The embedding times a constant; a soft cap of 1 is the activation of the head.
    "gemma2": model(SANDWICH, ops(mul=1), HEAD),
    "gemma3_text": model(SANDWICH + QK_NORMS, ops(mul=1), HEAD),
    # Parallel blocks share one norm, whose rows are selected as well.
    "phi": model(
        PLAIN_MLP + ops(layer_norm=3), ops(layer_norm=1, select_rows=1), HEAD - ops(rms_norm=1)
    ),
    "phi3": model(DENSE, NONE, HEAD),
    "granite": model(DENSE, ops(mul=1), HEAD),
    # Norms of q and k, and behind the blocks instead of before them.
    "olmo2": model(DENSE + ops(rms_norm=2, add=2), NONE, HEAD),
    "starcoder2": model(PLAIN_MLP + ops(layer_norm=2), ops(layer_norm=1), HEAD - ops(rms_norm=1)),
    "gpt_neox": model(PLAIN_MLP + ops(layer_norm=2), ops(layer_norm=1), HEAD - ops(rms_norm=1)),
    # One norm a layer, which the parallel blocks share; full layers have no rotary embedding.
    "cohere2": model(
        DENSE - ops(rms_norm=2) + ops(layer_norm=1),
        ops(layer_norm=1, select_rows=1),
        HEAD - ops(rms_norm=1),
    )
    - ops(rope=2),
    "stablelm": model(
        DENSE - ops(rms_norm=2) + ops(layer_norm=4, mul=2),
        ops(layer_norm=1),
        HEAD - ops(rms_norm=1),
    ),
    "smollm3": model(DENSE, NONE, HEAD) - ops(rope=2),
    "glm4": model(SANDWICH, NONE, HEAD),
    "mixtral": model(ROUTED + ops(softmax=1, div=1, reduce_sum=1), NONE, HEAD),
    "qwen3_moe": model(DENSE + QK_NORMS, NONE, HEAD)
    - twice(ops(glu_linear=1))
    + twice(ops(expert_linear=2, softmax=1, topk=1, div=1, reduce_sum=2, mul=1, add=1)),
    "deepseek_v2": model(_MLA, _V2 + twice(_GROUPS), HEAD),
    "deepseek_v3": model(_MLA, _V3 + twice(_GROUPS), HEAD),
    "gpt_oss": model(ROUTED + ops(softmax=1), NONE, HEAD),
    "deepseek_v4": model(_V4, _V4_KINDS, HEAD + ops(select_rows=2)),
}
# Their layers are of several kinds.
MIXED = {"cohere2", "smollm3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "deepseek_v4"}
# Rotary tables, where there is more than one: V4 has two kinds of layers, each with a table that
# turns the other way; of one the rows that are wanted.
TABLES = {"gemma3_text": 2, "deepseek_v4": 5}


@cache
def lowered(name: str) -> Lowered:
    return lower(imported(name).graph)


def rotary_tables(graph: Graph) -> set[Node]:
    """Ops that make the rotary tables, once for all layers."""
    tables = [v for n in graph.nodes() if n.op == "rope" for v in n.inputs[1:]]
    return set(topological(tables))


def counted(graph: Graph) -> Counter[str]:
    """Ops that compute, without the rotary tables."""
    skipped = rotary_tables(graph)
    free = VIEWS | LEAVES | {"expand"}
    return Counter(n.op for n in graph.nodes() if n.op not in free and n not in skipped)


def test_every_architecture_has_an_expectation():
    assert sorted(EXPECTED) == sorted(ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
class TestArchitecture:
    def test_nothing_hot_is_left_unfused(self, name):
        assert counted(lowered(name).prefill) == EXPECTED[name]

    def test_decode_has_the_same_ops_for_one_row(self, name):
        expected = Counter(EXPECTED[name])
        if "flash_attention" in expected:
            expected["gqa_decode_attention"] = expected.pop("flash_attention")
        expected.pop("select_rows")
        assert counted(lowered(name).decode) == expected

    def test_prefill_equals_what_was_imported(self, name):
        found = imported(name)
        for count in (1, 7, 19):
            ids = tokens(count, seed=count)
            expected = run(found, ids)
            actual = logits_of_lowered(lowered(name).prefill, found.checkpoint.read, [ids])
            assert difference(actual, expected) < TOLERANCE

    def test_chunks_and_decode_steps_equal_one_prefill(self, name):
        found, ids = imported(name), tokens(19)
        expected = run(found, ids)
        read = found.checkpoint.read
        chunked = logits_of_lowered(lowered(name).prefill, read, [ids[:7], ids[7:8], ids[8:]])
        assert difference(chunked, expected) < TOLERANCE
        stepwise = logits_of_lowered(lowered(name).decode, read, [[i] for i in ids])
        assert difference(stepwise, expected) < TOLERANCE

    def test_tables_are_made_once_and_attention_reads_views(self, name):
        graph = lowered(name).prefill
        tables = {n.inputs[1:] for n in graph.nodes() if n.op == "rope"}
        assert len(tables) == TABLES.get(name, 1)
        assert all(n.op != "permute" for n in graph.nodes())
        assert "hidden" in graph.outputs

    def test_the_lowered_graphs_print_and_parse(self, name):
        for graph in (lowered(name).prefill, lowered(name).decode):
            assert print_graph(parse_graph(print_graph(graph))) == print_graph(graph)


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n not in MIXED])
def test_equal_layers_lower_to_equal_structures(name):
    graph = lowered(name).decode
    _, *between, _ = layers_of(graph, rotary_tables(graph))
    assert len(between) == LAYERS - 1
    assert between[0] == between[1]


@pytest.mark.parametrize(
    ("name", "over"),
    [
        ("llama", {"rope_parameters": DYNAMIC_ROPE}),
        ("phi3", {"rope_parameters": {**LONG_ROPE, "partial_rotary_factor": 1.0}}),
        ("gemma3_text", {"num_attention_heads": 1, "num_key_value_heads": 1}),
        ("qwen3", {"num_key_value_heads": 1}),
    ],
)
def test_variants(name, over):
    found = import_model(tiny(name, **over)[1])
    result = lower(found.graph)
    ids = tokens(19)
    expected = run(found, ids)
    read = found.checkpoint.read
    assert difference(logits_of_lowered(result.prefill, read, [ids]), expected) < TOLERANCE
    steps = logits_of_lowered(result.decode, read, [[i] for i in ids])
    assert difference(steps, expected) < TOLERANCE
    hot = {"rope", "linear", "glu_linear", "flash_attention"}
    counts = counted(result.prefill)
    assert {op: counts[op] for op in hot} == {op: EXPECTED[name][op] for op in hot}
    assert np.isfinite(expected).all()
