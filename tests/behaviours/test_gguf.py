"""GGUF files written by the gguf package, compiled: every format that is read, q and k in the
order of their architecture (N16).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from bessemer.quantize import f32_to_bf16, storage_format
from tests.behaviours.models import build, causal_lm, stepwise
from tests.e2e.compiled import F32_ERROR, error, reference, token_ids

HEADS, KV_HEADS, WIDTH = 8, 2, 32
SHAPE: dict[str, Any] = {
    "hidden_size": HEADS * WIDTH,  # a multiple of 256, the elements of a K-quant block
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# One file has all of them: part of a tensor's name -> format.
FORMS = {
    "token_embd": "bf16",
    "attn_q": "q8_0",
    "attn_k": "q4_0",
    "attn_v": "q4_1",
    "attn_output": "q4_k",
    "ffn_gate": "q5_k",
    "ffn_up": "q6_k",
    "ffn_down": "f16",
}
# What dequantises to numbers of a useful size with any bits: f16 scales of the K-quants.
SCALES = {"q4_k": {"d": 2e-4, "dmin": 1e-3}, "q5_k": {"d": 1e-4, "dmin": 1e-3}, "q6_k": {"d": 4e-5}}


def encoded(values: np.ndarray, form: str, rng: np.random.Generator) -> np.ndarray:
    """Bytes [rows, bytes]; the gguf package can't encode K-quants, so those are random blocks."""
    if form == "bf16":
        return f32_to_bf16(values).view(np.uint8)
    kind = gguf.GGMLQuantizationType[form.upper()]
    if form not in SCALES:
        return gguf.quants.quantize(values, kind).view(np.uint8)
    fmt = storage_format(form)
    blocks = rng.integers(0, 256, (values.size // fmt.elements, fmt.block_bytes), dtype=np.uint8)
    for field, scale in SCALES[form].items():
        blocks.view(fmt.layout)[field] = np.float16(scale)
    return blocks.reshape(len(values), -1)


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter stores q and k of a llama in."""
    split = values.reshape(heads, 2, len(values) // heads // 2, -1)
    return split.swapaxes(1, 2).reshape(values.shape)


def restored(values: np.ndarray, heads: int) -> np.ndarray:
    split = values.reshape(heads, len(values) // heads // 2, 2, -1)
    return split.swapaxes(1, 2).reshape(values.shape)


def write(model: PreTrainedModel, path: Path) -> None:
    """Store the model in `FORMS`, and give it the numbers that the file then has."""
    config = model.config
    arch = gguf.MODEL_ARCH.LLAMA if config.model_type == "llama" else gguf.MODEL_ARCH.QWEN2
    prefix, rng = gguf.MODEL_ARCH_NAMES[arch], np.random.default_rng(0)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, prefix)
    for key, number in {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }.items():
        writer.add_uint32(f"{prefix}.{key}", number)
    writer.add_float32(f"{prefix}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{prefix}.rope.freq_base", 10000.0)
    for name, parameter in model.named_parameters():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None
        heads = HEADS if ".q_proj" in name else KV_HEADS if ".k_proj" in name else 0
        heads = heads if prefix == "llama" else 0
        form = next((f for part, f in FORMS.items() if part in target), "f32")
        values = parameter.detach().numpy()
        if heads:
            values = permuted(values, heads)
        if form == "f32" or parameter.dim() == 1:
            writer.add_tensor(target, values.copy())
            continue
        kind = gguf.GGMLQuantizationType[form.upper()]
        data = encoded(np.ascontiguousarray(values), form, rng)
        writer.add_tensor(target, data, raw_dtype=kind)
        stored = gguf.quants.dequantize(data, kind).reshape(values.shape)
        stored = restored(stored, heads) if heads else stored
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(stored.copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_every_format(model_type: str, tmp_path: Path) -> None:
    over = {"use_sliding_window": False, "tie_word_embeddings": True}
    model = causal_lm(model_type, **SHAPE, **(over if model_type == "qwen2" else {}))
    path = tmp_path / "model.gguf"
    write(model, path)
    kinds = {tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(path).tensors}
    assert kinds == {"f32", *FORMS.values()}
    compiled = build(path)
    ids = token_ids(37)
    want = reference(model, ids)
    assert error(stepwise(compiled.session(), ids, 20), want) < F32_ERROR
