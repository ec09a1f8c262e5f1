"""Ctrl-C while compiled code runs.

Python handles a signal between two of its own instructions, so a long native call would not notice
it. But the C part of Python's handler writes the signal's number into a pipe at once
(`signal.set_wakeup_fd`). A thread waits at the other end and sets the call's cancel flag; the
compiled code polls it and returns, and then Python raises KeyboardInterrupt as always.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence

from bessemer.errors import GenerationError
from bessemer.runtime.library import Context


class StepCancelled(GenerationError):
    """A call was cancelled by `Session.cancel`; the session is where it was before it."""


class _Watcher:
    """The pipe, the thread that reads it, and the call that a signal is meant for."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.target: Context | None = None
        self._reader, self.pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        threading.Thread(target=self._watch, name="bessemer-interrupt", daemon=True).start()

    def _watch(self) -> None:
        while numbers := os.read(self._reader, 64):
            target = self.target
            if signal.SIGINT in numbers and target is not None:
                target.cancel = 1


_watcher: _Watcher | None = None


def _current_watcher() -> _Watcher:
    """The watcher of this process; a forked child has the pipe but not the thread."""
    global _watcher
    if _watcher is None or _watcher.owner != os.getpid():
        _watcher = _Watcher()
    return _watcher


def call_interruptibly(
    context: Context, function: Callable[..., None], arguments: Sequence[int]
) -> None:
    """Call `function`, which works with `context`; SIGINT sets the context's cancel flag meanwhile.

    Only in the main thread, where Python handles signals, and only if nobody else (an asyncio
    loop) has taken the wake-up descriptor; elsewhere a signal is noticed when the call is over.
    """
    if threading.get_ident() != threading.main_thread().ident:
        function(*arguments)
        return
    watcher = _current_watcher()
    before = signal.set_wakeup_fd(watcher.pipe, warn_on_full_buffer=False)
    if before not in (-1, watcher.pipe):
        signal.set_wakeup_fd(before)
        function(*arguments)
        return
    watcher.target = context
    try:
        function(*arguments)
    finally:
        watcher.target = None
        # An interrupt right here leaves our pipe in place, which the next call takes back.
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
