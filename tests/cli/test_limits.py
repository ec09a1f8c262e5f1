"""Outputs that can't be written, and numbers that no machine has."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bessemer.cli import command_line
from bessemer.errors import UsageError
from bessemer.runtime.cpu import MOST_THREADS, default_threads
from bessemer.runtime.engine import Engine

from .conftest import Run

ON_LINUX = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device is Linux's own")


@ON_LINUX
def test_a_full_disk_behind_stdout_is_an_error_without_a_traceback() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bessemer", "env"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert "standard output can't be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_closed_streams_are_no_traceback() -> None:
    """Standard output is needed; input and errors are as empty ones."""
    done = {
        closed: subprocess.run(
            ["sh", "-c", f'exec "$0" -m bessemer env --json {closed}', sys.executable],
            capture_output=True, text=True, timeout=60,
        )
        for closed in ("<&-", ">&-", "2>&-")
    }  # fmt: skip
    assert [d.returncode for d in done.values()] == [0, 1, 0]
    assert "standard output is closed" in done[">&-"].stderr
    assert done["<&-"].stdout == done["2>&-"].stdout != ""
    assert not any("Traceback" in d.stderr for d in done.values())


@ON_LINUX
def test_errors_that_nobody_can_read_keep_their_exit_code() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "bessemer", "run"]
        assert subprocess.run(command, stderr=full, timeout=60).returncode == 2


def test_a_reader_of_a_help_that_goes_away() -> None:
    command = [sys.executable, "-m", "bessemer", "run", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("columns", ["0", "1", "20", "many"])
def test_terminals_of_any_width(
    bessemer: Run, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    done = bessemer("run", "--help")
    assert done.code == 0
    assert "--json" in done.out


@ON_LINUX
def test_a_prompt_without_end(
    bessemer: Run, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bessemer.cli.options.MOST_BYTES", 1 << 20)
    monkeypatch.setattr("sys.stdin", open("/dev/zero"))  # noqa: SIM115
    for words, where in (((), "standard input"), (("-f", "/dev/zero"), "/dev/zero")):
        done = bessemer("run", compiled, *words)
        assert done.code == 2
        assert f"{where} has more than 1 MiB" in done.err


@pytest.mark.parametrize("threads", [0, -1, MOST_THREADS + 1, 10**20])
def test_threads_out_of_range(threads: int) -> None:
    with pytest.raises(UsageError, match=f"threads is {threads}; it must be from 1 to"):
        Engine.load(None, threads=threads)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="limits the size of files")
def test_unbuffered_output_is_not_cut_silently(tmp_path: Path) -> None:
    """Python drops what one write to an unbuffered stream leaves over."""
    code = (
        "import resource, signal, sys; from bessemer.cli.command_line import _prepare_streams\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); _prepare_streams()\n"
        "sys.stdout.write('a' * 5000); sys.stdout.flush()"
    )
    with open(tmp_path / "out", "w") as out:
        command = [sys.executable, "-u", "-c", code]
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode != 0
    assert "File too large" in done.stderr


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "two", str(MOST_THREADS + 1), "9" * 30])
def test_threads_of_the_environment_have_the_same_limits(value: str) -> None:
    with pytest.raises(UsageError, match=f"BESSEMER_THREADS is '{value}'.*from 1 to 1024"):
        default_threads({"BESSEMER_THREADS": value})


def test_errors_of_the_system_that_are_no_output_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(*arguments: object, **options: object) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(command_line, "build_app", lambda verb: app)
    monkeypatch.setattr(command_line, "_forget_stdout", lambda: None)  # it is the test's
    assert command_line.answer(["env"]) == 1
    assert capsys.readouterr().err == "bessemer: error: Cannot allocate memory\n"
