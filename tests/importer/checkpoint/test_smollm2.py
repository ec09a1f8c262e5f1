"""The real model: SmolLM2-135M-Instruct as a GGUF of Q4_1, Q8_0 and F32 tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from bessemer.importer.checkpoint import Checkpoint, open_checkpoint

from .test_gguf_checkpoint import permuted, rebuilt


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with open_checkpoint("smollm2") as opened:
        yield opened


def test_configuration(checkpoint: Checkpoint) -> None:
    expected = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert expected.items() <= checkpoint.config.items()
    assert checkpoint.is_quantised
    formats = Counter(checkpoint.info(name).dtype for name in checkpoint.names())
    assert formats == {"q4_1": 210, "f32": 61, "q8_0": 1}


def test_names_and_shapes_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        state = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).state_dict()
    expected = {name: tuple(value.shape) for name, value in state.items()}
    del expected["lm_head.weight"]
    assert {name: checkpoint.info(name).shape for name in checkpoint.names()} == expected
    assert sum(np.prod(shape) for shape in expected.values()) == 134_515_008


def test_values_are_those_of_the_gguf_package(checkpoint: Checkpoint) -> None:
    reader = gguf.GGUFReader(checkpoint.path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    for name in checkpoint.names():
        if ".layers." in name and ".layers.0." not in name and ".layers.29." not in name:
            continue
        tensor = stored[str(names.get_name(name, try_suffixes=(".weight",)))]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        actual = checkpoint.read(name)
        if ".q_proj." in name or ".k_proj." in name:
            actual = permuted(actual, 9 if ".q_proj." in name else 3)
        assert np.array_equal(actual, expected), name


@pytest.mark.slow
def test_it_answers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    checkpoint.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    model = rebuilt(checkpoint)
    ids = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=7, do_sample=False
    )
    assert tokenizer.decode(ids[0, prompt.shape[1] :]) == "The capital of France is Paris."
