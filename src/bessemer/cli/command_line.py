"""One command line from its words to its exit code. Heavy imports are inside the verbs."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys

import cyclopts

import bessemer
from bessemer.cli import interrupt
from bessemer.errors import BessemerError, UsageError
from bessemer.installation import what_to_install

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
# What writing to a file that was opened before fails with; other errors without a file's name are
# of something else (no memory, no threads).
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# Columns below which no page can be laid out, and rich fails on none.
FEWEST_COLUMNS = 20

VERBS = {
    "compile": "Compile a model to native code.",
    "run": "Answer one prompt.",
    "chat": "Talk to a model.",
    "bench": "Measure a compiled model and the machine.",
    "verify": "Check a compiled model: files, memory, and numbers against PyTorch.",
    "inspect": "Show a model on its way through the compiler.",
    "models": "List what can be run here.",
    "pull": "Fetch a model from the Hugging Face hub.",
    "env": "Show the machine, the versions, and what is missing.",
}


def build_app(used: str | None = None) -> cyclopts.App:
    """The parser. Only the module of the verb that is `used` is imported, and helps in full."""
    app = cyclopts.App(
        name="bessemer",
        help="Compile language models to native code for this machine's CPU, and run them.",
        version=bessemer.__version__,
        default_parameter=cyclopts.Parameter(negative=()),
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for verb, title in VERBS.items():
        app.command(f"bessemer.cli.{verb}:{verb}", name=verb, help=None if verb == used else title)
    return app


def answer(tokens: list[str]) -> int:
    """Do what the words say; returns the exit code. Raises KeyboardInterrupt."""
    if not _prepare_streams():
        fail("standard output is closed")
        return EXIT_ERROR
    try:
        app = build_app(tokens[0] if tokens else None)
        try:
            code = app(tokens, exit_on_error=False, print_error=False)
        except Exception as error:
            if interrupt.is_behind(error):
                raise KeyboardInterrupt from None
            raise
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (cyclopts.CycloptsError, UsageError) as error:
        from bessemer.cli.wrong_call import explain

        fail(explain(error, app, tokens))
        return EXIT_USAGE
    except ModuleNotFoundError as error:
        message = what_to_install(error)
        if message is None:
            raise
        fail(message)
        return EXIT_ERROR
    except BrokenPipeError:
        _forget_stdout()
        return EXIT_BROKEN_PIPE
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # what rich makes of one
            return EXIT_BROKEN_PIPE
        raise
    except BessemerError as error:
        fail(str(error))
        return EXIT_ERROR
    except OSError as error:
        # A full disk behind a redirected output, a file that went away.
        _forget_stdout()
        where = error.filename
        if where is None and error.errno in _OUTPUT_ERRORS:
            where = "standard output can't be written"
        fail(f"{f'{where}: ' if where else ''}{error.strerror or error}")
        return EXIT_ERROR


def fail(message: str) -> None:
    """Report an error, if it can be; the exit code tells all the same."""
    with contextlib.suppress(OSError):
        print(f"bessemer: error: {message}", file=sys.stderr)


def _prepare_streams() -> bool:
    """No text may fail to be printed; what we have to say goes to standard error. Whether there is
    a standard output at all; the other two are replaced by nothing where they are closed.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for good
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        return False
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        # Of an unbuffered stream (python -u, PYTHONUNBUFFERED) Python loses what one write leaves
        # over: a full disk or pipe would cut the output silently.
        sys.stdout = open(  # noqa: SIM115 - for good
            sys.stdout.fileno(), "w", encoding=sys.stdout.encoding, closefd=False
        )
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("bessemer: %(message)s"))
    logger = logging.getLogger("bessemer")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) < FEWEST_COLUMNS:
        del os.environ["COLUMNS"]
    # Libraries that compiling loads are talkative; what matters comes as an exception.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return True


def _forget_stdout() -> None:
    """Let the interpreter flush to nowhere at its end, without a complaint."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
