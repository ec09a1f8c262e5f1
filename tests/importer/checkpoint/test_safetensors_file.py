"""Safetensors headers: what is sound opens, everything else is refused before it is mapped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bessemer.errors import CheckpointError
from bessemer.importer.checkpoint.safetensors_file import SafetensorsFile

from .builders import LFS_POINTER, little_memory, raw_safetensors


def spec(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard.safetensors"
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(64, dtype=np.float16),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_a_sound_file_opens(shard: Path) -> None:
    file = SafetensorsFile(shard)
    assert file.metadata == {"format": "pt"}
    assert file.entries["a"].shape == (2, 3)
    assert file.entries["b"].dtype == "F16"
    view = file.view(file.entries["a"].start, file.entries["a"].nbytes)
    assert np.array_equal(view.view(np.float32), np.arange(6))
    assert len(file.view(file.entries["empty"].start, 0)) == 0
    del view
    file.close()
    file.close()
    with pytest.raises(ValueError, match="has been closed"):
        file.view(0, 1)


def test_a_view_that_is_still_held_survives_closing(shard: Path) -> None:
    file = SafetensorsFile(shard)
    view = file.view(file.entries["a"].start, 24)
    file.close()
    assert view.view(np.float32)[5] == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "only 0 bytes"),
        (b"\x01\x00", "only 2 bytes"),
        (LFS_POINTER, "Git LFS pointer"),
        (raw_safetensors({}, length=2**63 - 1), "header's length is given as 9223372036854775807"),
        (raw_safetensors({}, length=2**64 - 1), "header's length"),
        (raw_safetensors({}, length=1000), "the header's length is given as 1000 bytes, but 2"),
        (raw_safetensors(b"{nope"), "not valid JSON"),
        (raw_safetensors(b"\xff\xfe{}"), "not valid JSON"),
        (raw_safetensors(b"[" * 200_000), "not valid JSON"),
        (raw_safetensors([1]), "not a JSON object"),
        (raw_safetensors({"__metadata__": 3}), "__metadata__"),
        (
            raw_safetensors(b'{"t": 1, "t": 2}'),
            "the key 't' occurs twice",
        ),
        (raw_safetensors({"t": 7}), "tensor 't': the header gives no dtype"),
        (raw_safetensors({"t": spec("Q8")}, bytes(8)), "tensor 't': unknown dtype 'Q8'"),
        (raw_safetensors({"t": spec(shape=[-2])}, bytes(8)), "tensor 't': its shape"),
        (raw_safetensors({"t": spec(shape=[2.0])}, bytes(8)), "tensor 't': its shape"),
        (raw_safetensors({"t": spec(shape=[2**62, 4])}, bytes(8)), "tensor 't': its shape"),
        (raw_safetensors({"t": spec(shape=[1] * 40)}, bytes(8)), "tensor 't': its shape"),
        (raw_safetensors({"t": spec(offsets=[8, 0])}, bytes(8)), "tensor 't': its data_offsets"),
        (raw_safetensors({"t": spec(offsets=[0])}, bytes(8)), "tensor 't': its data_offsets"),
        (raw_safetensors({"t": spec(shape=[3])}, bytes(8)), "'t': F32 of shape .* takes 12 bytes"),
        (raw_safetensors({"t": spec(offsets=[4, 12])}, bytes(12)), "tensor 't': .*follows a gap"),
        (
            raw_safetensors({"t": spec(), "u": spec(offsets=[4, 12])}, bytes(12)),
            "tensor 'u': .*overlaps",
        ),
        (raw_safetensors({"t": spec()}, bytes(7)), "tensor 't': .*cut off"),
        (raw_safetensors({"t": spec()}, bytes(9)), "1 bytes follow"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with little_memory(), pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_off_names_the_tensor(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=re.escape(f"{shard}: tensor 'b'") + ".*cut off"):
        SafetensorsFile(shard)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    import os

    fifo = tmp_path / "fifo.safetensors"
    os.mkfifo(fifo)
    with pytest.raises(CheckpointError, match="not a regular file"):
        SafetensorsFile(fifo)
    with pytest.raises(CheckpointError, match="not a regular file"):
        SafetensorsFile(tmp_path)
    with pytest.raises(CheckpointError, match="can't be read: No such file"):
        SafetensorsFile(tmp_path / "none")
