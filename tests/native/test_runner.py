"""The standalone runner: the tokens and the text of the Python runtime, and its ways to fail."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bessemer
from bessemer.backend import link
from bessemer.backend.target import Target
from bessemer.cli import main
from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from bessemer.errors import UnsupportedError, UsageError
from bessemer.runtime.model import Model
from bessemer.verify.binaries import ELF_MACHINES
from tests.behaviours.models import save_folder, text_model
from tests.native.tokenizer_zoo import ZOO
from tests.runtime.tiny_tokenizers import wrap, write

CONTEXT = 8192
F_SETPIPE_SZ = 1031  # fcntl.F_SETPIPE_SZ of Python 3.10 on Linux
PIPE_BYTES = 4096
PROMPTS = (
    "hello hello",
    " Ünïcödé 你好 😀\n\tx = 1\r\n",
    "control <|end|> text <|bos|> inside",
    "11111",
)
SAMPLED = {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repeat_penalty": 1.1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = text_model(max_position_embeddings=CONTEXT)
    return save_folder(tmp_path_factory.mktemp("runner") / "checkpoint", made)


@pytest.fixture(scope="module")
def folder(checkpoint: Path) -> Path:
    options = CompileOptions("f32", "f32", CONTEXT, chunk=64, runner=True)
    return compile_model(str(checkpoint), options, checkpoint.parent / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model.load(folder, threads=1)


def run(folder: Path, *words: object, **options: Any) -> subprocess.CompletedProcess:
    """Run the program with one thread; `--json` and text come as bytes."""
    command = [str(folder / "run"), "--threads", "1", *map(str, words)]
    return subprocess.run(command, capture_output=True, timeout=60, **options)


def report(folder: Path, *words: object, **options: Any) -> dict[str, Any]:
    done = run(folder, *words, "--json", **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def words_of(options: dict[str, Any]) -> list[object]:
    return [
        word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)
    ]


@pytest.mark.parametrize(
    "options", [{}, {**SAMPLED, "seed": 7}, {"temperature": 0.7, "seed": 2**70}]
)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_and_text(model: Model, folder: Path, prompt: str, options: dict[str, Any]) -> None:
    limit = 60
    expected = model.stream_chat(
        [{"role": "user", "content": prompt}], max_tokens=limit, **options
    ).complete()
    got = report(folder, "-p", prompt, "--max-tokens", limit, *words_of(options))
    assert tuple(got["token_ids"]) == expected.tokens
    assert got["text"] == expected.text
    assert got["finish_reason"] == expected.finish_reason
    assert (got["tokens"], got["prompt_tokens"]) == (len(expected.tokens), expected.prompt_tokens)


def test_prompt_forms(model: Model, folder: Path, tmp_path: Path) -> None:
    """-p, a file, standard input, --raw and --system give the ids that Python gives."""

    def ids(*words: object, **options: Any) -> list[int]:
        return [int(word) for word in run(folder, *words, "--tokenize", **options).stdout.split()]

    asked = [{"role": "user", "content": "hi there"}]
    told = [{"role": "system", "content": "be kind"}, *asked]
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfhi there\r\n")
    assert ids("-p", "hi there") == model.encode_chat(asked)
    assert ids("--prompt=hi there") == model.encode_chat(asked)
    assert ids("-f", path) == model.encode_chat(asked)
    assert ids("-f", "-", input=b"hi there\n") == model.encode_chat(asked)
    assert ids(input=b"hi there") == model.encode_chat(asked)
    assert ids("-p", "hi there", "--system", "be kind") == model.encode_chat(told)
    for system in ("", " \n"):
        told[0]["content"] = system
        assert ids("-p", "hi there", "--system", system) == model.encode_chat(told)
    assert ids("-p", "hi there", "--raw") == model.tokenizer.encode("hi there")
    as_json = json.loads(run(folder, "-p", "hi there", "--tokenize", "--json").stdout)
    wanted = model.encode_chat(asked)
    assert as_json == {"count": len(wanted), "token_ids": wanted}


def test_output(model: Model, folder: Path) -> None:
    """The text as it comes, a line end, and statistics on standard error."""
    expected = model.stream("abc", max_tokens=30).complete()
    done = run(folder, "-p", "abc", "--raw", "--max-tokens", 30)
    assert done.stdout.decode() == expected.text + "\n"
    assert done.stderr.startswith(b"run: 3 prompt tokens at ")
    assert done.stderr.endswith(b"(length)\n")


def test_ends(model: Model, folder: Path) -> None:
    """Stop strings, an EOS, the most tokens, and the end of the context."""
    text = model.stream("abc", max_tokens=30).complete().text
    stop = text[3:5]
    expected = model.stream("abc", max_tokens=30, stop=[stop, "never"]).complete()
    got = report(
        folder, "-p", "abc", "--raw", "--stop", stop, "--stop", "never", "--max-tokens", 30
    )
    assert (got["text"], got["finish_reason"]) == (expected.text, "stop")
    assert report(folder, "-p", "abc", "--raw", "--max-tokens", 0)["token_ids"] == []
    long = "x" * (CONTEXT - 3)
    got = report(folder, "-f", "-", "--raw", "--max-tokens", 30, input=long.encode())
    assert (got["tokens"], got["finish_reason"]) == (4, "length")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nonsense"], "unknown option --nonsense"),
        (["hello"], "'hello' stands alone: the prompt comes after -p"),
        (["-p", "x", "--raw=1"], "--raw takes no value"),
        (["-p", "x", "--model", ""], "the name after --model is empty"),
        (["-f", ""], "the name after -f is empty"),
        (["-p"], "-p needs a value"),
        (["-p", "x", "-f", "y"], "give either"),
        (["-p", "x", "--raw", "--system", "y"], "--system needs the chat template"),
        (["-p", " \n"], "the prompt is empty"),
        (["-p", b"a\xff"], "the prompt is not UTF-8 text (byte 1)"),
        (["-f", "/nowhere"], "/nowhere can't be read"),
        (["-p", "x", "--temperature", "hot"], "it must be a number"),
        (["-p", "x", "--temperature", "-1"], "temperature is -1"),
        (["-p", "x", "--top-p", "2"], "top_p is 2"),
        (["-p", "x", "--max-tokens", "-1"], "--max-tokens -1"),
        (["-p", "x", "--max-tokens", "1e3"], "--max-tokens 1e3"),
        (["-p", "x", "--seed", "-1"], "--seed -1"),
        (["-p", "x", "--stop", ""], "a stop string is empty"),
        (["-p", "x", "--threads", "100000"], "threads"),
        (["-p", "x", "--max-tokens", "99999999999999999999"], f"it must be at most {2**63 - 1}"),
        (["-p", "x", "--top-k", str(2**63)], f"--top-k {2**63}: it must be at most {2**63 - 1}"),
        (["-p", "x", "--top-k", f"-{2**70}"], "it must be a whole number of at least -1"),
        (["-p", "x", "--threads", str(2**64)], f"--threads {2**64}: it must be at most 1024"),
    ],
)
def test_wrong_calls(folder: Path, words: list[Any], message: str) -> None:
    done = subprocess.run([folder / "run", *words], capture_output=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(b"run: error: ")
    assert message.encode() in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert done.stdout == b""


def failure(done: subprocess.CompletedProcess) -> str:
    """The line that says what went wrong; the code is 1, and nothing was shown."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == b""
    line = done.stderr.decode()
    assert line.startswith("run: error: ")
    assert line.count("\n") == 1
    return line


