"""A measuring process and who drives it: JSON objects, one a line, over its standard streams.

A process that measures one engine answers commands until its input ends, so that several engines
can be measured in turns. Only the standard library is used and nothing of this package: the
processes of other engines load this file by its path.

    -> {"op": "prefill", "tokens": 512, "depth": 0}
    <- {"seconds": 0.71}            or {"error": "..."}
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Bytes of a failed process's error output that are shown.
SHOWN_BYTES = 2000


class WorkerError(Exception):
    """A measuring process refused a command, or ended, or took too long."""


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answer commands from standard input until it ends. What libraries print goes to stderr."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        operation = commands.get(request.pop("op"))
        try:
            if operation is None:
                raise WorkerError("there is no such command")
            answer = operation(**request)
        except Exception as error:  # reported to who asked; the process goes on
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Worker:
    """A measuring process. A context manager; at its end the process is gone."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Start `command`. env: variables on top of this process's own."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._buffer = b""
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # Ctrl-C is for who drives it, and then ends it
        )

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def ask(self, op: str, *, timeout: float | None = None, **arguments: Any) -> Any:
        """The answer to a command. timeout: seconds.

        Raises WorkerError with the process's own words. After a timeout the process is ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        answer = json.loads(self._line(op, timeout))
        if isinstance(answer, dict) and "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def _line(self, op: str, timeout: float | None) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                self.close()
                raise WorkerError(f"{op} took longer than {timeout:.0f} s")
            data = os.read(pipe, 1 << 16)
            if not data:
                raise self._ended()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ended(self) -> WorkerError:
        code = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read()[-SHOWN_BYTES:].decode(errors="replace").strip()
        return WorkerError(f"the process ended with {code}: {words or 'no message'}")

    def close(self) -> None:
        """End the process. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(OSError):  # what the process never read
                    stream.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
