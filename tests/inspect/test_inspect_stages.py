"""Every stage of `inspect`, for a source and for a compiled folder."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bessemer.artifact.layout import HEADER_WORDS, LAYER_WORDS
from bessemer.artifact.manifest import Manifest
from bessemer.cli import main
from bessemer.codegen.repeats import find_repeats
from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from bessemer.errors import ArtifactError, UsageError
from bessemer.graph import parse_graph
from bessemer.inspect import STAGES, Choice, inspect
from bessemer.inspect.abi import header_words
from bessemer.inspect.modules import asm_function, llvm_function, mlir_function
from bessemer.inspect.page import columns, size_text
from bessemer.inspect.plan import plan_of
from bessemer.inspect.subject import Subject, open_subject
from tests.tiny_models import tiny

OPTIONS = CompileOptions(weights="f16", kv="f32", context=64, chunk=16)
LAYERS = 5  # the fewest of which some are a loop


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "llama"
    _, model = tiny("llama", num_hidden_layers=LAYERS)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact that keeps every form."""
    options = replace(OPTIONS, emit=("graph", "mlir", "llvm", "asm"))
    return compile_model(checkpoint, options, tmp_path_factory.mktemp("compiled") / "llama")


@pytest.fixture(scope="module")
def source(checkpoint: Path) -> Subject:
    """A model that is not compiled."""
    return open_subject(checkpoint, options=OPTIONS)


@pytest.fixture(scope="module")
def compiled(folder: Path) -> Subject:
    return open_subject(folder)


def stage(model: Subject, name: str | None, **choice: str) -> tuple[str, object]:
    page = inspect(model, name, choice=Choice(**choice))
    json.dumps(page.data, default=str)
    assert page.text.endswith("\n")
    return page.text, page.data


def manifest_of(subject: Subject) -> Manifest:
    assert subject.artifact is not None
    return subject.artifact.manifest


# --- helpers --------------------------------------------------------------------------------------


def test_columns_are_aligned_and_never_cut() -> None:
    text = columns([["name", "n"], ["a" * 200, 5], ["b", 12345]], right=(1,))
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].endswith("    5")
    assert "a" * 200 in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.00 GiB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


MLIR = """module {
  func.func private @a(index)
  func.func @a_0(%x: index) {
    scf.for {
    }
    return
  }
  func.func @a(%x: index) attributes {x} {
    return
  }
}
"""
LLVM = """declare void @f()
define void @g(i64 %0) {
  ret void
}
define internal void @f(ptr %0) {
  ret void
}
"""
ASM = "f:\n\t.cfi_startproc\n\tret\n.Lfunc_end0:\n\t.size f\ng:\n\tret\n.Lfunc_end1:\n"


def test_functions_are_cut_out_of_modules() -> None:
    assert mlir_function(MLIR, "a_0").splitlines()[0].strip().startswith("func.func @a_0")
    assert len(mlir_function(MLIR, "a_0").splitlines()) == 5
    assert mlir_function(MLIR, "b") == ""
    assert llvm_function(LLVM, "f") == "define internal void @f(ptr %0) {\n  ret void\n}\n"
    assert asm_function(ASM, "g") == "g:\n\tret\n.Lfunc_end1:\n"
    assert asm_function(ASM, "h") == ""


# --- stages ---------------------------------------------------------------------------------------


def test_overview_is_one_screen(source: Subject, compiled: Subject) -> None:
    for model in (source, compiled):
        text, _ = stage(model, None)
        assert len(text.splitlines()) <= 25
        for word in ("llama", "forward_prefill", "forward_decode", "weights", "state", "passes"):
            assert word in text
        assert all(name in text for name in STAGES)


def test_graphs_parse_back(source: Subject, compiled: Subject) -> None:
    for model in (source, compiled):
        for of in ("imported", "prefill", "decode"):
            text, _ = stage(model, "graph", of=of)
            graph = parse_graph(text)
            assert "logits" in graph.outputs
    imported = parse_graph(stage(source, "graph")[0]).op_counts()
    assert imported["attention"] == LAYERS
    assert "model.layers.1" in stage(source, "graph")[0]
    assert parse_graph(stage(source, "graph", of="decode")[0]).op_counts()[
        "gqa_decode_attention"
    ] == LAYERS  # fmt: skip


