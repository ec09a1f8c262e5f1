"""What a command line loads: no more than its verb needs, so that it answers at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bessemer
from bessemer.cli.command_line import VERBS

COMPILING = {"torch", "transformers", "safetensors", "gguf"}
CALLS = """
import contextlib, io, json, sys
from bessemer.cli import main
told = []
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(words)
    told.append([code, out.getvalue(), list(sys.modules)])
print(json.dumps(told))
"""


def called(*calls: list[str]) -> list[tuple[int, str, set[str]]]:
    """Exit code, output and loaded modules after each command line, in one process."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps(calls)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(code, out, set(modules)) for code, out, modules in json.loads(done.stdout)]


def test_helps_load_no_library_of_numbers() -> None:
    helps = [[], ["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)]
    for words, (code, out, modules) in zip(helps, called(*helps), strict=True):
        assert code == 0, words
        assert (bessemer.__version__ if "--version" in words else "Usage: ") in out
        assert not modules & {*COMPILING, "numpy", "mlir", "llvmlite", "tokenizers"}, words


@pytest.mark.parametrize(
    "words",
    [
        ["chat"],
        *(["inspect", stage] for stage in ("", "weights", "abi", "memory", "passes")),
    ],
    ids=" ".join,
)
def test_a_compiled_model_is_not_compiled_again(compiled: Path, words: list[str]) -> None:
    """`run` has its own test. The toy keeps no graph, which is no reason to load torch either."""
    verb, *rest = words
    ((code, out, modules),) = called([verb, str(compiled), *(word for word in rest if word)])
    assert code == (1 if "passes" in words else 0), out
    assert not modules & COMPILING


@pytest.mark.parametrize("module", ["bessemer", "bessemer.cli"])
def test_as_a_module(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{bessemer.__version__}\n", "")
