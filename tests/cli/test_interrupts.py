"""Ctrl-C at any moment: exit code 130, one line, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .test_run import KEYS


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A Python process that runs `script`."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


WHILE_IMPORTING = """
import signal, sys
name = sys.argv.pop(1)
class Interrupt:
    def find_spec(wanted, path, target=None):
        if wanted == name:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt)
from bessemer.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "module",
    ["bessemer.cli.command_line", "cyclopts", "bessemer.cli.run", "numpy", "tokenizers"],
)
def test_while_a_module_is_imported(compiled: Path, module: str) -> None:
    done = run_script(WHILE_IMPORTING, module, "run", compiled, "-p", "x", "--json")
    assert (done.returncode, done.stderr) == (130, "bessemer: interrupted\n")
    answer = json.loads(done.stdout)
    assert set(answer) == KEYS
    assert (answer["text"], answer["interrupted"]) == ("", True)


def test_what_an_import_made_of_it() -> None:
    """Python itself makes a RuntimeError of one that strikes while a class gets its attributes."""
    script = """
import signal, sys
class Interrupt:
    def find_spec(wanted, path, target=None):
        if wanted == "cyclopts":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt as error:
                raise RuntimeError("Error calling __set_name__") from error
sys.meta_path.insert(0, Interrupt)
from bessemer.cli import main
sys.exit(main())
"""
    done = run_script(script, "run", "x", "--json")
    assert (done.returncode, done.stderr) == (130, "bessemer: interrupted\n")
    assert json.loads(done.stdout)["interrupted"] is True


def test_at_the_end_of_the_process() -> None:
    script = """
import atexit, signal, sys
from bessemer.cli import main
atexit.register(signal.raise_signal, signal.SIGINT)
sys.exit(main())
"""
    done = run_script(script, "models", "--json")
    assert (done.returncode, done.stderr) == (130, "")
    assert json.loads(done.stdout)


def test_inside_a_callback_that_cannot_raise() -> None:
    """Python would write "Exception ignored in" and go on."""
    script = """
import signal, time, weakref
from bessemer.cli import interrupt
interrupt.let_none_be_lost()
class Thing: pass
thing = Thing()
reference = weakref.ref(thing, lambda gone: signal.raise_signal(signal.SIGINT))
try:
    del thing
    time.sleep(30)
except KeyboardInterrupt:
    print("noticed")
"""
    done = run_script(script)
    assert (done.stdout, done.stderr) == ("noticed\n", "")


def test_what_a_library_made_of_it() -> None:
    script = """
import sys
from bessemer.cli import command_line, main
def verb():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        raise ImportError("initialization failed") from error
import bessemer.cli.env
bessemer.cli.env.env = verb
sys.exit(main())
"""
    done = run_script(script, "env")
    assert (done.returncode, done.stderr) == (130, "bessemer: interrupted\n")
