"""`bessemer run`: prompts, output, statistics, errors, signals, pipes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bessemer.cli.interrupt import NO_ANSWER
from bessemer.runtime.tokenizer import Tokenizer
from tests.processes import wait_for_library
from tests.runtime import toy
from tests.runtime.toy_text import favouring, write_model

from .conftest import Run

KEYS = {
    "text", "token_ids", "tokens", "prompt_tokens", "finish_reason", "interrupted", "load_s",
    "compile_s", "prefill_tokens_per_second", "decode_tokens_per_second", "time_to_first_token_s",
}  # fmt: skip


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes, terminal: bool = False) -> None:
    """Give `data` as standard input."""
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", stream)


def test_the_answer_and_nothing_else_goes_to_stdout(bessemer: Run, compiled: Path) -> None:
    done = bessemer("run", compiled, "-p", "hello", "--max-tokens", 5)
    assert (done.code, done.out) == (0, "aaaaa\n")
    assert "5 tokens" in done.err
    assert "(length)" in done.err
    assert len(done.err.splitlines()) == 1


def test_json(bessemer: Run, compiled: Path) -> None:
    done = bessemer("run", compiled, "-p", "hello", "--max-tokens", 5, "--json")
    assert set(done.json) == set(NO_ANSWER) == KEYS
    assert done.json["text"] == "aaaaa"
    assert done.json["tokens"] == 5
    assert done.json["token_ids"] == Tokenizer.load(compiled).encode("aaaaa")
    assert done.json["finish_reason"] == "length"
    assert done.json["interrupted"] is False
    assert done.json["compile_s"] == 0
    assert done.json["prompt_tokens"] == len("[user]hello[assistant]") + 2
    assert done.err == ""


def test_raw_skips_the_template(bessemer: Run, compiled: Path) -> None:
    done = bessemer("run", compiled, "-p", "hello", "--raw", "--max-tokens", 1, "--json")
    assert done.json["prompt_tokens"] == len("hello")
    with_system = bessemer(
        "run", compiled, "-p", "hello", "--system", "S", "--max-tokens", 1, "--json"
    )
    assert with_system.json["prompt_tokens"] == len("[system]S[user]hello[assistant]") + 3
    both = bessemer("run", compiled, "-p", "hello", "--raw", "--system", "S")
    assert both.code == 2


def test_prompts_from_files_and_pipes(
    bessemer: Run, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_bytes("héllo\n".encode())
    wanted = len("héllo".encode())
    options = ("--raw", "--max-tokens", 1, "--json")
    assert bessemer("run", compiled, "-f", tmp_path / "p.txt", *options).json[
        "prompt_tokens"
    ] == wanted  # fmt: skip
    feed(monkeypatch, "héllo\r\n".encode())
    assert bessemer("run", compiled, *options).json["prompt_tokens"] == wanted
    feed(monkeypatch, "héllo".encode())
    assert bessemer("run", compiled, "-f", "-", *options).json["prompt_tokens"] == wanted


@pytest.mark.parametrize("text", ["-dash", "--max-tokens", "quote\"'", "модель é\n\n", "-p"])
def test_any_prompt(bessemer: Run, compiled: Path, text: str) -> None:
    done = bessemer("run", compiled, "--raw", "-p", text, "--max-tokens", 1, "--json")
    assert done.json["prompt_tokens"] == len(text.encode())


@pytest.mark.parametrize("name", ["модель é b", 'it\'s "quoted"', "-dash"])
def test_l07_any_folder_name(
    bessemer: Run, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / name, favouring(a=1000))
    monkeypatch.chdir(tmp_path)
    assert bessemer("run", "-p", "x", "--max-tokens", 2, "--", name).out == "aa\n"


def test_sampling_options_arrive(bessemer: Run, compiled: Path) -> None:
    options = ("--temperature", 60, "--top-k", 2, "--seed", 5, "--max-tokens", 30)
    first = bessemer("run", compiled, "-p", "x", *options).out
    assert set(first.strip()) == {"a", "b"}
    assert bessemer("run", compiled, "-p", "x", *options).out == first
    stopped = bessemer("run", compiled, "-p", "x", "--stop", "zz", "--stop", "aaa")
    assert stopped.out == "\n"
    assert "(stop)" in stopped.err


def test_threads(bessemer: Run, compiled: Path) -> None:
    for count in (1, 3):
        assert bessemer(
            "run", compiled, "-p", "x", "--threads", count, "--max-tokens", 2
        ).out == "aa\n"  # fmt: skip
    assert bessemer("run", compiled, "-p", "x", "--threads", 0).code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "MODEL"),
        (["run", "{model}", "-p", "x", "--nonsense"], "unknown option --nonsense\nsee: "),
        (["run", "{model}", "-p", "x", "--top-k", "many"], "--top-k many: it must be a whole n"),
        (["run", "{model}", "-p", "x", "--max-tokens", "1.5"], "--max-tokens"),
        (["run", "{model}", "-p", "x", "--threads", "1.5"], "--threads"),
        (["run", "--", "{model}", "-p", "x"], "after -- nothing is an option"),
        (["run", "{model}", "-p", "x", "--top-p", "7"], "--top-p 7: it must be between 0"),
        (["run", "{model}", "-p", "x", "--max-tokens", "-1"], "--max-tokens -1: it must be"),
        (["run", "{model}", "-p", "x", "extra"], "extra"),
        (["run", "{model}", "-p"], "-p"),
        (["run", "{model}", "-p", "x", "-f", "y"], "either -p TEXT or -f FILE"),
        (["run", "{model}", "-f", "/no/such/file"], "can't be read"),
        (["run", "{model}", "-p", " "], "prompt is empty"),
        (["run", "{model}", "-f", ""], "-f '': it must be a path"),
        (["run", "", "-p", "x"], "MODEL '': it must be a folder, a file or a name"),
        (["run", "{model}", "-p", "a\udcff"], "the prompt is not UTF-8 text (byte 1)"),
        (["run", "{model}", "-p", "x", "--system", "\udcff"], "--system is not UTF-8 text"),
        (["run", "{model}", "-p", "x", "--stop", "é\udcff"], "--stop is not UTF-8 text (byte 2)"),
        (["run", "{model}", "-p", "x", "--weights", "f32"], "is compiled already"),
        (["run", "{model}", "-p", "x", "--kv", "f8"], "--kv f8: choose one of f32, f16"),
        (["run", "{model}", "-p", "x", "--max-token", "5"], "did you mean --max-tokens?"),
        (
            ["run", "{model}", "-p", "x", "--max-tokens"],
            "--max-tokens needs a value: a whole number",
        ),
        (["run", "{model}", "-p", "x", "--json=x"], "--json=x: --json takes no value"),
        (["run", "{model}", "-p", "x", "--min_p", "2"], "--min_p 2: it must be between 0 and 1"),
        (["run", "{model}", "-p", "x", "--diagnose", "all"], "all: it must be first-token"),
        (["run", "{model}", "-p", "x", "--file=a", "-p", "b"], "-p is given twice"),
        (["run", "{model}", "-p", "two", "words"], "unexpected words: run takes MODEL and options"),
        (["rnu", "{model}"], "unknown verb rnu; did you mean run?"),
        (["--json"], "unknown option --json; begin with a verb"),
        (["nonsense"], "unknown verb nonsense; the verbs are compile, run, "),
    ],
)
def test_wrong_calls_exit_2(
    bessemer: Run, compiled: Path, arguments: list[str], message: str
) -> None:
    done = bessemer(*[a.format(model=compiled) for a in arguments])
    assert done.code == 2
    assert done.out == ""
    assert message in done.err
    assert done.err.startswith("bessemer: error: ")
    assert "Traceback" not in done.err
    verb = "run " if arguments[0] == "run" else ""
    assert done.err.splitlines()[1:] == [f"see: bessemer {verb}--help"]


def test_errors_exit_1(bessemer: Run, compiled: Path, tmp_path: Path) -> None:
    done = bessemer("run", tmp_path / "nothing.gguf", "-p", "x")
    assert (done.code, done.out) == (1, "")
    long = bessemer("run", compiled, "-p", "x" * 300)
    assert long.code == 1
    assert "holds 256" in long.err
    (compiled / "model.so").unlink()  # not emptied: this process has it mapped
    (compiled / "model.so").write_bytes(b"")
    damaged = bessemer("run", compiled, "-p", "x")
    assert damaged.code == 1
    assert "model.so has 0 bytes" in damaged.err


def test_no_prompt_at_a_terminal(
    bessemer: Run, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"", terminal=True)
    done = bessemer("run", compiled)
    assert done.code == 2
    assert "give -p TEXT, -f FILE" in done.err


def test_a_prompt_that_is_no_text(
    bessemer: Run, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"ab\xff")
    done = bessemer("run", compiled)
    assert done.code == 2
    assert "not UTF-8 text (byte 2)" in done.err


def test_t03_a_lone_byte(bessemer: Run, tmp_path: Path) -> None:
    # Every token is the byte 0xA1, which is no character by itself.
    bias = favouring()
    bias[0xA1] = 1000
    model = write_model(tmp_path / "lone", bias)
    done = bessemer("run", model, "-p", "x", "--raw", "--max-tokens", 1)
    assert done.out == "\ufffd\n"
    assert bessemer(
        "run", model, "-p", "x", "--raw", "--max-tokens", 1, "--json"
    ).json["text"] == "\ufffd"  # fmt: skip


# -- compiling first ------------------------------------------------------------------------------


def test_compiled_once_and_found_again(
    bessemer: Run, checkpoint: Path, compilations: Callable[[], int], cache_home: Path
) -> None:
    first = bessemer("run", checkpoint, "-p", "x", "--max-tokens", 2, "--json")
    assert first.json["text"] == "aa"
    assert first.json["compile_s"] == 1.5
    assert "reading the model" in first.err
    second = bessemer("run", checkpoint, "-p", "x", "--max-tokens", 2, "--json")
    assert second.json["text"] == "aa"
    assert second.json["compile_s"] == 0
    assert second.err == ""
    assert compilations() == 1
    bessemer("run", checkpoint, "-p", "x", "--max-tokens", 2, "--weights", "f32")
    assert compilations() == 2
    assert len(list((cache_home / "models").iterdir())) == 2


def test_c15_a_changed_weight_is_compiled_again(
    bessemer: Run, checkpoint: Path, compilations: Callable[[], int]
) -> None:
    bessemer("run", checkpoint, "-p", "x", "--max-tokens", 1)
    weights = checkpoint / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    bessemer("run", checkpoint, "-p", "x", "--max-tokens", 1)
    assert compilations() == 2


def test_l10_a_cache_that_cannot_be_written(
    bessemer: Run, checkpoint: Path, cache_home: Path
) -> None:
    cache_home.parent.mkdir(parents=True)
    cache_home.write_text("in the way")
    done = bessemer("run", checkpoint, "-p", "x")
    assert done.code == 1
    assert "XDG_CACHE_HOME" in done.err


# -- processes ------------------------------------------------------------------------------------


def start(*arguments: object, **options: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "bessemer", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    # The prompt's own logits say `a`; then the toy decodes its slow token for ever.
    bias = favouring(a=500)
    model = write_model(tmp_path / "model", bias, capacity=65536)
    process = start("run", model, "-p", "x", "--raw", "--max-tokens", 60000)
    assert process.stdout is not None
    assert process.stdout.read(5) == b"aaaaa"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out.strip(b"a") == b"\n"
    assert b"(cancelled)" in err
    assert b"Traceback" not in err


def test_ctrl_c_inside_a_long_step(tmp_path: Path) -> None:
    bias = favouring()
    bias[toy.SLOW] = 1000  # the first token of the answer takes 20 s to feed
    model = write_model(tmp_path / "model", bias)
    process = start("run", model, "-p", "x", "--raw", "--json")
    assert process.stdout is not None
    wait_for_library(process)
    time.sleep(1.0)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert time.monotonic() - began < 15
    assert process.returncode == 130
    answer = json.loads(out)
    assert set(answer) == KEYS
    assert answer["interrupted"] is True
    assert answer["finish_reason"] == "cancelled"


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", favouring(a=500), capacity=65536)
    process = start("run", model, "-p", "x", "--raw", "--max-tokens", 60000)
    assert process.stdout is not None
    process.stdout.read(3)
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(30) == 141
    assert b"Traceback" not in err
    assert b"Exception" not in err


def test_an_ascii_terminal(tmp_path: Path) -> None:
    bias = favouring()
    bias[0xA1] = 1000
    model = write_model(tmp_path / "model", bias)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = start("run", model, "-p", "x", "--raw", "--max-tokens", 1, env=environment)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, b"?\n"), err


def test_running_needs_neither_torch_nor_mlir(compiled: Path) -> None:
    script = f"""
import sys
from bessemer.cli import main
code = main(["run", {str(compiled)!r}, "-p", "x", "--max-tokens", "2"])
heavy = {{"torch", "transformers", "mlir", "llvmlite", "safetensors", "gguf", "rich"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_finding_in_the_cache_needs_neither(
    bessemer: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same compiler for both processes, whoever edits its sources meanwhile.
    monkeypatch.setattr("bessemer.artifact.cache.compiler_version", lambda: "this one")
    bessemer("run", checkpoint, "-p", "x", "--max-tokens", 2)
    script = f"""
import sys
from bessemer import api
from bessemer.artifact import cache
from bessemer.cli import main
cache.compiler_version = lambda: "this one"
api.compile_model = None
code = main(["run", {str(checkpoint)!r}, "-p", "x", "--max-tokens", "2"])
heavy = {{"torch", "transformers", "mlir", "llvmlite"}} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"aa\n"), done.stderr
