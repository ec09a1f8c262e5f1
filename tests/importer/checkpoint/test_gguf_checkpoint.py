"""GGUF files as checkpoints: names, orientation, q and k order, configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from bessemer.errors import CheckpointError
from bessemer.importer.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from bessemer.quantize import f32_to_bf16, f32_to_f16

from .builders import LLAMA_METADATA, llama_tensors, tiny_gguf

PROMPT = torch.tensor([[5, 3, 8, 1, 44, 9, 2, 17, 33, 21, 6, 40]])


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter stores q and k of a llama in."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


BASE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (gguf.MODEL_ARCH.LLAMA, {"sliding_window": 4, "head_dim": 16}),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, {"tie_word_embeddings": True}),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, {"head_dim": 16}),
    "phi3": (gguf.MODEL_ARCH.PHI3, {"sliding_window": 6}),
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3.2": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def build(model_type: str, rope: dict[str, Any], **options: Any) -> Any:
    """A random model with norms and biases that matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type,
        **{**BASE, **ARCHITECTURES[model_type][1], "rope_parameters": dict(rope), **options},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in name or name.endswith("bias") else 0.15
            offset = 1.0 if "norm" in name else 0.0
            parameter.copy_(torch.randn_like(parameter) * spread + offset)
    return model


def scaled_frequencies(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """The model's rotary frequencies, and those that its base alone gives."""
    scaled = model.model.rotary_emb.inv_freq.numpy()
    base = model.config.rope_parameters["rope_theta"]
    plain = 1.0 / base ** (np.arange(len(scaled)) / len(scaled))
    return scaled, plain.astype(np.float32)


def convert(model: Any, path: Path, **more: Any) -> Path:
    """Stores a model as llama.cpp's converter does, with the gguf package's own name table."""
    config = model.config
    arch = ARCHITECTURES[config.model_type][0]
    prefix = gguf.MODEL_ARCH_NAMES[arch]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    for name, parameter in model.named_parameters():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        values = parameter.detach().numpy()
        if prefix == "llama" and ".q_proj." in name:
            values = permuted(values, config.num_attention_heads)
        if prefix == "llama" and ".k_proj." in name:
            values = permuted(values, config.num_key_value_heads)
        tensors[target] = (values, "f32")
    rope = config.rope_parameters
    metadata: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
        "tokenizer.ggml.padding_token_id": config.pad_token_id,
    }
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None and config.model_type != "phi3":
        metadata |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        metadata["rope.dimension_count"] = head_dim
    if config.model_type in ("mistral", "phi3"):
        metadata["attention.sliding_window"] = config.sliding_window
    if rope["rope_type"] in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        metadata |= {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }
    if rope["rope_type"] == "llama3":
        scaled, plain = scaled_frequencies(model)
        tensors["rope_freqs.weight"] = (plain / scaled, "f32")
    if rope["rope_type"] == "longrope":
        for part in ("short", "long"):
            tensors[f"rope_factors_{part}.weight"] = (np.array(rope[f"{part}_factor"]), "f32")
        metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return tiny_gguf(path, tensors, metadata | more, architecture=prefix)