def test_the_graph_after_a_pass(source: Subject) -> None:
    before = parse_graph(stage(source, "graph", after="drop_batch")[0]).op_counts()
    after = parse_graph(stage(source, "graph", after="rms_norm")[0]).op_counts()
    assert "rms_norm" not in before
    assert after["rms_norm"] == 2 * LAYERS + 1
    by_number = stage(source, "graph", after="2")[0]
    assert by_number == stage(source, "graph", after="drop_batch")[0]
    with pytest.raises(UsageError, match="no such pass"):
        stage(source, "graph", after="mystery")


def test_passes_count_ops_before_and_after(source: Subject) -> None:
    text, data = stage(source, "passes")
    assert isinstance(data, list)
    assert re.search(r"recognise +rms_norm .*rms_norm \+11", text)
    for before, after in itertools.pairwise(data):
        if after["phase"] != "decode":
            assert before["after"] == after["before"]


def test_groups_show_sharing_loops_and_barriers(source: Subject) -> None:
    text, data = stage(source, "groups")
    assert isinstance(data, dict)
    for entry in data.values():
        functions, calls = entry["functions"], entry["calls"]
        assert sum(f["calls"] for f in functions) == len(calls)
        assert len(functions) < len(calls) / 2
        assert {c["function"] for c in calls} == {f["function"] for f in functions}
    loops = [s for s in find_repeats([c["function"] for c in calls]) if s.count > 1]
    assert loops
    assert re.search(r"^\d+ times:", text, re.MULTILINE)
    assert "| " in text


def test_mlir_of_all_one_module_and_one_function(source: Subject, compiled: Subject) -> None:
    text, data = stage(source, "mlir")
    assert isinstance(data, dict)
    assert set(data) == {
        "forward_prefill", "forward_decode", "groups_prefill", "groups_decode"
    }  # fmt: skip
    assert text == stage(compiled, "mlir")[0]
    one, _ = stage(source, "mlir", module="forward_decode")
    assert "llvm.emit_c_interface" in one
    assert "module groups_decode" not in one
    function, _ = stage(compiled, "mlir", group="decode_linear_0")
    assert function.count("func.func") == 1
    for wrong in ({"module": "x"}, {"group": "x"}, {"form": "x"}):
        with pytest.raises(UsageError):
            stage(source, "mlir", **wrong)


def test_payloads_are_linalg_on_tensors(source: Subject, compiled: Subject) -> None:
    text, data = stage(source, "mlir", form="payload")
    assert "tensor<" in text
    assert "linalg." in text
    assert data == stage(compiled, "mlir", form="payload")[1]
    with pytest.raises(UsageError, match="only the stage mlir"):
        stage(source, "llvm", form="payload")


def test_mlir_on_its_way_through_the_backend(source: Subject) -> None:
    text, _ = stage(source, "mlir", module="groups_decode", form="llvm")
    assert "llvm.func" in text
    assert "scf.for" not in text


def test_llvm_and_assembly_of_a_function(source: Subject, compiled: Subject) -> None:
    for model in (source, compiled):
        text, _ = stage(model, "llvm", group="decode_rms_norm_0")
        assert text.count("\ndefine ") == 1
        text, _ = stage(model, "asm", group="decode_rms_norm_0")
        assert "decode_rms_norm_0:" in text
        assert "ret" in text
    text, _ = stage(compiled, "asm", module="forward_decode")
    assert "_mlir_ciface_forward_decode" in text


def test_weights_add_up_and_say_what_they_are_made_of(source: Subject, compiled: Subject) -> None:
    for model in (source, compiled):
        text, data = stage(model, "weights")
        assert isinstance(data, list)
        table = manifest_of(compiled).weights
        assert [(w["name"], w["offset"], w["nbytes"]) for w in data] == [
            (w.name, w.offset, w.nbytes) for w in table
        ]
        assert f"{sum(w.nbytes for w in table):,}" in text
        made_of = {w["name"]: w["made_of"] for w in data}
        assert "q_proj.weight" in made_of["model.layers.0.self_attn.qkv.weight"]
        assert made_of["lm_head.weight"] == ""


