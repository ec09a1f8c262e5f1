"""The command line: `bessemer VERB ...`. One module a verb.

Results go to standard output, everything else to standard error. Exit codes: 0 success, 1 an error
or a failed check, 2 a wrong call, 130 interrupted, 141 the reader of the output went away.

Nothing is imported before `main` is entered: there Ctrl-C would be a traceback.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it, whose import takes longer than all of this
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name); returns the exit code.

    Without `argv` it is that of the process, which is expected to end with it.
    """
    import os
    import sys

    try:
        from bessemer.cli import interrupt

        tokens = list(sys.argv[1:] if argv is None else argv)
        interrupt.owe_answer(tokens)
        if argv is None:
            interrupt.let_none_be_lost()
        from bessemer.cli.command_line import answer

        code = answer(tokens)
        if argv is None:
            interrupt.end_at_once()
    except (KeyboardInterrupt, Exception) as error:
        from bessemer.cli import interrupt

        if not interrupt.is_behind(error):
            raise
        if argv is None:
            interrupt.end_at_once()
        interrupt.report()
        if argv is None:
            os._exit(interrupt.EXIT_INTERRUPTED)  # not waiting for threads amidst their work
        return interrupt.EXIT_INTERRUPTED
    return code