def test_version(folder: Path) -> None:
    done = run(folder, "--version")
    assert (done.returncode, done.stdout.decode()) == (0, f"{bessemer.__version__}\n")
    assert b"  --version " in run(folder, "--help").stdout


def test_too_long_prompt(folder: Path) -> None:
    line = failure(run(folder, "--raw", input=b"x" * (CONTEXT + 5)))
    assert f"the prompt has {CONTEXT + 5} tokens, and the context holds {CONTEXT}" in line


def changed(folder: Path, to: Path, change: Callable[[Path], object]) -> Path:
    """A copy of what the program needs, with something wrong."""
    to.mkdir()
    for name in ("run", "tokenizer.bin", "weights.bin"):
        shutil.copy2(folder / name, to / name)
    change(to)
    return to


def test_wrong_files(folder: Path, tmp_path: Path) -> None:
    from bessemer.artifact.text.build import build_tokenizer_file

    other = build_tokenizer_file(wrap(ZOO["unknown"]())).content

    def cut(name: str, size: int) -> Callable[[Path], object]:
        return lambda to: os.truncate(to / name, (to / name).stat().st_size - size)

    def pipe(path: Path) -> object:
        path.unlink()
        return os.mkfifo(path)

    def swapped(to: Path) -> object:
        return (to / "tokenizer.bin").write_bytes(other)

    cases: list[tuple[str, Callable[[Path], object]]] = [
        ("tokenizer.bin belongs to another model", swapped),
        ("it is cut off", cut("tokenizer.bin", 8)),
        ("is no tokenizer file", lambda to: os.truncate(to / "tokenizer.bin", 0)),
        ("tokenizer.bin can't be read", lambda to: (to / "tokenizer.bin").unlink()),
        ("weights.bin", cut("weights.bin", 4096)),
        ("weights.bin", lambda to: (to / "weights.bin").unlink()),
        ("tokenizer.bin is no tokenizer file", lambda to: pipe(to / "tokenizer.bin")),
        ("weights.bin is no file", lambda to: pipe(to / "weights.bin")),
    ]
    for index, (message, change) in enumerate(cases):
        broken = changed(folder, tmp_path / str(index), change)
        assert message in failure(run(broken, "-p", "x"))
    elsewhere = changed(folder, tmp_path / "elsewhere", lambda to: (to / "weights.bin").unlink())
    assert report(elsewhere, "--model", folder, "-p", "x", "--max-tokens", 3)["tokens"] == 3


