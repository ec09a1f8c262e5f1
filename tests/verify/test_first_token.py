"""The diagnostic run of one token: its reference, compiled code beside it, names, and the table."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from bessemer.artifact.layout import StoredWeight
from bessemer.artifact.packing import pack
from bessemer.artifact.reader import open_artifact
from bessemer.cli import main
from bessemer.cli.diagnose import table
from bessemer.codegen import group
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec
from bessemer.errors import ArtifactError, UsageError
from bessemer.graph import parse_graph
from bessemer.runtime.model import Model
from bessemer.verify import first_token
from bessemer.verify.first_token import Diagnosis, diagnose_first_token
from bessemer.verify.reference import kept_graphs, run_graph
from bessemer.verify.stage_names import name_stages
from bessemer.verify.stored import StoredParts, StoredTensors, read_weight

TOKEN = 7
LAYER = [
    "attention norm",
    "q, k, v",
    "q rotated",
    "k rotated",
    "attention",
    "output projection + residual",
    "MLP norm",
    "MLP gate and up",
    "MLP down + residual",
]


@pytest.fixture(scope="module")
def diagnosis(compiled: Path) -> Diagnosis:
    return diagnose_first_token(open_artifact(compiled), TOKEN, threads=2)


# -- what it computes ------------------------------------------------------------------------------


def test_every_stage_of_every_layer_in_order(diagnosis: Diagnosis) -> None:
    names = [s.name for s in diagnosis.stages]
    assert names[0] == "embedding"
    first = [s.name for s in diagnosis.stages if s.layer == 0]
    assert first == LAYER
    last = [s.name for s in diagnosis.stages if s.layer == 1 and s.name != "wanted row"]
    assert last == LAYER
    assert names[-3:] == ["final norm", "logits", "logits"]
    weights = {s.of for s in diagnosis.stages if s.name == "q, k, v"}
    assert weights == {"self_attn.qkv.weight"}


def test_compiled_code_agrees_at_every_stage(diagnosis: Diagnosis) -> None:
    assert diagnosis.parting is None
    assert all(s.error is not None and s.error < 1e-5 for s in diagnosis.stages)
    again, own = (s.compiled for s in diagnosis.stages[-2:])
    assert again == own  # the library's own code, and its groups generated again
    assert any(s.error for s in diagnosis.stages)  # they are two computations


def test_norms_and_hashes_are_those_of_the_numbers(
    diagnosis: Diagnosis, checkpoint: Path, compiled: Path
) -> None:
    table = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    row = table[TOKEN].astype(np.float16).astype("<f4")
    found = diagnosis.stages[0].reference
    assert found.norm == pytest.approx(float(np.linalg.norm(row.astype(np.float64))))
    assert found.digest == hashlib.sha256(row.tobytes()).hexdigest()[:16]
    assert diagnosis.stages[0].compiled == found
    assert diagnosis.stages[0].shape == (1, len(row))
    # The logits are those of the imported graph: another one than the lowered graph that is run.
    artifact = open_artifact(compiled)
    graphs = kept_graphs(artifact)
    read = StoredTensors(artifact, graphs.expressions).read
    logits = run_graph(graphs.imported, [TOKEN], read)[0]
    assert diagnosis.stages[-1].reference.norm == pytest.approx(
        float(np.linalg.norm(logits)), rel=1e-5
    )


def test_a_wrong_kernel_parts_where_it_is(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = group.KERNELS["rms_norm"]

    def wrong(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
        attrs = tuple((k, 0.5 if k == "eps" else v) for k, v in spec.attrs)
        right.emit(fn, replace(spec, attrs=attrs), target)

    monkeypatch.setitem(group.KERNELS, "rms_norm", replace(right, emit=wrong))
    found = diagnose_first_token(open_artifact(compiled), TOKEN, threads=1)
    assert found.parting is not None
    assert (found.parting.layer, found.parting.name) == (0, "attention norm")
    assert not found.parts(found.stages[0])
    assert found.parts(found.stages[-2])
    assert not found.parts(found.stages[-1])  # the artifact's library was compiled before
    text = table(found, "x")
    assert "part at layer 0, attention norm (input_layernorm.weight)" in text
    assert [line[-1] for line in text.splitlines()[3:5]] == ["0", "<"]


def test_without_a_compiler_the_reference_is_shown(
    compiled: Path, monkeypatch: pytest.MonkeyPatch, diagnosis: Diagnosis
) -> None:
    def absent(*args: object) -> None:
        raise ModuleNotFoundError("No module named 'mlir'", name="mlir")

    monkeypatch.setattr(first_token, "link_part", absent)
    found = diagnose_first_token(open_artifact(compiled), TOKEN, threads=1)
    assert "mlir" in found.note
    assert found.parting is None
    references = [s.reference for s in found.stages]
    assert references[:-1] == [s.reference for s in diagnosis.stages][:-2]
    assert [s.compiled is None for s in found.stages] == [True] * (len(references) - 1) + [False]
    assert "mlir" in table(found, "x")


def test_no_session_is_touched(compiled: Path) -> None:
    model = Model.load(compiled)
    session = model.session()
    session.prefill([1, 2])
    before = session.decode(3)
    diagnose_first_token(open_artifact(compiled), TOKEN, threads=1)
    assert session.tokens == [1, 2, 3]
    session.rewind(2)
    np.testing.assert_array_equal(session.decode(3), before)


def test_what_cannot_be_diagnosed(artifact: Path) -> None:
    opened = open_artifact(artifact)
    for token in (-1, opened.manifest.vocab_size):
        with pytest.raises(UsageError, match="none of this model"):
            diagnose_first_token(opened, token)
    (artifact / "graph" / "forward_prefill.graph").write_text("graph")
    with pytest.raises(ArtifactError, match="can't be read"):
        diagnose_first_token(opened, TOKEN)
    (artifact / "graph" / "forward_prefill.graph").unlink()
    with pytest.raises(ArtifactError, match="keeps no"):
        diagnose_first_token(opened, TOKEN)


# -- parts of weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("shape", [(70, 40), (3, 34, 40), (3, 2, 34, 40)])
def test_parts_are_those_of_the_whole(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weight = StoredWeight.place("w", shape, dtype, "panels", 0)
    data = np.concatenate(list(pack(values, weight)))
    artifact = SimpleNamespace(stored=lambda name: data)
    whole = read_weight(artifact, weight)  # type: ignore[arg-type]
    parts = StoredParts(artifact, weight)  # type: ignore[arg-type]
    for index in (np.array([[2], [0]]), np.array(1), np.array([], int)):
        np.testing.assert_array_equal(parts[index], whole[index])
    np.testing.assert_array_equal(parts[shape[0] - 1], whole[-1])
    assert parts.shape == shape


# -- names -----------------------------------------------------------------------------------------

GRAPH = """graph @g {
  %0 = param {name = "embed.weight", dtype = f32, shape = [9, 4]} : f32[9, 4]
  %1 = input {name = "ids", dtype = i64, shape = [T]} : i64[T]
  %2 = embedding(%0, %1) : f32[T, 4]
  %3 = input {name = "positions", dtype = i64, shape = [T]} : i64[T]
  %4 = cast(%3) {dtype = f32} : f32[T]
  %5 = reshape(%4) {shape = [T, 1]} : f32[T, 1]
  %6 = cos(%5) : f32[T, 1]
  %7 = param {name = "layers.3.attn.q_b_proj.weight", dtype = f32, shape = [4, 4]} : f32[4, 4]
  %8 = linear(%2, %7) : f32[T, 4]
  %9 = reshape(%8) {shape = [T, 2, 2]} : f32[T, 2, 2]
  %10 = rope(%9, %6, %6) : f32[T, 2, 2]
  %11 = concat(%10, %9) {axis = -1} : f32[T, 2, 4]
  %12 = flash_attention(%11, %11, %9, %3) {layer = 3, scale = 1.0} : f32[T, 2, 2]
  %13 = reshape(%12) {shape = [T, 4]} : f32[T, 4]
  %14 = param {name = "layers.3.post_attention_layernorm.weight", dtype = f32, shape = [4]} : f32[4]
  %15 = rms_norm(%13, %14) {eps = 0.5} : f32[T, 4]
  %16 = add(%2, %15) : f32[T, 4]
  %17 = param {name = "layers.3.pre_feedforward_norm.weight", dtype = f32, shape = [4]} : f32[4]
  %18 = rms_norm(%16, %17) {eps = 0.5} : f32[T, 4]
  %19 = param {name = "layers.3.mlp.gate.weight", dtype = f32, shape = [3, 4]} : f32[3, 4]
  %20 = linear(%18, %19) : f32[T, 3]
  %21, %22 = topk(%20) {k = 2} : f32[T, 2], i64[T, 2]
  %23 = param {name = "layers.3.mlp.experts.down", dtype = f32, shape = [3, 4, 4]} : f32[3, 4, 4]
  %24 = expert_linear(%18, %22, %23) : f32[T, 2, 4]
  %25 = reduce_sum(%24) {axes = [-2]} : f32[T, 4]
  %26 = param {name = "layers.3.odd.thing.weight", dtype = f32, shape = [4, 4]} : f32[4, 4]
  %27 = linear(%25, %26, %16) {has_residual = true} : f32[T, 4]
  %28 = param {name = "norm.weight", dtype = f32, shape = [4]} : f32[4]
  %29 = rms_norm(%27, %28) {eps = 0.5} : f32[T, 4]
  %30 = linear(%29, %0) : f32[T, 9]
  output logits = %30
}
"""


def test_names_by_structure_and_weights() -> None:
    graph = parse_graph(GRAPH)
    skipped = {"param", "input", "reshape", "cast"}
    values = [v for n in graph.nodes() if n.op not in skipped for v in n.outputs]
    found = [(n.layer, n.name) for n in name_stages(graph, values)]
    assert found == [
        (None, "embedding"),
        (3, "q"),
        (None, "positions, cos"),
        (3, "q rotated"),
        (3, "q assembled"),
        (3, "attention"),
        (3, "norm after attention"),
        (3, "residual"),
        (3, "MLP norm"),
        (3, "router"),
        (3, "top-k"),
        (3, "top-k indices"),
        (3, "experts down"),
        (3, "sum"),
        (3, "odd.thing + residual"),
        (None, "final norm"),
        (None, "logits"),
    ]


# -- the command -----------------------------------------------------------------------------------


def test_the_command(
    artifact: Path,
    diagnosis: Diagnosis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.runtime import tiny_tokenizers

    monkeypatch.setattr(first_token, "diagnose_first_token", lambda *a, **k: diagnosis)
    run = ["run", str(artifact), "--diagnose", "first-token"]
    assert main([*run, "-p", "x"]) == 1  # it has no tokenizer
    assert "tokenizer" in capsys.readouterr().err
    config = {"bos_token": "<|bos|>"}
    tiny_tokenizers.write(artifact, tiny_tokenizers.byte_level(), tokenizer_config=config)
    assert main([*run, "-p", "Ax", "--raw"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith('"A" at position 0, without a cache')
    assert out.splitlines()[-1].startswith("compiled code and reference agree")
    assert main([*run, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["text"], data["agree"]) == ("<|bos|>", True)
    assert data["stages"][1]["stage"] == "attention norm"
    assert set(data["stages"][1]["reference"]) == {"norm", "hash"}
    wrong = replace(diagnosis.stages[3], error=float("nan"))
    stages = (*diagnosis.stages[:3], wrong, *diagnosis.stages[4:])
    diagnosis = replace(diagnosis, stages=stages)
    assert main([*run, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["agree"], data["first_difference"]) == (False, 3)
    assert data["stages"][3]["relative_l2"] is None
