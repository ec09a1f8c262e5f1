"""The strict GGUF reader: sound files as the gguf package reads them, broken ones refused."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from bessemer.errors import CheckpointError
from bessemer.importer.checkpoint import open_checkpoint
from bessemer.importer.checkpoint.gguf_file import GGUFFile, GGUFMetadata

from .builders import (
    ARRAY,
    BOOL,
    F32,
    LFS_POINTER,
    LLAMA,
    LLAMA_METADATA,
    STRING,
    U32,
    U64,
    little_memory,
    llama_tensors,
    pair,
    raw_gguf,
    tensor,
    text,
    tiny_gguf,
)

HUGE = 2**40


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def nested(depth: int) -> bytes:
    return (u32(ARRAY) + u64(1)) * depth + u32(U32) + u64(1) + u32(7)


def aligned(value: int) -> list[bytes]:
    return [LLAMA, pair("general.alignment", U32, u32(value))]


BROKEN = {
    "empty": (b"", "magic at byte 0 takes 4 bytes"),
    "not a gguf": (b"GGML" + bytes(100), "not a GGUF file"),
    "lfs": (LFS_POINTER, "Git LFS pointer"),
    "header only": (b"GGUF" + u32(3), "tensor count"),
    "version 1": (raw_gguf([], [], version=1), "version 1"),
    "version 99": (raw_gguf([], [], version=99), "version 99"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (raw_gguf([], [], counts=(2**64 - 1, 0)), "claims 18446744073709551615 tens"),
    "key count": (raw_gguf([], [], counts=(0, 2**63)), "claims 9223372036854775808 metadata keys"),
    "key length": (raw_gguf([u64(HUGE) + bytes(40)], []), "a metadata key is given as 1099511627"),
    "key past the end": (raw_gguf([u64(5000) + bytes(40)], []), "a metadata key at byte .* ends"),
    "key not utf-8": (raw_gguf([pair("k", U32, u32(1)).replace(b"k", b"\xff")], []), "not UTF-8"),
    "key twice": (raw_gguf([LLAMA, LLAMA], []), "'general.architecture' occurs twice"),
    "string length": (
        raw_gguf([pair("general.name", STRING, u64(HUGE) + b"abc")], []),
        "value of 'general.name' is given as 1099511627776 bytes",
    ),
    "string past the end": (
        raw_gguf([pair("general.name", STRING, u64(2**20) + b"abc")], []),
        "value of 'general.name' at byte .* takes 1048576 bytes",
    ),
    "string not utf-8": (raw_gguf([pair("k", STRING, text(b"\xc3\x28"))], []), "not UTF-8"),
    "value type": (raw_gguf([pair("k", 13, bytes(16))], []), "'k' has the unknown value type 13"),
    "boolean": (raw_gguf([pair("k", BOOL, b"\x02")], []), "neither 0 nor 1"),
    "array count": (
        raw_gguf([pair("k", ARRAY, u32(U32) + u64(2**64 - 1) + bytes(64))], []),
        "claims 18446744073709551615 items in 'k'",
    ),
    "array of strings count": (
        raw_gguf([pair("k", ARRAY, u32(STRING) + u64(2**60) + bytes(64))], []),
        "claims 1152921504606846976 strings in 'k'",
    ),
    "array of byte count": (
        raw_gguf([pair("k", ARRAY, u32(0) + u64(2**63) + bytes(64))], []),
        "items in 'k'",
    ),
    "array item type": (
        raw_gguf([pair("k", ARRAY, u32(77) + u64(1) + bytes(64))], []),
        "unknown value type 77",
    ),
    "nested arrays": (raw_gguf([pair("k", ARRAY, nested(1))], []), "array of arrays"),
    "deep nested arrays": (raw_gguf([pair("k", ARRAY, nested(100_000))], []), "array of arrays"),
    "alignment 0": (raw_gguf(aligned(0), []), "general.alignment is 0"),
    "alignment 1": (raw_gguf(aligned(1), []), "general.alignment is 1"),
    "alignment 48": (raw_gguf(aligned(48), []), "general.alignment is 48"),
    "alignment 2^30": (raw_gguf(aligned(2**30), []), "general.alignment is 1073741824"),
    "alignment text": (
        raw_gguf([LLAMA, pair("general.alignment", STRING, text("32"))], []),
        "general.alignment is '32'",
    ),
    "dims overflow": (
        raw_gguf([LLAMA], [tensor("t", [4, 2**62 + 1])], 64),
        r"tensor 't': dims \[4, 4611686018427387905\] of f32 end at byte",
    ),
    "9 dims": (raw_gguf([LLAMA], [tensor("t", [1] * 9)], 64), "tensor 't': has 9 dimensions"),
    "2^31 dims": (
        raw_gguf([LLAMA], [text("t") + u32(2**31) + bytes(64)], 64),
        "tensor 't': has 2147483648 dimensions",
    ),
    "0 dims": (raw_gguf([LLAMA], [tensor("t", [])], 64), "tensor 't': has 0 dimensions"),
    "empty dim": (raw_gguf([LLAMA], [tensor("t", [4, 0])], 64), "tensor 't': has an empty dim"),
    "type id": (
        raw_gguf([LLAMA], [tensor("t", [32], 4711)], 64),
        r"tensor 't': has an unknown type \(type id 4711\)",
    ),
    "unreadable type": (
        raw_gguf([LLAMA], [tensor("t", [256], 16)], 256),
        r"tensor 't': is stored as iq2_xxs, which can't be read.*q4_k",
    ),
    "partial block": (
        raw_gguf([LLAMA], [tensor("t", [200, 2], 12)], 512),
        "tensor 't': rows of 200 values are not whole q4_k blocks of 256",
    ),
    "unaligned": (raw_gguf([LLAMA], [tensor("t", [4], 0, 4)], 64), "tensor 't': its data offset 4"),
    "offset": (
        raw_gguf([LLAMA], [tensor("t", [4], 0, 2**63)], 64),
        "tensor 't': .* the file has",
    ),
    "offset wraps": (raw_gguf([LLAMA], [tensor("t", [8], 0, 2**64 - 32)], 64), "tensor 't': .*has"),
    "overlap": (
        raw_gguf([LLAMA], [tensor("t", [16]), tensor("u", [4], 0, 32)], 96),
        "tensor 'u': its data overlaps that of tensor 't'",
    ),
    "tensor twice": (
        raw_gguf([LLAMA], [tensor("t", [4]), tensor("t", [4], 0, 32)], 96),
        "tensor 't': occurs twice",
    ),
    "tensor name": (raw_gguf([LLAMA], [u64(HUGE) + bytes(64)], 64), "a tensor's name is given"),
    "cut in the tensor list": (
        raw_gguf([LLAMA], [tensor("t", [4, 4])])[:120],
        "tensor 't'|the type of|the offset of|takes",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, name: str) -> None:
    content, message = BROKEN[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with little_memory(), pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_24_bytes_have_no_architecture(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    assert path.stat().st_size == 24
    with pytest.raises(CheckpointError, match="no architecture"):
        open_checkpoint(path)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", llama_tensors("q8_0"), LLAMA_METADATA)
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    step = max(1, len(whole) // 400)
    # The last tensor may be followed by padding, whose loss loses nothing.
    for length in [*range(0, len(whole) - 64, step), len(whole) - 64]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="cut"):
            open_checkpoint(cut)


def test_64_bytes_cut_off_name_the_tensor(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA_METADATA)
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.1\.ffn_down\.weight'.*cut off"):
        open_checkpoint(path)


def test_flipped_bytes_never_crash(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA_METADATA)
    whole = bytearray(path.read_bytes())
    header = len(whole) - sum(values.nbytes for values, _ in llama_tensors().values())
    rng = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole)
        for position in rng.integers(0, header, rng.integers(1, 4)):
            data[position] = rng.integers(0, 256)
        path.write_bytes(data)
        # Refused with our error, or read: anything else fails the test.
        with contextlib.suppress(CheckpointError), open_checkpoint(path) as checkpoint:
            for name in checkpoint.names():
                checkpoint.read(name)


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_type(tmp_path: Path, version: int) -> None:
    pairs = [
        pair("u8", 0, b"\xfe"),
        pair("i8", 1, b"\xfe"),
        pair("u16", 2, struct.pack("<H", 65535)),
        pair("i16", 3, struct.pack("<h", -5)),
        pair("u32", 4, u32(2**32 - 1)),
        pair("i32", 5, struct.pack("<i", -7)),
        pair("f32", F32, struct.pack("<f", 0.1)),
        pair("yes", BOOL, b"\x01"),
        pair("text", STRING, text("é\0x")),
        pair("u64", U64, u64(2**64 - 1)),
        pair("i64", 11, struct.pack("<q", -(2**62))),
        pair("f64", 12, struct.pack("<d", 0.1)),
        pair("words", ARRAY, u32(STRING) + u64(2) + text("a") + text("")),
        pair("flags", ARRAY, u32(BOOL) + u64(2) + b"\x00\x01"),
        pair("shorts", ARRAY, u32(3) + u64(2) + struct.pack("<hh", 1, -1)),
        pair("none", ARRAY, u32(U32) + u64(0)),
    ]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf(pairs, [tensor("t", [3, 2])], 24, version=version))
    file = GGUFFile(path)
    values = file.metadata
    assert (values["u8"], values["i8"], values["u16"], values["i16"]) == (254, -2, 65535, -5)
    assert (values["u32"], values["i32"]) == (2**32 - 1, -7)
    assert (values["u64"], values["i64"]) == (2**64 - 1, -(2**62))
    assert (values["f32"], values["f64"]) == (float(np.float32(0.1)), 0.1)
    assert values["yes"] is True
    assert values["text"] == "é\0x"
    assert values["words"] == ["a", ""]
    assert values["flags"].tolist() == [False, True]
    assert values["shorts"].tolist() == [1, -1]
    assert values["none"].tolist() == []
    assert file.tensors["t"].shape == (2, 3)
    file.close()


def test_metadata_of_the_wrong_type_is_an_error(tmp_path: Path) -> None:
    values = {
        "s": "x",
        "i": 3,
        "neg": -1,
        "b": True,
        "f": 0.5,
        "nan": float("nan"),
        "a": np.array([2, 2]),
        "mixed": np.array([2, 3]),
        "floats": np.array([1.0]),
        "l": ["x"],
    }
    metadata = GGUFMetadata(tmp_path, values)
    assert metadata.string("s") == "x"
    assert metadata.integer("i") == 3
    assert metadata.number("i") == 3.0
    assert metadata.boolean("b") is True
    assert metadata.strings("l") == ["x"]
    assert metadata.uniform_integer("a") == 2
    assert metadata.uniform_integer("i") == 3
    for read, key in (
        (metadata.string, "i"),
        (metadata.integer, "b"),
        (metadata.integer, "f"),
        (metadata.integer, "neg"),
        (metadata.integer, "a"),
        (metadata.number, "b"),
        (metadata.number, "s"),
        (metadata.number, "nan"),
        (metadata.boolean, "i"),
        (metadata.strings, "s"),
        (metadata.strings, "a"),
        (metadata.array, "l"),
        (metadata.uniform_integer, "floats"),
        (metadata.uniform_integer, "mixed"),
    ):
        with pytest.raises(CheckpointError, match=f"'{key}'"):
            read(key)
    assert metadata.integer("absent") is None
    assert metadata.number("absent", 2.5) == 2.5


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    tensors = llama_tensors("q4_0") | {
        "token_embd.weight": (llama_tensors()["token_embd.weight"][0], "f16")
    }
    path = tiny_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA)
    file, reference = GGUFFile(path), gguf.GGUFReader(path)
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for other in reference.tensors:
        ours = file.tensors[other.name]
        assert ours.start == other.data_offset
        assert ours.nbytes == other.n_bytes
        assert ours.shape == tuple(int(dim) for dim in reversed(other.shape))
        assert ours.dtype == other.tensor_type.name.lower()
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert file.metadata[key] == field.contents()
    file.close()
