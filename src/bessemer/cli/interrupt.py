"""Ctrl-C in the process of a command line: always noticed, never a traceback."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# Seconds until a lost interrupt comes again: enough to leave the function that can't raise it.
AGAIN_S = 0.01

# What `run --json` prints when it is interrupted before there is a model that could answer.
NO_ANSWER = {
    "text": "",
    "token_ids": [],
    "tokens": 0,
    "prompt_tokens": None,
    "finish_reason": "cancelled",
    "interrupted": True,
    "prefill_tokens_per_second": None,
    "decode_tokens_per_second": None,
    "time_to_first_token_s": None,
    "load_s": None,
    "compile_s": None,
}

_owed = False


def let_none_be_lost() -> None:
    """Raise KeyboardInterrupt again where it struck inside a destructor or a weak reference's
    callback. Python only writes of that ("Exception ignored in") and goes on, and capturing a model
    lets thousands of objects go.
    """
    tell = sys.unraisablehook
    main_thread = _thread.get_ident()

    def interrupt_again() -> None:
        time.sleep(AGAIN_S)
        signal.pthread_kill(main_thread, signal.SIGINT)

    def look(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is KeyboardInterrupt:
            # Not by `threading`, whose locks may be held right here.
            _thread.start_new_thread(interrupt_again, ())
        else:
            tell(lost)

    sys.unraisablehook = look


def is_behind(error: BaseException | None) -> bool:
    """Whether an error is what a library made of an interrupt."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def end_at_once() -> None:
    """From here on let Ctrl-C end the process at once: what is to be said is said, and the end of
    an interpreter that has loaded PyTorch takes a while and would show where it was.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(EXIT_INTERRUPTED))


def owe_answer(tokens: Sequence[str]) -> None:
    """Note whether the command line promises one JSON object for an answer, whatever comes."""
    global _owed
    _owed = tokens[:1] == ["run"] and "--json" in tokens


def owe_nothing() -> None:
    """The promise is kept."""
    global _owed
    _owed = False


def report() -> None:
    """Say that the command line was interrupted, and keep its promise."""
    with contextlib.suppress(OSError, ValueError):  # nobody listens any more
        if sys.stderr is not None:
            print("bessemer: interrupted", file=sys.stderr, flush=True)
        if _owed and sys.stdout is not None:
            import json

            print(json.dumps(NO_ANSWER), flush=True)