def test_moved_program(folder: Path, tmp_path: Path) -> None:
    """It finds its files through a link, and from another folder."""
    link = tmp_path / "answer"
    link.symlink_to(folder / "run")
    done = subprocess.run([link, "-p", "x", "--max-tokens", "2"], capture_output=True, cwd="/")
    assert done.returncode == 0, done.stderr


def limit_to(mebibytes: int) -> Callable[[], None]:
    """Sets how much address space a process may have."""
    size = mebibytes << 20
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size))


def test_no_memory(folder: Path) -> None:
    """Less and less address space: the first program that can't go on says so."""
    text = "x" * 600_000
    for size in range(32, 6, -2):
        limit = limit_to(size)
        done = run(folder, "--raw", "--tokenize", input=text.encode(), preexec_fn=limit)
        if done.returncode != 0:
            break
    assert "no memory for the text" in failure(done)
    for size in range(12, 4, -1):
        done = run(folder, "-p", "x", "--max-tokens", 1, preexec_fn=limit_to(size))
        if done.returncode != 0:
            break
    assert "memory" in failure(done)


def test_outputs_that_fail(folder: Path) -> None:
    words = f"'{folder}/run' --threads 1 -p x --raw --max-tokens 3000"
    closed = subprocess.run(["sh", "-c", f"{words} >&-"], capture_output=True)
    assert "standard output is closed" in failure(closed)
    full = subprocess.run(["sh", "-c", f"{words} > /dev/full"], capture_output=True)
    assert "the answer can't be written: No space left" in failure(full)
    piped = subprocess.run(
        ["sh", "-c", f"({words}; echo $? >&2) | head -c 1"], capture_output=True, timeout=60
    )
    assert piped.stderr == b"141\n"


def start_into_a_small_pipe(folder: Path) -> subprocess.Popen[bytes]:
    """A long answer, which waits for a reader: the program can't be done before a signal."""
    command = [str(folder / "run"), "--threads", "1", "-p", "x", "--raw", "--max-tokens", "8000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    fcntl.fcntl(process.stdout, F_SETPIPE_SZ, PIPE_BYTES)
    return process


def test_interrupt(folder: Path) -> None:
    """What is there is shown, and the code says why it is not more."""
    process = start_into_a_small_pipe(folder)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, words = process.communicate(timeout=60)
    assert process.returncode == 130, words
    assert (first + rest).endswith(b"\n")
    assert words.endswith(b"(cancelled)\n")


def test_a_second_interrupt(folder: Path) -> None:
    """It ends a program that can't say more, since nobody reads what it has said."""
    process = start_into_a_small_pipe(folder)
    assert process.stdout is not None
    waiting, end = 0, time.monotonic() + 60
    while waiting < PIPE_BYTES - 200:
        assert time.monotonic() < end
        time.sleep(0.01)
        found = fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4))
        waiting = int.from_bytes(found, sys.byteorder)
    time.sleep(0.1)  # for the last token before it is full
    for code in (None, -signal.SIGINT):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.3 if code is None else 60)
        assert process.returncode == code
    process.communicate()


