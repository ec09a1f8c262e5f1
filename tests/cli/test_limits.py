"""Outputs that can't be written, and numbers that no machine has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bessemer.errors import UsageError
from bessemer.runtime.engine import MOST_THREADS, Engine


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device is Linux's own")
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
    assert "No space left on device" in done.stderr
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


@pytest.mark.parametrize("threads", [0, -1, MOST_THREADS + 1, 10**20])
def test_threads_out_of_range(threads: int) -> None:
    with pytest.raises(UsageError, match=f"threads is {threads}; it must be from 1 to"):
        Engine.load(None, threads=threads)  # type: ignore[arg-type]
