"""Configs that contradict themselves are refused before a model is made, field and value named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.cli import main
from bessemer.errors import CheckpointError
from bessemer.importer import import_model
from bessemer.importer.architectures import check_config
from bessemer.importer.outline import ConfigCheckpoint, outline
from bessemer.importer.refusals import why_refused
from bessemer.models import DefinitionOptions, check_definition, define
from tests.tiny_models import ARCHITECTURES, V4_KINDS, tiny_config

MOE = {"n_routed_experts": 8, "num_experts_per_tok": 2}


def stated(name: str, **over: Any) -> dict[str, Any]:
    """What config.json holds of a tiny model, with other values that no config class has seen."""
    return {**tiny_config(name).to_dict(), **over}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_real_configs_are_right(name: str) -> None:
    config = tiny_config(name)
    check_config(config.to_dict())
    if name == "deepseek_v4":
        check_definition(config)


def test_what_is_left_out_or_null_has_a_default() -> None:
    check_config({"model_type": "llama"})
    nothing = ("num_hidden_layers", "head_dim", "num_key_value_heads", "rope_theta", "rope_scaling")
    check_config({"model_type": "llama", **dict.fromkeys(nothing)})
    check_config({"model_type": "qwen3_moe", "num_experts": 0, "num_experts_per_tok": 8})  # dense
    check_config({"model_type": "llama", "intermediate_size": [8, 16], "sliding_window": 0})


@pytest.mark.parametrize(
    ("over", "what"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, and must be a whole number from 1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, .* from 1 to 512$"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0,"),
        ({"hidden_size": -8}, "hidden_size is -8,"),
        ({"hidden_size": 2**31}, "hidden_size is 2147483648,"),
        ({"vocab_size": True}, "vocab_size is True,"),
        ({"head_dim": "16"}, "head_dim is '16',"),
        ({"intermediate_size": [8, 0]}, "intermediate_size is 0,"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, no multiple of .*, 3"),
        ({"num_key_value_heads": 8}, "num_attention_heads is 4, no multiple of .*, 8"),
        ({"sliding_window": -1}, "sliding_window is -1, .* from 0"),
        ({"rope_theta": -1}, "rope_theta is -1, and must be a finite number above 0"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, .* number from 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, .* above 0 and at most 1"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta is 0.0"),
        ({"rope_parameters": {"main": {"factor": math.inf}}}, "factor is inf"),
        ({"rope_scaling": {"original_max_position_embeddings": 0}}, "original_max.* is 0,"),
        ({**MOE, "num_experts_per_tok": 9}, r"num_experts_per_tok is 9, of 8 experts \(n_rou"),
        ({**MOE, "num_experts_per_tok": 0}, "num_experts_per_tok is 0, of 8 experts"),
        ({"num_local_experts": 4, "experts_per_token": 5}, "experts_per_token is 5, of 4 experts"),
        ({**MOE, "n_group": 3}, "n_routed_experts is 8, no multiple of n_group, 3"),
        ({**MOE, "n_group": 4, "topk_group": 5}, "topk_group is 5, of 4 groups"),
        ({"text_config": {"hidden_size": 0}}, "hidden_size is 0"),
        ({"text_config": 3}, "text_config is 3, and must be an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', and must be an object"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\], and must be a text"),
        ({"hidden_size": 0, "vocab_size": 0}, "vocab_size is 0.*; hidden_size is 0"),
    ],
    ids=str,
)
def test_numbers_that_can_not_be_right(over: dict[str, Any], what: str) -> None:
    with pytest.raises(CheckpointError, match=what):
        check_config(stated("llama", **over))


def test_a_model_in_memory_is_looked_at_too() -> None:
    config = tiny_config("mixtral")
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config)
    model.config.num_experts_per_tok = 5
    with pytest.raises(CheckpointError, match="num_experts_per_tok is 5, of 4 experts"):
        import_model(model)


# --- DeepSeek V4 ---------------------------------------------------------------------------------

SPARSE, HEAVY = V4_KINDS[1:]


def rates(**over: Any) -> dict[str, Any]:
    return {"compress_rates": {SPARSE: 4, HEAVY: 8, **over}}


@pytest.mark.parametrize(
    ("over", "what"),
    [
        ({"hc_mult": 0}, "hc_mult is 0, and must be a whole number from 1 to 64"),
        ({"hc_mult": 65}, "hc_mult is 65"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters is 0"),
        ({"hc_sinkhorn_iters": 100000}, "hc_sinkhorn_iters is 100000, .* from 1 to 1000"),
        (rates(**{SPARSE: 0}), f"compress_rates: {SPARSE} is 0"),
        (rates(**{HEAVY: -8}), f"compress_rates: {HEAVY} is -8"),
        (rates(**{HEAVY: 10**9}), f"compress_rates: {HEAVY} is 1000000000, .* to 65536"),
        ({"compress_rates": {HEAVY: 8}}, f"compress_rates has none for {SPARSE}"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"o_groups": 0}, "o_groups is 0"),
        ({"o_groups": 3}, "num_attention_heads is 4, no multiple of o_groups, 3"),
        ({"n_routed_experts": 0}, "n_routed_experts is 0, and must be a whole number from 1"),
        ({"index_topk": 0}, "index_topk is 0"),
        ({"hc_eps": -1.0}, "hc_eps is -1.0"),
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0.0"),
        ({"head_dim": 36}, r"qk_rope_head_dim .* is 9, and must be an even number from 2 to head"),
        ({"index_head_dim": 4}, "is 8, and must be an even number from 2 to index_head_dim, 4"),
    ],
    ids=str,
)
def test_deepseek_v4(over: dict[str, Any], what: str, tmp_path: Path) -> None:
    """Whether the model is imported or only planned by its config."""
    with torch.device("meta"), pytest.raises(CheckpointError, match=what):
        define(tiny_config("deepseek_v4", **over), DefinitionOptions())
    with pytest.raises(CheckpointError, match=what):
        outline(ConfigCheckpoint(tmp_path, tiny_config("deepseek_v4", **over).to_dict()))


def test_a_rate_that_no_layer_has_may_be_anything() -> None:
    kinds = {"layer_types": [*V4_KINDS[:2], SPARSE]}
    check_definition(tiny_config("deepseek_v4", **kinds, **rates(**{HEAVY: 0})))


def test_the_command_says_which_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for over, what in (
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"hc_mult": 0}, "hc_"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(stated("deepseek_v4", **over)))
        assert main(["inspect", str(tmp_path), "memory", "--bandwidth", "1"]) == 1
        error = capsys.readouterr().err
        assert f"config.json can't be right: {what}" in error
        assert "Traceback" not in error


def test_values_that_no_table_has(tmp_path: Path) -> None:
    """The field is named, also where the value lies deeper and fails later."""
    for over, what in (
        ({"rope_parameters": {"rope_type": "weird"}}, "rope_parameters has 'weird', which"),
        ({"hidden_act": "zork"}, "hidden_act has 'zork', which is not known"),
    ):
        with pytest.raises(CheckpointError, match=what):
            outline(ConfigCheckpoint(tmp_path, stated("llama", **over)))


@pytest.mark.parametrize(
    ("over", "what"),
    [
        ({"mlp_bias": "yes"}, "mlp_bias is 'yes', and must be true or false"),
        ({"hidden_act": 3}, "hidden_act is 3, and must be a text"),
        ({"vocab_size": None}, "vocab_size is None, and must be a whole number"),
        ({"attention_dropout": "x"}, "attention_dropout is 'x', and must be a number or null"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x', and must be a whole number, a list or null"),
        ({"use_cache": "x" * 5000}, "use_cache is 'xxx.*xx..., and must be true or false"),
        ({"hidden_size": 50}, r"ValueError: The hidden size \(50\) is not a multiple of"),
        ({"layer_types": ["a", "b", "c"]}, r"The `layer_types` entries .* got \['a', 'b', 'c'\]"),
        ({"attn_implementation": "x"}, 'Specified `attn_implementation="x"` is not .* ... '),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_types_that_transformers_refuses(over: dict[str, Any], what: str, tmp_path: Path) -> None:
    """The file, the field and the value, in a line or two."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(stated("llama", **over)))
    for read in (lambda c: outline(c), lambda c: import_model(c), lambda c: c.names()):
        with pytest.raises(CheckpointError, match=what) as caught:
            read(ConfigCheckpoint.of_file(tmp_path))
        message = str(caught.value)
        assert message.startswith(f"{file}: ")
        assert len(message.removeprefix(str(file))) < 250
        assert "\n" not in message
        assert "Strict" not in message


def test_an_entry_that_is_missing_is_no_unknown_value() -> None:
    assert why_refused(KeyError("factor"), {"rope_type": "yarn"}) == "KeyError: 'factor'"
    assert why_refused(KeyError(), {}).startswith("KeyError")


def test_older_compression_ratios(tmp_path: Path) -> None:
    """Published configs name layers by ratios; transformers looks each up in a table."""
    config = stated("deepseek_v4", compress_ratios=[0, 4, 7])
    config.pop("layer_types", None)
    with pytest.raises(CheckpointError, match="compress_ratios has 7, which is not known"):
        outline(ConfigCheckpoint(tmp_path, config))