def test_what_it_needs(folder: Path) -> None:
    """No library but libc, libm and libpthread, and the size that a program may have."""
    listing = subprocess.run(["ldd", folder / "run"], capture_output=True, text=True).stdout
    names = {line.split()[0].split("/")[-1].split(".")[0] for line in listing.splitlines()}
    assert {name for name in names if name.startswith("lib")} <= {"libc", "libm", "libpthread"}
    assert (folder / "run").stat().st_size < 1 << 20


def test_manifest_lists_it(folder: Path) -> None:
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert {"run", "tokenizer.bin"} <= set(files)


def test_refusals(checkpoint: Path, tmp_path: Path) -> None:
    """What can't be is said before the work."""
    with pytest.raises(UsageError, match="give --runner, too"):
        CompileOptions(static=True)
    with pytest.raises(UsageError, match="leave out --runner"):
        CompileOptions(runner=True, layout="buddy")
    options = CompileOptions("f32", "f32", 64, runner=True)
    with pytest.raises(UnsupportedError, match="comes without a tokenizer"):
        compile_model(text_model(), options, tmp_path / "out")
    broken = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, broken)
    backend = ZOO["gpt2"]()
    state = json.loads(backend.to_str())
    state["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": r"(\w)\1"},
        "behavior": "Isolated",
        "invert": False,
    }
    write(broken, type(backend).from_str(json.dumps(state)))
    with pytest.raises(UnsupportedError, match=r"\\1.*Leave out --runner"):
        compile_model(str(broken), options, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command_line(checkpoint: Path, tmp_path: Path) -> None:
    """`bessemer compile --static` without --runner is a wrong call."""
    assert main(["compile", str(checkpoint), "-o", str(tmp_path / "x"), "--static"]) == 2


def musl_is_built() -> bool:
    """Whether zig has this processor's musl in its cache."""
    cache = Path(link._environment()["ZIG_GLOBAL_CACHE_DIR"])
    machine = next(number for number, name in ELF_MACHINES.items() if name == Target.native().arch)
    for archive in cache.glob("o/*/libc.a"):
        with archive.open("rb") as stream:
            _, found, header = stream.read(1 << 20).partition(b"\x7fELF")
        if found and int.from_bytes(header[14:16], "little") == machine:
            return True
    return False


def use_static_libc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Musl, as a user gets it, where zig has built it or BESSEMER_TEST_STATIC is set; else the
    static library of this system. Building musl is 1300 files: 47 seconds of processor time, once
    on a machine.
    """
    if os.environ.get("BESSEMER_TEST_STATIC") or musl_is_built():
        monkeypatch.delenv("CC", raising=False)
        return
    compiler = shutil.which("cc") or shutil.which("gcc")
    archive = compiler and subprocess.run(
        [compiler, "-print-file-name=libc.a"], capture_output=True, text=True
    )
    if not archive or not Path(archive.stdout.strip()).is_absolute():
        pytest.skip("neither zig's musl is built here (BESSEMER_TEST_STATIC=1) nor is a libc.a")
    assert compiler is not None
    monkeypatch.setenv("CC", compiler)


def test_static_program(
    checkpoint: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_static_libc(monkeypatch)
    options = CompileOptions("f32", "f32", CONTEXT, chunk=64, runner=True, static=True)
    static = compile_model(str(checkpoint), options, tmp_path / "static")
    listing = subprocess.run(["ldd", static / "run"], capture_output=True, text=True)
    assert "not a dynamic executable" in listing.stdout + listing.stderr
    words = ["-p", "hello", "--max-tokens", 40, *words_of({**SAMPLED, "seed": 3})]
    assert report(static, *words)["token_ids"] == report(folder, *words)["token_ids"]