def test_abi_names_every_word_of_the_state_header(source: Subject, compiled: Subject) -> None:
    for model in (source, compiled):
        text, data = stage(model, "abi")
        assert isinstance(data, dict)
        assert data["header"] in text
        assert "_mlir_ciface_forward_prefill(" in data["header"]
        assert len(data["arguments"]) == 9
        assert len(data["state_header"]) == HEADER_WORDS + LAYER_WORDS * LAYERS
    words = {n: v for _, n, v in header_words(manifest_of(compiled).state)}
    assert (words["capacity"], words["chunk"], words["entries"]) == (64, 16, LAYERS)


def test_memory_charts_lifetimes_and_totals(source: Subject) -> None:
    text, data = stage(source, "memory")
    assert isinstance(data, dict)
    arena = data["arena"]["forward_prefill"]
    assert all(b["offset"] + b["bytes"] <= arena["bytes"] for b in arena["buffers"])
    bars = [line.split()[-1] for line in text.splitlines() if re.search(r" [.#]+$", line)]
    assert bars
    assert all(re.fullmatch(r"\.*#+\.*", bar) for bar in bars)
    assert f"0-{LAYERS - 1}" in text
    assert f"{data['state']['kv_bytes_per_token']:,} bytes" in text


def test_a_config_alone_plans_what_is_compiled(
    compiled: Subject, checkpoint: Path, tmp_path: Path
) -> None:
    config = shutil.copy(checkpoint / "config.json", tmp_path)
    plan, manifest = plan_of(open_subject(config, options=OPTIONS)), manifest_of(compiled)
    assert plan.weights == manifest.weights
    assert (plan.state, plan.scratch) == (manifest.state, manifest.scratch)
    whole = plan_of(compiled)
    assert [w.flops for w in plan.work] == [w.flops for w in whole.work]
    assert plan == replace(whole, work=plan.work)
    text, data = stage(compiled, "memory")
    assert isinstance(data, dict)
    assert (data["parameters"], data["active_parameters"]) == (plan.parameters, plan.active)
    assert "no speed is estimated" in text


# --- without a source, and the command line -------------------------------------------------------


def test_an_artifact_without_its_source_shows_what_it_holds(folder: Path, tmp_path: Path) -> None:
    orphan = Path(shutil.copytree(folder, tmp_path / "orphan"))
    manifest = json.loads((orphan / "manifest.json").read_text())
    manifest["source"]["path"] = "/nowhere/llama"
    (orphan / "manifest.json").write_text(json.dumps(manifest))
    subject = open_subject(orphan)
    for name in (*STAGES, None):
        assert stage(subject, name)[0]
    shutil.rmtree(orphan / "graph")
    subject = open_subject(orphan)
    for name in ("weights", "abi", "memory", "mlir", "llvm", "asm", None):
        assert stage(subject, name)[0]
    with pytest.raises(ArtifactError, match="/nowhere/llama"):
        stage(subject, "passes")


def test_a_damaged_graph_is_named(folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    (damaged / "graph" / "imported.graph").write_text("graph @x {")
    with pytest.raises(ArtifactError, match=r"imported\.graph"):
        stage(open_subject(damaged), "passes")


def test_code_from_the_kept_graph_is_the_same(source: Subject, compiled: Subject) -> None:
    assert compiled.compilation is not compiled.located
    again = compiled.compilation.generated
    assert again.modules == source.compilation.generated.modules
    assert again.weights == source.compilation.generated.weights


def test_options_of_a_compiled_model_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="compiled already"):
        open_subject(folder, options=OPTIONS)


def test_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "weights", "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), list)
    assert main(["inspect", str(folder), "graph", "--of", "decode"]) == 0
    assert capsys.readouterr().out.startswith("graph @forward_decode")
    assert main(["inspect", str(folder), "soup"]) == 2
    assert "soup" in capsys.readouterr().err
    assert main(["inspect", str(folder / "nothing")]) == 1
