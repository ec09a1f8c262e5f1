"""`bessemer run` with --dump-logprobs and --dump-tokens."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.cli.line_file import LineFile
from bessemer.runtime.model import Model
from tests.runtime.toy_text import favouring, write_model

from .conftest import Run


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


# -- log-probabilities ----------------------------------------------------------------------------


def test_a_line_for_each_token(bessemer: Run, compiled: Path, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text("of an earlier run\n")
    options = ("--max-tokens", 3, "--dump-logprobs", file, "--top-logprobs", 2)
    done = bessemer("run", compiled, "-p", "x", *options)
    assert (done.code, done.out) == (0, "aaa\n")
    session = Model.load(compiled).session()
    logits = session.prefill(Model.load(compiled).encode_chat([{"role": "user", "content": "x"}]))
    wanted = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    found = lines(file)
    assert [(f["id"], f["text"]) for f in found] == [(ord("a"), "a")] * 3
    first = found[0]
    assert first["logprob"] == pytest.approx(float(wanted[ord("a")]), abs=1e-9)
    assert [t["text"] for t in first["top"]] == ["a", "b"]
    assert first["top"][1]["logprob"] == pytest.approx(float(wanted[ord("b")]), abs=1e-9)


def test_five_likeliest_by_default_and_none_by_wish(
    bessemer: Run, compiled: Path, tmp_path: Path
) -> None:
    file = tmp_path / "log.jsonl"
    for options, count in ((), 5), (("--top-logprobs", 0), 0), (("--top-logprobs", 10**6), 297):
        done = bessemer(
            "run", compiled, "-p", "x", "--json", "--max-tokens", 1, "--dump-logprobs", file,
            *options,
        )  # fmt: skip
        assert done.json["tokens"] == 1
        # three of the toy's 300 logits are so low that their probability is 0
        assert len(lines(file)[0]["top"]) >= count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top-logprobs", "3"], "needs --dump-logprobs"),
        (["--dump-logprobs", "{tmp}/x", "--dump-tokens"], "different runs"),
        (["--dump-logprobs", "{tmp}/x", "--diagnose", "first-token"], "different runs"),
        (["--dump-logprobs", "{tmp}/x", "--top-logprobs", "-1"], "--top-logprobs -1: it must"),
        (["--dump-logprobs", "{tmp}/no/such/folder"], "can't be written"),
        (["--diagnose", "everything"], "first-token"),
        (["--diagnose", "first-token", "--steering", "{tmp}/no"], "no: it can't be read"),
    ],
)
def test_wrong_calls(
    bessemer: Run, compiled: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    done = bessemer("run", compiled, "-p", "x", *[o.format(tmp=tmp_path) for o in options])
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_ctrl_c_leaves_whole_lines(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", favouring(a=500), capacity=65536)
    file = tmp_path / "log.jsonl"
    command = [
        sys.executable, "-m", "bessemer", "run", str(model), "-p", "x", "--raw", "--max-tokens",
        "60000", "--dump-logprobs", str(file), "--top-logprobs", "3",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert len(lines(file)) >= 5


def test_a_line_that_does_not_fit_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    write = os.write
    with LineFile(path) as file:
        file.write({"a": 1})

        def short(handle: int, data: Any) -> int:  # the disk is full after three bytes
            if len(data) < 10:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(handle, bytes(data)[:3])

        monkeypatch.setattr("os.write", short)
        with pytest.raises(OSError, match="space") as error:
            file.write({"text": "é" * 3})
        assert error.value.filename == str(path)
        monkeypatch.undo()
        file.write({"b": 2})
    assert lines(path) == [{"a": 1}, {"b": 2}]


# -- tokens ---------------------------------------------------------------------------------------


def test_the_prompt_after_the_template(bessemer: Run, compiled: Path) -> None:
    done = bessemer("run", compiled, "-p", "hé", "--system", "S", "--dump-tokens", "--json")
    model = Model.load(compiled)
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "hé"}
    ids = model.encode_chat([system, user])
    assert [t["id"] for t in done.json["tokens"]] == ids
    assert done.json["count"] == len(ids)
    texts = [t["text"] for t in done.json["tokens"]]
    assert texts[0] == "<|bos|>"
    assert "".join(t for t in texts if t != "\ufffd").startswith("<|bos|>[system]S<|end|>[user]h")
    assert texts.count("\ufffd") == 2  # the bytes of é
    assert done.code == 0


def test_a_line_for_each_token_of_the_prompt(bessemer: Run, compiled: Path) -> None:
    done = bessemer("run", compiled, "-p", 'a"\n', "--raw", "--dump-tokens")
    assert done.out == '     97  "a"\n     34  "\\""\n     10  "\\n"\n'
    assert "3 prompt tokens" in done.err


def test_dumping_tokens_compiles_nothing(bessemer: Run, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from tests.runtime import tiny_tokenizers

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    save_file({}, folder / "model.safetensors")
    tiny_tokenizers.write(folder, tiny_tokenizers.byte_level())
    done = bessemer("run", folder, "-p", "ab", "--raw", "--dump-tokens", "--json")
    assert [t["id"] for t in done.json["tokens"]] == [97, 98]
    (folder / "tokenizer.json").unlink()
    done = bessemer("run", folder, "-p", "ab", "--raw", "--dump-tokens")
    assert done.code == 1
    assert "without a tokenizer" in done.err
