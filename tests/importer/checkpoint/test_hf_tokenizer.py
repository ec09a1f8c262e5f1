"""Tokenizer files of Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from bessemer.errors import CheckpointError
from bessemer.importer.checkpoint import open_checkpoint

from .builders import LFS_POINTER, hf_folder

TENSORS = {"model.norm.weight": np.ones(4, np.float32)}
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCAB = {token: index for index, token in enumerate([*BYTES, "hi", "<|endoftext|>"])}


def tokenizer() -> Tokenizer:
    result = Tokenizer(models.BPE(vocab=VOCAB, merges=[("h", "i")]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "m", TENSORS)


def write(folder: Path) -> Path:
    target = folder.parent / "out"
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.has_tokenizer()
        checkpoint.write_tokenizer(target)
    return target


def test_files_are_copied_and_stay_writable(folder: Path) -> None:
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "é"}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}\n")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    for file in folder.glob("*.*"):
        file.chmod(0o444)
    target = write(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (folder / name).read_bytes()
        assert (target / name).stat().st_mode & 0o200
    assert (target / "additional_chat_templates" / "rag.jinja").read_text() == "R"
    assert json.loads((target / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}


def test_a_bare_tokenizer_gets_its_companions(folder: Path) -> None:
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.json").write_text('{"chat_template": "old form"}')
    target = write(folder)
    assert (target / "chat_template.jinja").read_text() == "old form"
    assert json.loads((target / "generation_config.json").read_text()) == {}
    assert "tokenizer_class" in json.loads((target / "tokenizer_config.json").read_text())


def test_an_older_form_is_converted(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "vocab.json").write_text(json.dumps(VOCAB))
    (folder / "merges.txt").write_text("#version: 0.2\nh i\n")
    target = write(folder)
    converted = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert converted.encode("hi there").tokens[0] == "hi"
    assert converted.decode(converted.encode("hi, é!").ids) == "hi, é!"


def test_folders_without_a_tokenizer_say_so(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        assert not checkpoint.has_tokenizer()
        with pytest.raises(CheckpointError, match=r"no tokenizer: neither tokenizer\.json"):
            checkpoint.write_tokenizer(folder.parent / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "can't be loaded as a tokenizer"),
        (b"{", "not valid JSON"),
        (LFS_POINTER, "Git LFS pointer"),
    ],
)
def test_a_damaged_tokenizer_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CheckpointError, match=message) as caught,
    ):
        checkpoint.write_tokenizer(folder.parent / "out")
    assert str(folder / "tokenizer.json") in str(caught.value)


def test_a_tokenizer_that_cannot_be_converted_is_refused(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"\x00 not a model")
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CheckpointError, match=r"no tokenizer\.json, and transformers can't make"),
    ):
        checkpoint.write_tokenizer(folder.parent / "out")
