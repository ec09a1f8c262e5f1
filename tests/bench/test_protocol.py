"""The measuring process: answers, errors, noise, endings."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from bessemer.bench import protocol
from bessemer.bench.protocol import Worker, WorkerError

SERVER = f"""
import os, sys, time
sys.path.insert(0, {str(Path(protocol.__file__).parent)!r})
import protocol

def add(a, b):
    print("noise of a library")
    os.write(1, b"noise of C\\n")
    return {{"sum": a + b}}

def fail():
    raise ValueError("that is wrong")

def end():
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)

protocol.serve({{"add": add, "fail": fail, "end": end, "sleep": lambda secs: time.sleep(secs),
                "env": lambda: os.environ.get("ADDED")}})
"""


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    with Worker([sys.executable, str(script)], {"ADDED": "here"}) as worker:
        yield worker


def test_answers_are_not_mixed_with_output(worker: Worker) -> None:
    assert worker.ask("add", a=1, b=2) == {"sum": 3}
    assert worker.ask("add", a="x", b="y") == {"sum": "xy"}
    assert worker.ask("env") == "here"


def test_an_error_is_told_and_the_process_goes_on(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="ValueError: that is wrong"):
        worker.ask("fail")
    with pytest.raises(WorkerError, match="no such command"):
        worker.ask("nothing")
    assert worker.ask("add", a=1, b=1) == {"sum": 2}


def test_last_words_of_a_process(worker: Worker) -> None:
    with pytest.raises(WorkerError, match=r"ended with 3: (.|\n)*last words"):
        worker.ask("end")
    with pytest.raises(WorkerError, match="ended with 3"):
        worker.ask("add", a=1, b=1)


def test_a_slow_answer_ends_the_process(worker: Worker) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError, match="sleep took longer"):
        worker.ask("sleep", timeout=0.2, secs=60)
    assert time.monotonic() - began < 30
    worker.close()
