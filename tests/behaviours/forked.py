"""Processes of their own that start at once: children of the test's process.

A new interpreter takes seconds until it has imported what compiling needs, and compiles again what
this run has compiled. A child has all that; its memory, folder, environment, rights and end are its
own.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bessemer.cli import main

FAILED = 70  # the exit code of a child that raises
PATIENCE_S = 300


class Child:
    """A call in a child. What it returns is the exit code, None for 0.

    cwd, env: of the child, the environment in addition to this one's.
    """

    def __init__(
        self, call: Callable[[], Any], *, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> None:
        self._files = [
            tempfile.TemporaryFile()  # noqa: SIM115 - until `wait`
            for _ in ("stdout", "stderr")
        ]
        self._process = multiprocessing.get_context("fork").Process(
            target=self._run, args=(call, cwd, env or {})
        )
        self._process.start()

    def _run(self, call: Callable[[], Any], cwd: Path | None, env: dict[str, str]) -> None:
        """The child's life."""
        code = FAILED
        try:
            for number, file in enumerate(self._files, 1):
                os.dup2(file.fileno(), number)
            sys.stdin = io.TextIOWrapper(io.BytesIO())
            sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8") for n in (1, 2))
            os.environ.update(env)
            tempfile.tempdir = None  # it follows TMPDIR again
            if cwd is not None:
                os.chdir(cwd)
            code = call() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self) -> subprocess.CompletedProcess:
        """What came of it; a negative code is the signal that ended it."""
        self._process.join(PATIENCE_S)
        code = self._process.exitcode
        assert code is not None, "the child does not end"
        shown = []
        for file in self._files:
            with file:
                file.seek(0)
                shown.append(file.read().decode())
        return subprocess.CompletedProcess([], code, *shown)


def command_line(
    *arguments: object, before: Callable[[], None] = lambda: None, **where: Any
) -> Child:
    """The command line in a child. before: called there first."""

    def call() -> int:
        before()
        return main([str(argument) for argument in arguments])

    return Child(call, **where)
