"""Every architecture: the imported graph is transformers' model, whole and in chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bessemer.graph import Graph, Node, Value, parse_graph, print_graph, verify
from bessemer.graph.schema import build_from
from bessemer.importer import SUPPORTED, Imported, import_model
from bessemer.models import DEFINED
from tests.importer.cases import TOLERANCE, difference, eager, imported, model, run, tokens
from tests.tiny_models import ARCHITECTURES, tiny


def test_the_supported_list_is_what_is_tested() -> None:
    assert sorted(SUPPORTED) == sorted(ARCHITECTURES)


# What is taken out of the attention ops, and must then change the logits.
ATTRIBUTES: dict[str, dict[str, float]] = {
    "mistral": {"window": 0},
    "qwen2": {"window": 0},
    "qwen3": {"window": 0},
    "gemma2": {"window": 0, "softcap": 0.0, "scale": 0.25},
    "gemma3_text": {"window": 0, "scale": 0.25},
    "phi3": {"window": 0},
    "granite": {"scale": 0.25},
    "starcoder2": {"window": 0},
    "cohere2": {"window": 0},
    "smollm3": {"window": 0},
    "mixtral": {"window": 0},
    "deepseek_v3": {"scale": 24**-0.5},
    "deepseek_v4": {"window": 3, "scale": 0.1},
    "gpt_oss": {"window": 0, "has_sinks": False},
}


def _without(graph: Graph, attribute: str, value: float) -> Graph:
    def rule(node: Node) -> Value | None:
        if not node.op.endswith("attention"):
            return None
        inputs = node.inputs[:4] if attribute == "has_sinks" else node.inputs
        return build_from(node.op, inputs, {**node.attrs, attribute: value}).out

    return graph.rewrite(rule)


# One test an architecture: importing takes longest, and test runners split by test.
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_graph_is_the_model(name: str) -> None:
    found, graph = imported(name), imported(name).graph
    for count in (1, 5, 8):
        ids = tokens(count, seed=count)
        assert difference(run(found, ids), eager(model(name), ids)) < TOLERANCE

    ids = tokens(19)
    expected = eager(model(name), ids)
    for chunks in ((), (7, 1, 1, 8), (1,) * 18):  # K14
        assert difference(run(found, ids, chunks), expected) < TOLERANCE
    for attribute, value in ATTRIBUTES.get(name, {}).items():
        changed = run(found, ids, graph=_without(graph, attribute, value))
        assert difference(changed, expected) > 1e-3, attribute

    verify(graph)
    assert print_graph(parse_graph(print_graph(graph))) == print_graph(graph)
    used = {str(n.attrs["name"]) for n in graph if n.op == "param"}
    assert used <= set(found.checkpoint.names())
    sources = (f"{name}.py", "hyper_connections.py") if name in DEFINED else ("modeling_",)
    hot = [n for n in graph if n.op.endswith(("linear", "attention"))]
    assert all(any(source in n.loc for source in sources) for n in hot)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_dynamo_gives_the_same_graph(name: str) -> None:
    assert print_graph(imported(name, "dynamo").graph) == print_graph(imported(name).graph)


def test_the_example_length_is_not_special() -> None:
    """C02"""
    for length in (1, 5, 7, 8, 9, 1024):
        ids = tokens(length)
        assert difference(run(imported("llama"), ids), eager(model("llama"), ids)) < TOLERANCE


def _windows(found: Imported) -> list[object]:
    return [n.attrs["window"] for n in found.graph if n.op == "attention"]


def test_qwen2_windows() -> None:
    """N06, N07"""
    off = import_model(tiny("qwen2", use_sliding_window=False, sliding_window=8)[1])
    assert _windows(off) == [0, 0, 0]
    four = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 4}
    later = import_model(tiny("qwen2", **four, max_window_layers=2)[1])
    assert _windows(later) == [0, 0, 4, 4]
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    explicit = import_model(tiny("qwen2", **four, max_window_layers=2, layer_types=types)[1])
    assert _windows(explicit) == [4, 0, 0, 4]


def test_a_half_precision_model_gives_the_same_graph() -> None:
    """C09: dtype is a property of storage."""
    half = tiny("llama")[1].to(torch.bfloat16)
    found = import_model(half)
    assert print_graph(found.graph) == print_graph(imported("llama").graph)
    assert found.checkpoint.info("model.norm.weight").dtype == "bf16"
    ids = tokens(300)  # past position 257: N15
    wide = tiny("llama")[1]
    wide.load_state_dict({k: v.to(torch.float32) for k, v in half.state_dict().items()})
    assert difference(run(found, ids), eager(wide, ids)) < TOLERANCE


def test_the_model_is_left_as_it_was() -> None:
    one = tiny("mixtral")[1].train()
    before = {k: v.clone() for k, v in one.state_dict().items()}
    ids = {id(p) for p in one.parameters()}
    import_model(one)
    assert one.training
    assert one.config._attn_implementation == "eager"
    assert {id(p) for p in one.parameters()} == ids
    assert all(torch.equal(v, before[k]) for k, v in one.state_dict().items())


def test_facts_about_the_model() -> None:
    found = imported("phi3")
    assert (found.vocab_size, found.context_length, found.rope) == (97, 2048, None)
    assert found.config["model_type"] == "phi3"
    assert found.capture == "export"
    assert found.generation_config["eos_token_id"] == 2
    assert replace(found, capture="dynamo").capture == "dynamo"
