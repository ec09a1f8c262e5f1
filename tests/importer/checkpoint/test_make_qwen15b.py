"""The script that makes a model of DeepSeek-R1-Distill-Qwen-1.5B's shape, on a small one."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from bessemer.importer.checkpoint import open_checkpoint

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "make_qwen15b.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_qwen15b", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_shape_is_that_of_the_model(script: ModuleType) -> None:
    from transformers import AutoConfig, Qwen2ForCausalLM

    shape = script.Shape()
    with torch.device("meta"):
        model = Qwen2ForCausalLM(AutoConfig.for_model(**shape.config()))
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert shape.tensors() == expected
    count = sum(math.prod(dims) for dims in shape.tensors().values())
    assert count == script.PARAMETERS
    assert count + model.model.rotary_emb.inv_freq.numel() == 1_777_088_064


def test_a_small_one_is_a_checkpoint(script: ModuleType, tmp_path: Path) -> None:
    shape = script.Shape(layers=2, hidden=48, heads=4, kv_heads=2, intermediate=80, vocab=700)
    count = script.make(tmp_path, shape, shard_bytes=60_000)
    assert not list(tmp_path.glob("*.partial"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with open_checkpoint(tmp_path) as checkpoint:
        values = [checkpoint.read_stored(name) for name in checkpoint.names()]
        assert sum(value.size for value in values) == count
        assert all(value.dtype == np.uint16 for value in values)
        head = checkpoint.read("lm_head.weight")
        assert abs(head.std() - script.WEIGHT_SPREAD) < 0.002
        assert not np.array_equal(head, checkpoint.read("model.embed_tokens.weight"))
        assert checkpoint.read("model.norm.weight").mean() > 0.8
        first = checkpoint.fingerprint()
        checkpoint.write_tokenizer(tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = "The capital of Österreich: 東京 42!"
    ids = tokenizer.encode(text).ids
    assert ids[0] == json.loads((tmp_path / "config.json").read_text())["bos_token_id"]
    assert tokenizer.decode(ids) == text
    script.make(tmp_path, shape, shard_bytes=60_000)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.fingerprint() == first
    script.make(tmp_path, shape, seed=1, shard_bytes=60_000)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.fingerprint() != first
