"""Files that a user names to be written are never ones that the same call reads."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bessemer.cli.line_file import LineFile
from bessemer.cli.outputs import check_output, loaded_inputs, model_inputs
from bessemer.errors import UsageError
from bessemer.runtime.model import Model
from tests.runtime.toy_text import write_model

from .conftest import Run


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(bessemer: Run, file: Path, *call: object) -> str:
    done = bessemer("run", *call, "--dump-logprobs", file)
    assert (done.code, done.out) == (2, ""), done.err
    assert f"--dump-logprobs {file}: it " in done.err
    return done.err


@pytest.mark.parametrize("name", ["weights.bin", "manifest.json", "../compiled/new.jsonl"])
def test_the_folder_of_a_compiled_model(bessemer: Run, compiled: Path, name: str) -> None:
    before = content(compiled)
    assert "the model's folder" in refused(bessemer, compiled / name, compiled, "-p", "x")
    assert content(compiled) == before


def test_a_link_to_a_file_of_the_model(bessemer: Run, compiled: Path, tmp_path: Path) -> None:
    before = content(compiled)
    (tmp_path / "soft").symlink_to(compiled / "weights.bin")
    os.link(compiled / "weights.bin", tmp_path / "hard")
    for name in ("soft", "hard"):
        refused(bessemer, tmp_path / name, compiled, "-p", "x")
    assert content(compiled) == before


def test_the_folder_of_a_checkpoint_and_the_cache(
    bessemer: Run, checkpoint: Path, cache_home: Path
) -> None:
    before = content(checkpoint)
    refused(bessemer, checkpoint / "model.safetensors", checkpoint, "-p", "x")
    assert content(checkpoint) == before
    assert bessemer("run", checkpoint, "-p", "x", "--max-tokens", 1).code == 0
    weights = next(cache_home.rglob("weights.bin"))
    before = content(cache_home)
    assert "cache of compiled" in refused(bessemer, weights, checkpoint, "-p", "x")
    assert content(cache_home) == before


def test_a_gguf_file_and_its_parts(bessemer: Run, tmp_path: Path) -> None:
    part, other = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    for file in (part, other):
        file.write_bytes(b"GGUF and so on")
    assert "it is the model" in refused(bessemer, part, part, "-p", "x")
    assert "beside the model" in refused(bessemer, other, part, "-p", "x")
    assert other.read_bytes() == part.read_bytes() == b"GGUF and so on"


def test_what_a_compiled_folder_was_made_from(bessemer: Run, tmp_path: Path) -> None:
    """Found when the model is loaded: the name on the command line doesn't tell."""
    source = tmp_path / "source.gguf"
    source.write_bytes(b"GGUF")
    model = write_model(tmp_path / "model", source={"kind": "gguf", "path": str(source)})
    assert "it is the model" in refused(bessemer, source, model, "-p", "x")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    model = write_model(tmp_path / "other", source={"kind": "hf", "path": str(folder)})
    assert "it is model.safetensors" in refused(
        bessemer, folder / "model.safetensors", model, "-p", "x"
    )
    assert (source.read_bytes(), (folder / "model.safetensors").read_bytes()) == (
        b"GGUF", b"weights",
    )  # fmt: skip
    check_output("--dump-logprobs", folder / "log.jsonl", loaded_inputs(Model.load(model)))


def test_the_prompt_and_the_directions(bessemer: Run, compiled: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello")
    assert "it is the file of the prompt" in refused(bessemer, file, compiled, "-f", file)
    steering = (compiled, "-p", "x", "--steering", file)
    assert "it is the file of directions" in refused(bessemer, file, *steering)
    assert file.read_text() == "hello"


def test_standard_input(compiled: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello")
    command = [sys.executable, "-m", "bessemer", "run", str(compiled), "--dump-logprobs", str(file)]
    with file.open() as stream:
        done = subprocess.run(command, stdin=stream, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "it is standard input" in done.stderr
    assert file.read_text() == "hello"


def test_saving_a_conversation(
    bessemer: Run, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(compiled)
    line = f"/save {compiled / 'manifest.json'}\n".encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line)))
    done = bessemer("chat", compiled)
    assert done.code == 1
    assert "it lies in the model's folder" in done.err
    assert content(compiled) == before


def test_devices_and_names_that_are_nothing_yet(tmp_path: Path) -> None:
    inputs = {"standard input": Path(os.devnull)}
    check_output("--dump-logprobs", Path(os.devnull), inputs)
    with pytest.raises(UsageError):
        check_output("--dump-logprobs", Path(__file__), {"it": Path(__file__)})
    check_output("--dump-logprobs", tmp_path / "log", model_inputs("owner/name"))


# -- when an old log goes --------------------------------------------------------------------------


@pytest.mark.parametrize("old", ["of an earlier run\n", None])
def test_a_prompt_that_is_refused_leaves_the_old_log(
    bessemer: Run, compiled: Path, tmp_path: Path, old: str | None
) -> None:
    file = tmp_path / "log.jsonl"
    if old is not None:
        file.write_text(old)
    done = bessemer("run", compiled, "-p", "x" * 1000, "--dump-logprobs", file)
    assert done.code == 1
    assert "the context holds" in done.err
    assert (file.read_text() if file.exists() else None) == old


def test_an_answer_without_tokens_empties_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with LineFile(path) as file:
        file.clear()
    assert path.read_bytes() == b""
