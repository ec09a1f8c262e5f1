"""Files for the tests: sound ones through other writers, broken ones byte by byte."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bessemer.quantize import f32_to_bf16

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
assert 125 <= len(LFS_POINTER) <= 130

LITTLE_MEMORY = 2 << 20


@contextmanager
def little_memory() -> Iterator[None]:
    """Fails if more than `LITTLE_MEMORY` bytes are allocated at once inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < LITTLE_MEMORY
    finally:
        tracemalloc.stop()


# GGUF, byte by byte.


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    body = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return text(name) + body


def raw_gguf(
    pairs: list[bytes],
    tensors: list[bytes],
    data: int = 0,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    n_tensors, n_pairs = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs) + b"".join(pairs + tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


LLAMA = pair("general.architecture", STRING, text("llama"))


# GGUF through the gguf package.


PLAIN = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64}


def tiny_gguf(
    path: Path,
    tensors: dict[str, tuple[np.ndarray, str]],
    metadata: dict[str, Any],
    architecture: str = "llama",
) -> Path:
    """Writes `tensors` (values and format) and `metadata` (key without prefix to value)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        full = key if key.startswith(("tokenizer.", "general.")) else f"{architecture}.{key}"
        add_value(writer, full, value)
    for name, (values, form) in tensors.items():
        if form in PLAIN:
            writer.add_tensor(name, values.astype(PLAIN[form]))
            continue
        kind = gguf.GGMLQuantizationType[form.upper()]
        if form == "bf16":
            stored = f32_to_bf16(values).view(np.uint8)
        else:
            stored = gguf.quants.quantize(values.astype(np.float32), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


LLAMA_METADATA: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def llama_tensors(form: str = "f32", seed: int = 0) -> dict[str, tuple[np.ndarray, str]]:
    """All tensors of a llama of `LLAMA_METADATA`, 50 tokens, tied head; norms in f32."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> tuple[np.ndarray, str]:
        return rng.standard_normal((rows, columns)).astype(np.float32), form

    def norm() -> tuple[np.ndarray, str]:
        return rng.uniform(0.5, 2, 64).astype(np.float32), "f32"

    tensors = {"token_embd.weight": matrix(50, 64), "output_norm.weight": norm()}
    for layer in range(2):
        prefix = f"blk.{layer}."
        tensors[prefix + "attn_norm.weight"] = norm()
        tensors[prefix + "ffn_norm.weight"] = norm()
        for name, rows, columns in (
            ("attn_q", 64, 64),
            ("attn_k", 16, 64),
            ("attn_v", 16, 64),
            ("attn_output", 64, 64),
            ("ffn_gate", 96, 64),
            ("ffn_up", 96, 64),
            ("ffn_down", 64, 96),
        ):
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns)
    return tensors


# Hugging Face folders.


def hf_folder(
    folder: Path,
    tensors: dict[str, np.ndarray],
    shards: int = 1,
    config: dict[str, Any] | None = None,
) -> Path:
    """A folder with config.json and `tensors` spread over safetensors shards."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    names = sorted(tensors)
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = names[index::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index_json = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json))
    return folder


def raw_safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(body) if length is None else length
    return size.to_bytes(8, "little") + body + data
