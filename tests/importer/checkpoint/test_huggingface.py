"""Hugging Face folders as checkpoints."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from bessemer.errors import CheckpointError
from bessemer.importer.checkpoint import TensorInfo, open_checkpoint
from bessemer.quantize import f32_to_bf16

from .builders import LFS_POINTER, hf_folder, raw_safetensors

EMBED = "model.embed_tokens.weight"


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        EMBED: rng.standard_normal((10, 4)).astype(np.float32),
        "model.norm.weight": rng.standard_normal(4).astype(np.float16),
        "model.layers.0.mlp.up_proj.weight": rng.standard_normal((8, 4)).astype(np.float16),
        "model.layers.0.mlp.down_proj.weight": rng.standard_normal((4, 8)).astype(np.float32),
    }


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_are_read_as_float32_and_as_stored(tmp_path: Path, shards: int) -> None:
    expected = tensors()
    with open_checkpoint(hf_folder(tmp_path / "m", expected, shards)) as checkpoint:
        assert checkpoint.kind == "hf"
        assert checkpoint.names() == sorted(expected)
        assert not checkpoint.is_quantised
        assert checkpoint.info("model.norm.weight") == TensorInfo("model.norm.weight", (4,), "f16")
        for name, values in expected.items():
            read = checkpoint.read(name)
            assert read.dtype == np.float32
            assert np.array_equal(read, values.astype(np.float32))
            stored = checkpoint.read_stored(name)
            wanted = values if values.dtype == np.float32 else values.view(np.uint16)
            assert stored.dtype == wanted.dtype
            assert np.array_equal(stored, wanted)
            for rows in (range(1, len(values)), range(2), range(1, 1)):
                part = slice(rows.start, rows.stop)
                assert np.array_equal(checkpoint.read(name, rows), values[part].astype(np.float32))
                assert np.array_equal(checkpoint.read_stored(name, rows), wanted[part])
            with pytest.raises(ValueError, match="of a tensor of shape"):
                checkpoint.read(name, range(1, len(values) + 1))
            read[...] = 0
            stored[...] = 0
        assert np.array_equal(checkpoint.read(EMBED), expected[EMBED])


def test_bf16_is_read_from_unaligned_data(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", tensors())
    bits = f32_to_bf16(np.array([1.5, -2.25, 3e38], np.float32))
    header = {
        "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [1, 7]},
        "f": {"dtype": "F32", "shape": [1], "data_offsets": [7, 11]},
    }
    data = b"\0" + bits.tobytes() + np.float32(7).tobytes()
    (folder / "model.safetensors").write_bytes(raw_safetensors(header, data))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.info("b").dtype == "bf16"
        assert np.array_equal(checkpoint.read_stored("b"), bits)
        assert checkpoint.read("b")[1] == -2.25
        assert checkpoint.read("f")[0] == 7
        assert checkpoint.read_stored("f").flags.aligned
        with pytest.raises(CheckpointError, match="tensor 'odd': stored as U8"):
            checkpoint.read("odd")


def test_a_missing_shard_is_named_with_its_tensor(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", tensors(), shards=2)
    gone = "model-00002-of-00002.safetensors"
    (folder / gone).unlink()
    with pytest.raises(CheckpointError, match=rf"1 missing shard.*{gone} \(tensor 'model\."):
        open_checkpoint(folder)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", tensors(), shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"00001-of-00002.*tensor 'lm_head\.weight'"):
        open_checkpoint(folder)


def test_a_checkpoint_without_embedding_says_so(tmp_path: Path) -> None:
    held = tensors()
    del held[EMBED]
    with open_checkpoint(hf_folder(tmp_path / "m", held)) as checkpoint:
        with pytest.raises(CheckpointError, match=rf"1 tensor\(s\) missing: {EMBED}.*model\.safe"):
            checkpoint.require([EMBED, "model.norm.weight"])
        with pytest.raises(CheckpointError, match=rf"tensor '{EMBED}'.*model\.safetensors"):
            checkpoint.read(EMBED)
        with pytest.raises(CheckpointError, match="not in the checkpoint"):
            checkpoint.info("nothing")
        many = [f"model.layers.{layer}.x" for layer in range(40)]
        with pytest.raises(CheckpointError, match=r"40 tensor\(s\).*and 28 more"):
            checkpoint.require(many)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "", 3])
def test_shards_outside_the_folder_are_refused(tmp_path: Path, file: object) -> None:
    folder = hf_folder(tmp_path / "m", tensors(), shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(CheckpointError, match="not a file of this folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "config.json: not valid JSON"),
        ("config.json", b"[1]", "holds \\[1\\], not an object"),
        ("config.json", LFS_POINTER, "config.json: this is a Git LFS pointer"),
        ("config.json", b"\xff\xfe", "not valid JSON"),
        ("config.json", b"[" * 100_000, "not valid JSON"),
        (
            "config.json",
            b'{"quantization_config": {"quant_method": "gptq"}}',
            "quantised .gptq.",
        ),
        ("config.json", b'{"quantization_config": 3}', "quantised .unknown method."),
        ("generation_config.json", b"null", "generation_config.json"),
        ("model.safetensors", LFS_POINTER, "model.safetensors: this is a Git LFS pointer"),
    ],
)
def test_damaged_files_of_the_folder(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    folder = hf_folder(tmp_path / "m", tensors())
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["pytorch_model.bin"], "pytorch_model.bin: a pickle.*save_pretrained"),
        (["pytorch_model-00001-of-00002.bin"], "a pickle"),
        (["a.safetensors", "b.safetensors"], "only a.safetensors, b.safetensors"),
        (["adapter_model.safetensors"], "only adapter_model.safetensors"),
        ([], "no weights: neither"),
    ],
)
def test_folders_without_readable_weights(tmp_path: Path, files: list[str], message: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    for file in files:
        (tmp_path / file).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_an_index_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="has no weight_map"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["модель é b", 'it\'s "quoted"', "-leading", "a\\b"])
def test_unusual_folder_names(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_folder(tmp_path / name, tensors(), shards=2)
    monkeypatch.chdir(tmp_path)
    with open_checkpoint(name) as checkpoint:
        assert checkpoint.read(EMBED).shape == (10, 4)


def test_a_read_only_folder_is_only_read(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", tensors(), shards=2)
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    try:
        with open_checkpoint(folder) as checkpoint:
            checkpoint.read(EMBED)
            checkpoint.fingerprint()
    finally:
        folder.chmod(0o755)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def fingerprint(folder: Path) -> str:
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.fingerprint()


def test_the_fingerprint_follows_the_content_alone(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", tensors(), shards=2)
    first = fingerprint(folder)
    assert fingerprint(folder) == first

    shard = folder / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    second = fingerprint(folder)
    assert second != first
    data[-1] ^= 1
    shard.write_bytes(data)
    assert fingerprint(folder) == first

    (folder / "notes.txt").write_text("not part of the model")
    moved = folder.rename(tmp_path / "elsewhere")
    assert fingerprint(moved) == first
    (moved / "chat_template.jinja").write_text("{{ messages }}")
    assert fingerprint(moved) != first


def test_a_settled_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.importer.checkpoint import files

    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    clock = time.time_ns
    monkeypatch.setattr(files.time, "time_ns", lambda: clock() + 2 * files.SETTLED_NS)
    first = files.content_hash(path)
    monkeypatch.setattr(files.time, "time_ns", clock)
    hashed: list[int] = []
    real = files.hashlib.sha256
    monkeypatch.setattr(files.hashlib, "sha256", lambda *a: hashed.append(1) or real(*a))
    assert files.content_hash(path) == first
    assert not hashed
    before = path.stat()
    path.write_bytes(b"abd")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files.content_hash(path) != first, "the same size and time of modification"
    assert files.content_hash(path) != first
    assert len(hashed) == 2, "a file changed a moment ago may change again unseen"
