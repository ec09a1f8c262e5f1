"""`bessemer chat`, over pipes and a pseudo-terminal."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime import toy
from tests.runtime.toy_text import favouring, write_model

from .conftest import Outcome, Run


@pytest.fixture
def talk(bessemer: Run, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A conversation whose lines come through a pipe."""

    def run(*lines: str, options: tuple = ("--max-tokens", 3), model: Path = compiled) -> Outcome:
        text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return bessemer("chat", model, *options)

    return run


def test_answers_line_by_line(talk: Run) -> None:
    done = talk("hello", "", "more")
    assert (done.code, done.out) == (0, "aaa\naaa\n")
    assert "cut off" in done.err
    assert ">" not in done.out


def test_without_a_last_line_end(bessemer: Run, compiled: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    assert bessemer("chat", compiled, "--max-tokens", 2).out == "aa\n"


def test_quit_leaves_at_once(talk: Run) -> None:
    assert talk("/quit", "hello").out == ""
    assert talk("hello", "/exit", "hello").out == "aaa\n"


def test_help_and_unknown_commands(talk: Run) -> None:
    done = talk("/help", "/nonsense", "/usr/bin is a folder")
    for command in ("/help", "/system", "/reset", "/stats", "/save", "/quit"):
        assert command in done.err
    assert "no command /nonsense" in done.err
    assert done.out == "aaa\n"


def test_stats_show_a_live_cache(talk: Run) -> None:
    done = talk("hello", "/stats", "/reset", "/stats")
    prompt = len("[user]hello[assistant]") + 2
    # The last sampled token isn't fed.
    assert f"{prompt + 2} of 256 tokens" in done.err
    assert "1 answers, 3 tokens" in done.err
    assert "0 of 256 tokens" in done.err


def test_system(talk: Run, tmp_path: Path) -> None:
    file = tmp_path / "saved.json"
    done = talk("hello", "/system be brief", "/system", "hi", f"/save {file}")
    assert "be brief" in done.err
    saved = json.loads(file.read_text())
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]
    assert saved["messages"][-1]["content"] == "aaa"
    assert saved["model"] == "toy"


def test_system_option(talk: Run, tmp_path: Path) -> None:
    file = tmp_path / "saved file.json"
    talk(f"/save {file}", options=("--system", "-be brief"))
    assert json.loads(file.read_text())["messages"] == [{"role": "system", "content": "-be brief"}]


def test_saving_where_it_cannot_be(talk: Run, tmp_path: Path) -> None:
    done = talk("/save", f"/save {tmp_path}/no/folder", "hello")
    assert "give a file" in done.err
    assert "error" in done.err
    assert done.out == "aaa\n"


def test_saving_on_a_full_disk_keeps_what_was_there(
    talk: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "conversation.json"
    talk(f"/save {file}")
    before = file.read_text()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    done = talk("hello", f"/save {file}")
    assert f"{file} can't be written: No space left" in done.err
    assert file.read_text() == before
    assert list(tmp_path.glob(".*")) == []


def test_saving_through_a_link_and_into_a_folder(talk: Run, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("kept.json")
    talk("hello", f"/save {tmp_path}/link")
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "kept.json").read_text())["messages"][-1]["content"] == "aaa"
    assert f"{tmp_path} can't be written: Is a directory" in talk(f"/save {tmp_path}").err


def test_k03_a_turn_that_is_too_long(talk: Run) -> None:
    done = talk("x" * 300, "hello")
    assert done.code == 1  # told to a script, which sees no more than that
    assert "holds 256" in done.err
    assert done.out == "aaa\n"


def test_a_model_without_a_template(talk: Run, tmp_path: Path) -> None:
    from tests.runtime import tiny_tokenizers as tiny

    model = write_model(
        tmp_path / "plain", write_tokenizer=lambda into: tiny.write(into, tiny.byte_level())
    )
    done = talk("hello", model=model)
    assert (done.code, done.out) == (1, "")
    assert "template" in done.err


def test_lines_that_are_no_text_are_told_and_passed_over(
    bessemer: Run, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"\xef\xbb\xbfhello\nb\xffd\nmore\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    done = bessemer("chat", compiled, "--max-tokens", 2)
    assert (done.code, done.out) == (1, "aa\naa\n")
    assert "line 2 of standard input is not UTF-8 text (byte 1)" in done.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device is Linux's own")
def test_an_answer_that_cannot_be_written_ends_with_an_error(compiled: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bessemer", "chat", str(compiled), "--max-tokens", "2"],
            input="hello\nmore\n", stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("No space left on device") == 1
    assert "Traceback" not in done.stderr


def test_bad_options(talk: Run) -> None:
    done = talk("hello", options=("--temperature", "-1"))
    assert "temperature" in done.err
    assert done.out == ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a pseudo-terminal")
def test_ctrl_c_at_a_terminal_stops_only_the_answer(tmp_path: Path) -> None:
    import pty

    bias = favouring(a=500)
    bias[toy.SLOW] = 1000  # the answer's first token takes 20 s to feed
    model = write_model(tmp_path / "model", bias)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "bessemer", "chat", str(model)],
        stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(slave)
    assert process.stdout is not None
    assert process.stderr is not None
    began = time.monotonic()
    assert b"context" in process.stderr.readline()
    os.write(master, b"hello\n")
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == b"(stopped)\n"
    os.write(master, b"/stats\n")
    assert b"tokens of context" in process.stderr.readline()
    os.write(master, b"/quit\n")
    process.communicate(timeout=30)
    os.close(master)
    assert process.returncode == 0
    assert time.monotonic() - began < 18
