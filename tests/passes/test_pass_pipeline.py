"""The whole sequence on a Llama written by hand: what is left, what it computes, what fails how."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from bessemer.errors import CompileError
from bessemer.graph import (
    Env,
    Graph,
    GraphError,
    evaluate,
    evaluate_value,
    parse_graph,
    print_graph,
)
from bessemer.passes import Pass, PassOptions, every_pass, lower, pass_by_name, run_passes
from bessemer.passes import pipeline as pipeline_module
from tests.passes.models import (
    LEAVES,
    VIEWS,
    Shape,
    layers_of,
    llama,
    logits_of_imported,
    logits_of_lowered,
    random_reader,
)

IDS = [3, 14, 15, 9, 26, 5]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def graph():
    return llama()


@pytest.fixture(scope="module")
def lowered(graph):
    return lower(graph)


@pytest.fixture(scope="module")
def read(graph):
    return random_reader(graph)


def test_prefill_equals_the_imported_graph(graph, lowered, read):
    expected = logits_of_imported(graph, read, [IDS])
    for chunks in ([IDS], [IDS[:1], IDS[1:]], [IDS[:4], IDS[4:5], IDS[5:]]):
        actual = logits_of_lowered(lowered.prefill, read, chunks)
        np.testing.assert_allclose(actual, expected, **TOLERANCE)


def test_decode_equals_the_imported_graph(graph, lowered, read):
    expected = logits_of_imported(graph, read, [IDS])
    actual = logits_of_lowered(lowered.decode, read, [[i] for i in IDS])
    np.testing.assert_allclose(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("rows", [[], [5], [0, 2], [4, 1, 1]])
def test_only_wanted_rows_come_back(lowered, read, rows):
    inputs = {"ids": np.array(IDS), "positions": np.arange(6)}
    every = evaluate(lowered.prefill, {**inputs, "output_rows": np.arange(6)}, read, Env())
    some = evaluate(lowered.prefill, {**inputs, "output_rows": np.array(rows, int)}, read, Env())
    for name in ("logits", "hidden"):
        np.testing.assert_allclose(some[name], every[name][rows], **TOLERANCE)


def test_hidden_is_the_input_of_the_head(graph, lowered, read):
    inputs = {"ids": np.array(IDS), "positions": np.arange(6), "output_rows": np.array([5])}
    found = evaluate(lowered.prefill, inputs, read, Env())
    head = read("model.embed_tokens.weight")
    np.testing.assert_allclose(found["hidden"] @ head.T, found["logits"], **TOLERANCE)


def test_nothing_hot_is_left_unfused(lowered):
    counts = lowered.prefill.op_counts()
    tables = {"cast": 1, "mul": 1, "cos": 1, "sin": 1}
    assert {k: v for k, v in counts.items() if k not in VIEWS | LEAVES} == {
        **tables,
        "embedding": 1,
        "flash_attention": 2,
        "glu_linear": 2,
        "linear": 3 * 2 + 1,
        "rms_norm": 2 * 2 + 1,
        "rope": 2 * 2,
        "select_rows": 2,
    }
    decode = lowered.decode.op_counts()
    assert decode["gqa_decode_attention"] == 2
    assert "select_rows" not in decode


def test_inputs_and_outputs(lowered):
    for graph, rows, wanted in ((lowered.prefill, "T", "R"), (lowered.decode, "1", "1")):
        shapes = {str(n.attrs["name"]): str(n.types[0]) for n in graph if n.op == "input"}
        shapes.pop("output_rows", None)
        assert shapes == {"ids": f"i64[{rows}]", "positions": f"i64[{rows}]"}
        types = {k: str(v.type) for k, v in graph.outputs.items()}
        assert types == {"logits": f"f32[{wanted}, 29]", "hidden": f"f32[{wanted}, 16]"}
    assert (lowered.prefill.name, lowered.decode.name) == ("forward_prefill", "forward_decode")


def test_weights_have_readable_names_and_are_shared(graph, lowered, read):
    assert list(lowered.prefill.weights) == list(lowered.decode.weights)
    assert list(lowered.prefill.weights)[:2] == [
        "model.layers.0.self_attn.qkv.weight",
        "model.layers.0.mlp.gate_up.weight",
    ]
    heads = [n for n in lowered.prefill if n.op == "linear"][-1]
    embedding = next(n for n in lowered.prefill if n.op == "embedding")
    assert heads.inputs[1] == embedding.inputs[0]
    stored = evaluate_value(lowered.prefill.weights["model.layers.1.mlp.gate_up.weight"], read)
    up = read("model.layers.1.mlp.up_proj.weight")
    assert stored.shape == (2, *up.shape)
    assert (stored[1] == up).all()


def test_equal_layers_lower_to_equal_structures():
    lowered = lower(llama(Shape(layers=5)))
    for graph in (lowered.prefill, lowered.decode):
        _, *between, _ = layers_of(graph)
        assert len(between) == 4
        assert all(layer == between[0] for layer in between)


def test_lowering_is_deterministic(graph):
    first, second = lower(graph), lower(parse_graph(print_graph(graph)))
    assert print_graph(first.prefill) == print_graph(second.prefill)
    assert print_graph(first.decode) == print_graph(second.decode)


def test_lowering_leaves_the_imported_graph_alone(graph):
    text = print_graph(graph)
    lower(graph)
    assert print_graph(graph) == text


def test_ops_keep_where_they_come_from(graph):
    marked = graph.rewrite(lambda n: replace(n, loc=f"at {n.op}").outputs if n.inputs else None)
    hot = {"linear", "glu_linear", "rms_norm", "rope", "flash_attention", "select_rows"}
    assert all(n.loc for n in lower(marked).prefill if n.op in hot)


def test_the_trace_counts_ops_before_and_after_each_pass(graph, lowered):
    assert lowered.trace[0].before == graph.op_counts()
    assert lowered.trace[-1].after == lowered.decode.op_counts()
    norms = next(r for r in lowered.trace if r.name == "rms_norm")
    assert norms.phase == "recognise"
    assert norms.changed["rms_norm"] == 5
    assert norms.changed["rsqrt"] == -5
    assert all(r.seconds >= 0 for r in lowered.trace)
    shared = [r for r in lowered.trace if r.phase not in ("prefill", "decode")]
    assert all(a.after == b.before for a, b in pairwise(shared))


def test_dumps_are_kept_when_asked_for(graph, lowered):
    assert lowered.dumps == {}
    dumps = lower(graph, options=PassOptions(dump=True)).dumps
    assert len(dumps) == len(lowered.trace)
    last = list(dumps)[-1]
    assert last.endswith("-decode-decode_attention")
    assert print_graph(parse_graph(dumps[last])) == print_graph(lowered.decode)


@pytest.mark.parametrize("name", ["rope", "merge_qkv", "glu", "fuse_epilogues", "drop_batch"])
def test_without_a_pass_the_result_is_the_same(graph, read, name):
    plain = lower(graph, options=PassOptions(without=frozenset({name})))
    if name == "drop_batch":
        assert "ids" in {n.attrs["name"] for n in plain.prefill if n.op == "input"}
        return
    expected = logits_of_imported(graph, read, [IDS])
    np.testing.assert_allclose(logits_of_lowered(plain.prefill, read, [IDS]), expected, **TOLERANCE)


def test_pass_names_are_unique_and_titled():
    passes = list(every_pass())
    assert len({p.name for p in passes}) == len(passes)
    assert all(type(p).__doc__ and pass_by_name(p.name) == p for p in passes)
    with pytest.raises(KeyError):
        pass_by_name("no_such_pass")


class Broken(Pass):
    name = "rope"  # so that the command that reproduces the failure finds a pass of that name

    def apply(self, graph):
        raise GraphError("a wheel came off")


class Unsound(Pass):
    name = "glu"

    def apply(self, graph):
        return Graph(graph.name, {})


def test_a_failing_pass_is_named_and_can_be_run_alone(graph, tmp_path):
    with pytest.raises(CompileError) as error:
        run_passes(graph, [Broken()], save_to=tmp_path)
    message = str(error.value)
    assert "pass rope failed on graph @llama: GraphError: a wheel came off" in message
    command = message.splitlines()[-1].split()
    saved = tmp_path / "before-rope.graph"
    assert command == ["python", "-m", "bessemer.passes", "rope", f"'{saved}'"]
    assert print_graph(parse_graph(saved.read_text())) == print_graph(graph)
    result = subprocess.run(
        [sys.executable, "-m", "bessemer.passes", "rope", str(saved)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == print_graph(pass_by_name("rope").apply(graph))


def test_a_pass_that_breaks_the_graph_is_named(graph, tmp_path):
    with pytest.raises(CompileError, match=r"pass glu failed .* has no outputs"):
        run_passes(graph, [Unsound()], save_to=tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder" / "before-glu.graph").exists()


def test_a_graph_without_logits_is_refused(graph, tmp_path):
    other = Graph("g", {"scores": graph.outputs["logits"]})
    with pytest.raises(CompileError, match=r"select_rows failed .*no output 'logits'"):
        lower(other, options=PassOptions(save_to=tmp_path))


def test_wrong_use_of_the_command_lists_the_passes():
    result = subprocess.run(
        [sys.executable, "-m", "bessemer.passes"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "fuse_epilogues" in result.stderr


def test_phases_are_what_lower_runs(lowered):
    ran = [(r.phase, r.name) for r in lowered.trace]
    listed = [(phase, p.name) for phase, ps in pipeline_module.PHASES.items() for p in ps]
    assert ran == listed