def rebuilt(checkpoint: Checkpoint) -> Any:
    """The model that transformers makes of a checkpoint's configuration and tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**checkpoint.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    state = {name: torch.from_numpy(checkpoint.read(name)) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert not unexpected
    assert set(missing) <= tied
    return model


def same_logits(path: Path, model: Any, prompt: torch.Tensor = PROMPT) -> dict[str, Any]:
    with open_checkpoint(path) as checkpoint, torch.no_grad():
        actual = rebuilt(checkpoint)(prompt).logits
        expected = model(prompt).logits
        assert torch.allclose(actual, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
        return checkpoint.config


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_each_architecture_gives_the_same_logits(tmp_path: Path, model_type: str) -> None:
    model = build(model_type, ROPES["default"])
    config = same_logits(convert(model, tmp_path / "m.gguf"), model)
    assert config["model_type"] == model_type
    assert config["architectures"] == [type(model).__name__]
    for key, value in BASE.items():
        if key != "tie_word_embeddings":
            assert config[key] == value, key


@pytest.mark.parametrize("rope", ROPES)
def test_each_rope_scaling_gives_the_same_logits(tmp_path: Path, rope: str) -> None:
    # Heads of 64 channels: Llama 3's ramp spans several frequencies there.
    wide = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = build("llama", ROPES[rope], **wide)
    config = same_logits(convert(model, tmp_path / "m.gguf"), model, PROMPT.repeat(1, 5))
    assert config["rope_parameters"] == ROPES[rope]


def test_longrope_of_phi3_gives_the_same_logits(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.25, 1.5],
        "long_factor": [2.0, 4.0, 8.0],
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.75,
        "factor": 4.0,
    }
    model = build("phi3", rope, original_max_position_embeddings=32)
    path = convert(model, tmp_path / "m.gguf", **{"rope.dimension_count": 6})
    config = same_logits(path, model)
    assert config["rope_parameters"] == rope
    same_logits(path, model, PROMPT.repeat(1, 4))


def read_rope(tmp_path: Path, more: dict[str, Any], factors: list[float] | None = None) -> Any:
    tensors = llama_tensors()
    if factors is not None:
        tensors["rope_freqs.weight"] = (np.array(factors), "f32")
    path = tiny_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA | more)
    with open_checkpoint(path) as checkpoint:
        return checkpoint.config["rope_parameters"]


def test_factors_that_do_nothing_are_no_scaling(tmp_path: Path) -> None:
    assert read_rope(tmp_path, {}, [1.0] * 4)["rope_type"] == "default"


def test_a_missing_base_is_the_default_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = {key: value for key, value in LLAMA_METADATA.items() if key != "rope.freq_base"}
    path = tiny_gguf(tmp_path / "m.gguf", llama_tensors(), metadata)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["rope_parameters"]["rope_theta"] == 10000.0
    assert "no llama.rope.freq_base" in caplog.text


def test_an_old_linear_scale_is_read(tmp_path: Path) -> None:
    rope = read_rope(tmp_path, {"rope.scale_linear": 2.0})
    assert rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("more", "factors", "message"),
    [
        ({}, [1.0, 2.0, 1.5, 4.0], "not those of Llama 3"),
        ({}, [1.0, 2.0, 4.0, 4.0], "not those of Llama 3"),
        ({}, [1.0, 2.0], r"shape \[2\], expected \[4\]"),
        ({}, [1.0, 2.0, float("nan"), 4.0], "not a positive number"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, [1.0] * 4, "both linear"),
        ({"rope.scaling.type": "linear"}, None, "without a positive llama.rope.scaling.factor"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, None, "without llama.rope"),
        ({"rope.scaling.type": "magic"}, None, "'magic', which is not supported"),
        ({"rope.scaling.type": "longrope"}, None, "phi3 only"),
        ({"rope.scaling.attn_factor": 1.2}, None, "attn_factor to 1.2"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, None, "yarn_ext_factor to 0.5"),
        ({"rope.dimension_count": 4}, None, "but heads have 8 channels"),
    ],
)
def test_rope_that_cannot_be_expressed_is_refused(
    tmp_path: Path, more: dict[str, Any], factors: list[float] | None, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_rope(tmp_path, more, factors)


@pytest.mark.parametrize(("architecture", "permutes"), [("llama", True), ("qwen2", False)])
@pytest.mark.parametrize("form", ["f32", "f16", "bf16", "q8_0"])
def test_q_and_k_are_unpermuted_by_their_own_head_count(
    tmp_path: Path, architecture: str, permutes: bool, form: str
) -> None:
    # q has 8 heads of 8 rows, k has 2; each row holds its own number.
    tensors = llama_tensors(form)
    rows = {"attn_q": (64, 8), "attn_k": (16, 2)}
    for layer in range(2):
        for name, (count, heads) in rows.items():
            values = np.repeat(np.arange(count, dtype=np.float32)[:, None], 64, axis=1)
            stored = permuted(values, heads) if permutes else values
            tensors[f"blk.{layer}.{name}.weight"] = (stored, form)
            if not permutes:
                tensors[f"blk.{layer}.{name}.bias"] = (values[:, 0], "f32")
        if not permutes:
            tensors[f"blk.{layer}.attn_v.bias"] = (np.zeros(16, np.float32), "f32")
    path = tiny_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA, architecture)
    with open_checkpoint(path) as checkpoint:
        for name, count in (("q_proj", 64), ("k_proj", 16)):
            full = f"model.layers.1.self_attn.{name}.weight"
            column = checkpoint.read(full)[:, 5]
            assert np.abs(column - np.arange(count)).max() < 0.3
            for rows in (range(3), range(5, count - 1), range(8, 16)):  # within heads, and over
                part = slice(rows.start, rows.stop)
                assert np.array_equal(checkpoint.read(full, rows)[:, 5], column[part])
                stored = checkpoint.read_stored(full)
                assert np.array_equal(checkpoint.read_stored(full, rows), stored[part])
            stored_column = checkpoint.read_stored(full)[:, 5]
            encode = {"f16": f32_to_f16, "bf16": f32_to_bf16}.get(form)
            if encode is not None:
                assert np.array_equal(stored_column, encode(np.arange(count, dtype=np.float32)))
            else:
                assert np.array_equal(stored_column, column)


def test_biases_of_q_and_k_are_unpermuted_too(tmp_path: Path) -> None:
    tensors = llama_tensors()
    for layer in range(2):
        for name, count, heads in (("q", 64, 8), ("k", 16, 2), ("v", 16, 0), ("output", 64, 0)):
            values = np.arange(count, dtype=np.float32)
            stored = permuted(values, heads) if heads else values
            tensors[f"blk.{layer}.attn_{name}.bias"] = (stored, "f32")
    path = tiny_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["attention_bias"] is True
        for name, count in (("q", 64), ("k", 16), ("v", 16), ("o", 64)):
            bias = checkpoint.read(f"model.layers.0.self_attn.{name}_proj.bias")
            assert np.array_equal(bias, np.arange(count))


@pytest.mark.parametrize("form", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_formats_are_decoded_as_by_the_gguf_package(tmp_path: Path, form: str) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", llama_tensors(form), LLAMA_METADATA)
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with open_checkpoint(path) as checkpoint:
        name = "model.layers.0.mlp.down_proj.weight"
        assert checkpoint.info(name) == TensorInfo(name, (64, 96), form)
        assert checkpoint.is_quantised == form.startswith("q")
        other = reference["blk.0.ffn_down.weight"]
        expected = gguf.quants.dequantize(other.data, other.tensor_type)
        assert np.array_equal(checkpoint.read(name), expected)
        norm = checkpoint.read("model.layers.0.input_layernorm.weight")
        assert np.array_equal(norm, reference["blk.0.attn_norm.weight"].data)


def test_a_head_of_its_own_is_read_and_a_tied_one_is_not_listed(tmp_path: Path) -> None:
    tied = tiny_gguf(tmp_path / "tied.gguf", llama_tensors(), LLAMA_METADATA)
    with open_checkpoint(tied) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is True
        assert "lm_head.weight" not in checkpoint.names()
        with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight'.*tied\.gguf"):
            checkpoint.read("lm_head.weight")
    head = np.full((50, 64), 3, np.float32)
    tensors = llama_tensors() | {"output.weight": (head, "f32")}
    with open_checkpoint(tiny_gguf(tmp_path / "own.gguf", tensors, LLAMA_METADATA)) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is False
        assert np.array_equal(checkpoint.read("lm_head.weight"), head)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention.head_count": [8, 4]}, r"differs between layers \(\[4, 8\]\)"),
        ({"attention.head_count_kv": 3}, "can't share 3"),
        ({"attention.head_count": 0}, "attention.head_count is missing or zero"),
        ({"attention.value_length": 4}, "key and value lengths 8 and 4"),
        ({"attention.key_length": 6, "attention.value_length": 6}, r"'blk\.0\.attn_q\.weight'"),
        ({"block_count": 3}, r"tensor 'blk\.2\.attn_norm\.weight': missing"),
        ({"block_count": 1}, r"does not have: blk\.1\.attn_k\.weight"),
        ({"embedding_length": 32}, r"'token_embd.weight': has the shape \[50, 64\]"),
        ({"feed_forward_length": 97}, "ffn_gate"),
        ({"context_length": "long"}, "'llama.context_length' is of type str"),
        ({"expert_count": 8}, "llama.expert_count to 8"),
        ({"attention.causal": False}, "llama.attention.causal to False"),
        ({"logit_scale": 0.5}, "llama.logit_scale to 0.5"),
        ({"rope.dimension_sections": [1, 2]}, "rope.dimension_sections"),
        ({"tensor_data_layout": "reference"}, "tensor_data_layout to reference"),
    ],
)
def test_what_cannot_be_read_honestly_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA_METADATA | change)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_neutral_values_and_per_layer_lists_are_accepted(tmp_path: Path) -> None:
    change = {"expert_count": 0, "attention.causal": True, "attention.head_count_kv": [2, 2]}
    path = tiny_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA_METADATA | change)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("token_embd.weight", None, r"tensor 'token_embd\.weight': missing"),
        ("blk.1.ffn_up.weight", None, r"tensor 'blk\.1\.ffn_up\.weight': missing"),
        ("blk.0.attn_q_norm.weight", np.ones(8), r"does not have: blk\.0\.attn_q_norm\.weight"),
        ("blk.0.attn_q.bias", np.ones(64), r"tensor 'blk\.0\.attn_k\.bias': missing, though"),
    ],
)
def test_the_tensors_must_be_those_of_the_architecture(
    tmp_path: Path, name: str, values: np.ndarray | None, message: str
) -> None:
    tensors = llama_tensors()
    if values is None:
        del tensors[name]
    else:
        tensors[name] = (values, "f32")
    path = tiny_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_other_architectures_are_refused_with_a_list(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA_METADATA, "mamba")
    with pytest.raises(CheckpointError, match=r"'mamba'.*llama, qwen2, qwen3, phi3"):
        open_checkpoint(path)


def split(tmp_path: Path, names: list[list[str]], **first: Any) -> Path:
    tensors = llama_tensors()
    paths = []
    for index, part in enumerate(names):
        path = tmp_path / f"m-{index + 1:05d}-of-{len(names):05d}.gguf"
        metadata = LLAMA_METADATA | first if index == 0 else {}
        tiny_gguf(path, {name: tensors[name] for name in part}, metadata)
        paths.append(path)
    return paths[0]


def test_a_split_file_is_one_checkpoint(tmp_path: Path) -> None:
    names = list(llama_tensors())
    first = split(tmp_path, [names[:5], names[5:]], **{"split.tensors.count": len(names)})
    whole = tiny_gguf(tmp_path / "whole.gguf", llama_tensors(), LLAMA_METADATA)
    with open_checkpoint(first) as checkpoint, open_checkpoint(whole) as other:
        assert checkpoint.names() == other.names()
        for name in other.names():
            assert np.array_equal(checkpoint.read(name), other.read(name))
        assert len(checkpoint.content_files()) == 2
    second = tmp_path / "m-00002-of-00002.gguf"
    with pytest.raises(CheckpointError, match="name the first part"):
        open_checkpoint(second)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"1 part\(s\) missing: m-00002-of-00002"):
        open_checkpoint(first)


def test_parts_that_share_a_tensor_are_refused(tmp_path: Path) -> None:
    names = list(llama_tensors())
    first = split(tmp_path, [names, names[:1]])
    with pytest.raises(CheckpointError, match="also in m-00001-of-00002"):
        open_checkpoint(first)


def test_the_fingerprint_follows_the_content_alone(tmp_path: Path) -> None:
    def key(path: Path) -> str:
        with open_checkpoint(path) as checkpoint:
            return checkpoint.fingerprint()

    path = tiny_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA_METADATA)
    first = key(path)
    moved = path.rename(tmp_path / "other.gguf")
    assert key(moved) == first
    data = bytearray(moved.read_bytes())
    data[-40] ^= 1
    moved.write_bytes(data)
    assert key(moved) != first


def test_reading_does_not_keep_the_tensors(tmp_path: Path) -> None:
    import tracemalloc

    path = tiny_gguf(tmp_path / "m.gguf", llama_tensors("q8_0"), LLAMA_METADATA)
    with open_checkpoint(path) as checkpoint:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for name in checkpoint.names():
            checkpoint.read(name)
        kept = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert kept < 20_000, "less than one matrix"
