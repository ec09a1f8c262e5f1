"""Folders: names, tied heads, experts stored one by one, errors, and memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bessemer.compile_options import CompileOptions
from bessemer.compiler import generate_model
from bessemer.errors import CheckpointError, UnsupportedError, UsageError
from bessemer.graph import print_graph
from bessemer.importer import import_model, reference_logits
from bessemer.importer.architectures import check_stated_context
from bessemer.importer.capture import CausalLM, export
from bessemer.importer.checkpoint import open_checkpoint
from bessemer.importer.skeleton import from_config
from tests.importer.cases import TOLERANCE, difference, eager, imported, model, run, tokens
from tests.tiny_models import ARCHITECTURES, tiny, tiny_config

WEIGHTS = "model.safetensors"


def save(name: str, folder: Path, **over: object) -> torch.nn.Module:
    _, found = tiny(name, **over)
    found.save_pretrained(folder)
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_saved_folder_imports(name: str, tmp_path: Path) -> None:
    model(name).save_pretrained(tmp_path, max_shard_size="100KB")
    found = import_model(tmp_path)
    held = set(found.checkpoint.names())
    assert {str(n.attrs["name"]) for n in found.graph if n.op == "param"} <= held
    ids = tokens(19)
    assert difference(run(found, ids), eager(model(name), ids)) < TOLERANCE
    stored_as_held = set(model(name).state_dict()) == held
    if stored_as_held:
        assert print_graph(found.graph) == print_graph(imported(name).graph)


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) drop tensors of a saved folder."""
    tensors = {**load_file(folder / WEIGHTS), **change}
    save_file(
        {k: v for k, v in tensors.items() if v is not None}, folder / WEIGHTS, {"format": "pt"}
    )


def head_of(folder: Path) -> str:
    """The tensor that the last linear reads."""
    graph = import_model(folder).graph
    return str(graph.outputs["logits"].node.inputs[1].node.attrs["name"])


def test_tied_and_untied_heads(tmp_path: Path) -> None:
    """N21"""
    embedding = "model.embed_tokens.weight"
    tied, untied = tmp_path / "tied", tmp_path / "untied"
    save("llama", tied, tie_word_embeddings=True)
    assert head_of(tied) == embedding
    save("llama", untied)
    assert head_of(untied) == "lm_head.weight"
    rewrite(untied, {"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*model\.safetensors"):
        import_model(untied)
    # tied by the config but stored twice: as transformers, tied only when both are equal
    values = load_file(tied / WEIGHTS)[embedding]
    rewrite(tied, {"lm_head.weight": values.clone()})
    assert head_of(tied) == embedding
    rewrite(tied, {"lm_head.weight": values * 2})
    assert head_of(tied) == "lm_head.weight"
    # stored under the head's name only
    rewrite(tied, {"lm_head.weight": values.clone(), embedding: None})
    assert head_of(tied) == "lm_head.weight"


def test_an_absurd_context_is_refused_before_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("llama", tmp_path)
    monkeypatch.setattr("bessemer.importer.api.import_model", None)
    for factor, most in ((1.0, 2048), (3.0, 6144)):
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        config["rope_parameters"] = {**config["rope_parameters"], "factor": factor}
        path.write_text(json.dumps(config))
        for context in (most + 1, 10**20):
            with pytest.raises(UsageError, match=f"--context {context}: .* at most {most} tokens"):
                generate_model(tmp_path, CompileOptions(context=context))
    # What a config does not state is known after the import.
    for unstated in ({}, {"max_position_embeddings": None}, {"rope_scaling": "x"}):
        check_stated_context(unstated, 10**20)
    nested = {"text_config": {"max_position_embeddings": 64}}
    with pytest.raises(UsageError, match="at most 64"):
        check_stated_context(nested, 65)


def test_missing_tensors_are_all_named(tmp_path: Path) -> None:
    """L03"""
    save("mixtral", tmp_path)
    expert = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    rewrite(tmp_path, {expert: None, "model.norm.weight": None})
    with pytest.raises(CheckpointError) as error:
        import_model(tmp_path)
    assert expert in str(error.value)
    assert "model.norm.weight" in str(error.value)


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    save("llama", tmp_path)
    rewrite(tmp_path, {"model.norm.weight": torch.ones(40)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\[40\].*\[48\]"):
        import_model(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("bloom", "ALiBi"), ("mamba", "state"), ("nonsense", "not known"), ("t5", "causal")],
)
def test_configs_that_are_refused(tmp_path: Path, model_type: str, reason: str) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    with pytest.raises(UnsupportedError, match=reason):
        import_model(tmp_path)


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "gpt_oss", "deepseek_v2"])
def test_the_reference_runs_on_given_weights(name: str, tmp_path: Path) -> None:
    found_model = save(name, tmp_path)
    found = import_model(open_checkpoint(tmp_path))
    ids = tokens(9)
    # the experts' sums run in another order there
    assert difference(reference_logits(found)(ids), eager(found_model, ids)) < 1e-6

    def rounded(tensor: str) -> np.ndarray:
        return found.checkpoint.read(tensor).astype(np.float16).astype(np.float32)

    with torch.no_grad():
        for parameter in found_model.parameters():
            parameter.copy_(parameter.to(torch.float16).to(torch.float32))
    expected = eager(found_model, ids)
    assert difference(reference_logits(found, rounded)(ids), expected) < 2e-6
    assert difference(reference_logits(found)(ids), expected) > 2e-5


def test_capture_holds_no_weights() -> None:
    """A model of 70 billion parameters is captured in little memory."""
    config = tiny_config(
        "llama",
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=2,
    )
    skeleton = from_config(config)
    held = sum(p.untyped_storage().nbytes() for p in skeleton.parameters())
    assert held == 4 * len(list(skeleton.parameters()))
    program = export(CausalLM(skeleton), "export")
    assert sum(t.untyped_storage().nbytes() for t in program.state_dict.values()) < 1 << 16
