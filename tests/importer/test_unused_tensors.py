"""Tensors that a model leaves out, or that a checkpoint names otherwise."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bessemer.errors import CheckpointError
from bessemer.importer import import_model
from bessemer.importer.capture import CausalLM
from bessemer.importer.checkpoint import open_checkpoint
from bessemer.importer.fx_nodes import type_of
from bessemer.importer.skeleton import from_config, from_definition, read_config
from bessemer.importer.unused import unused_tensors, unused_text
from bessemer.importer.weights import Resolver, tied_names
from bessemer.models import DEFINED, DefinitionOptions, file_names
from tests.importer.cases import TOLERANCE, difference, eager, run, tokens
from tests.tiny_models import ARCHITECTURES, randomise, tiny

WEIGHTS = "model.safetensors"
SAID = "the model doesn't use"


def rewrite(folder: Path, more: dict[str, torch.Tensor], **config: object) -> None:
    """More tensors, and other values of the config, in a saved folder."""
    save_file({**load_file(folder / WEIGHTS), **more}, folder / WEIGHTS, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def saved(name: str, folder: Path, **over: object) -> torch.nn.Module:
    _, model = tiny(name, **over)
    model.save_pretrained(folder)
    return model


def test_a_layer_more_than_the_config_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved("llama", tmp_path)
    kinds = json.loads((tmp_path / "config.json").read_text()).get("layer_types")
    more = {"layer_types": kinds[:2]} if kinds else {}
    with caplog.at_level(logging.WARNING, "bessemer"):
        assert not import_model(tmp_path).unused
        assert SAID not in caplog.text
        rewrite(tmp_path, {}, num_hidden_layers=2, **more)
        found = import_model(tmp_path)
    assert len(found.unused) == 9
    assert all(name.startswith("model.layers.2.") for name in found.unused)
    assert f"{SAID} 9 tensor(s) of the checkpoint: model.layers.2.input_layernorm" in caplog.text
    assert "and 6 more: is config.json of another model?" in caplog.text


def test_what_is_left_out_on_purpose_is_not_told(tmp_path: Path) -> None:
    model = saved("llama", tmp_path, tie_word_embeddings=True)
    harmless = (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.attention.masked_bias",
        "model.layers.3.mlp.up_proj.weight",  # predicts a further token
        "mtp.layers.0.mlp.up_proj.weight",
        "vision_tower.blocks.0.weight",
        "model.visual.patch_embed.weight",
    )
    tied = {"lm_head.weight": model.get_input_embeddings().weight.detach().clone()}
    rewrite(tmp_path, {n: torch.ones(3) for n in harmless} | tied, num_nextn_predict_layers=1)
    assert not import_model(tmp_path).unused
    rewrite(tmp_path, {"model.layers.4.mlp.up_proj.weight": torch.ones(3)})
    assert import_model(tmp_path).unused == ["model.layers.4.mlp.up_proj.weight"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_uses_all_that_it_saves(name: str, tmp_path: Path) -> None:
    """By names and shapes, without a capture: what the model has is what it needs."""
    saved(name, tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        config = read_config(checkpoint.config)
        defined = config.model_type in DEFINED
        model = from_definition(config, DefinitionOptions()) if defined else from_config(config)
        resolver = Resolver(checkpoint, tied_names(model), file_names(name) if defined else None)
        parameters = {}
        for parameter, tensor in model.state_dict().items():
            type_ = type_of(tensor)
            parameters[parameter] = resolver(parameter, type_)
        assert not resolver.missing
        module, prefix = (model, "") if defined else (CausalLM(model), "model.")
        assert not unused_tensors(checkpoint, resolver, parameters, module, prefix)


@pytest.mark.parametrize(
    ("kind", "over"),
    [
        ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_experts_under_the_names_of_files(
    kind: str, over: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CONFIG_MAPPING[kind](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **over,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "bessemer"):
        found = import_model(tmp_path)
    assert SAID not in caplog.text
    ids = [i % 64 for i in tokens(9)]
    assert difference(run(found, ids), eager(model, ids)) < TOLERANCE


def test_other_names_are_not_called_incomplete(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    renamed = {k.replace(".up_proj.", ".wide."): v for k, v in tensors.items()}
    save_file(renamed, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        import_model(tmp_path)
    text = str(error.value)
    assert "3 tensor(s) missing: model.layers.0.mlp.up_proj.weight" in text
    assert f"{SAID} 3 tensor(s) of the checkpoint: model.layers.0.mlp.wide.weight" in text
    assert "names its tensors otherwise than transformers' model" in text
    assert "incomplete" not in text
    kept = {k: v for k, v in tensors.items() if ".up_proj." not in k}
    save_file(kept, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"3 tensor\(s\) missing.*The checkpoint is incompl"):
        import_model(tmp_path)


def test_few_names_are_all_shown() -> None:
    assert unused_text(["a", "b"]).endswith("2 tensor(s) of the checkpoint: a, b")
