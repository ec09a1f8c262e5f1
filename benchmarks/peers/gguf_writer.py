"""A Hugging Face folder of a llama or qwen2 as GGUF, in f32, f16 or q8_0, without a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from common import CONTEXT, read_config
from safetensors import safe_open

TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k [heads * width, K] in the order of llama.cpp's rotary embedding, which pairs
    neighbours where transformers pairs the halves of a head.
    """
    rows, width = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, width)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, width)


def write_gguf(source: Path, precision: str, target: Path) -> None:
    """Write the file whole: it is renamed when it is."""
    config = read_config(source)
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"no conversion of {kind} to GGUF here, only of {', '.join(ARCHITECTURES)}"
        )
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, kind)
    _write_keys(writer, config, precision)
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], layers)
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in sorted(tensors.keys()):
                found = names.get_name(name, (".weight", ".bias"))
                if found is None:
                    raise ValueError(f"{file.name}: tensor {name} has no place in a GGUF")
                _write_tensor(writer, found, name, tensors.get_tensor(name), config, precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)


def _write_keys(writer: Any, config: dict[str, Any], precision: str) -> None:
    rope = config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(max(CONTEXT, config["max_position_embeddings"]))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    kinds = {
        "f32": gguf.LlamaFileType.ALL_F32,
        "f16": gguf.LlamaFileType.MOSTLY_F16,
        "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    }
    writer.add_file_type(kinds[precision])


def _write_tensor(
    writer: Any, name: str, source: str, value: np.ndarray, config: dict[str, Any], precision: str
) -> None:
    if value.ndim == 1:
        writer.add_tensor(name, value.astype(np.float32))
        return
    if config["model_type"] == "llama" and source.endswith(("q_proj.weight", "k_proj.weight")):
        key = "num_attention_heads" if "q_proj" in source else "num_key_value_heads"
        value = permuted(value, config.get(key, config["num_attention_heads"]))
    kind = TYPES[precision]
    data = gguf.quants.quantize(value.astype(np.float32), kind)
    writer.add_tensor(name, data, raw_dtype=kind)
