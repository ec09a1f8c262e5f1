"""`bessemer bench`: how fast a model is here, and how near to the machine's limits."""

from __future__ import annotations

import json as json_format
import sys
from typing import Annotated

from cyclopts import Parameter

from bessemer.arguments import checked_whole
from bessemer.cli.options import Json, Model, StorageOptions, whole, whole_numbers
from bessemer.errors import UsageError

# Columns of the table where it isn't read on a terminal.
PIPE_WIDTH = 160


def bench(
    model: Model,
    /,
    *,
    prompt: Annotated[
        str, Parameter(name=["--prompt", "-p"], help="Lengths of prompts, by comma; 0: none.")
    ] = "512",
    generate: Annotated[
        str, Parameter(name=["--generate", "-n"], help="Tokens to generate, by comma; 0: none.")
    ] = "64",
    depth: Annotated[
        str,
        Parameter(name=["--depth", "-d"], help="Tokens that are held before a test, by comma."),
    ] = "0",
    threads: Annotated[
        str | None,
        Parameter(
            name=["--threads", "-t"],
            help="Numbers of threads, by comma; the cores that may be used by default.",
        ),
    ] = None,
    repeat: Annotated[
        int,
        Parameter(
            name=["--repeat", "-r"], converter=whole, help="How often each test is measured."
        ),
    ] = 5,
    profile: Annotated[
        bool,
        Parameter(help="Also show the time, GFLOP/s and GB/s of each group of the compiled code."),
    ] = False,
    storage: StorageOptions | None = None,
    json: Json = False,
    csv: Annotated[bool, Parameter(help="Print comma-separated values.")] = False,
    markdown: Annotated[bool, Parameter(help="Print Markdown.")] = False,
) -> int:
    """Measure prompts (pp) and generation (tg) on random tokens.

    pp512 is a prompt of 512 tokens, tg64@d2000 generates 64 tokens after 2000 others. Shown are the
    median of the repeats and its share of what the machine reaches in two small probes: multiply-
    adds for prompts, reading memory for generation (weights alone). A model that is not compiled
    yet is compiled into the cache first.
    """
    from bessemer.bench import run, show
    from bessemer.cli.progress import StageProgress

    if json + csv + markdown > 1:
        raise UsageError("give one of --json, --csv and --markdown")
    if profile and csv:
        raise UsageError(
            "--csv has no place for the groups of --profile; give --json or --markdown"
        )
    wanted = run.Plan(
        whole_numbers("--prompt", prompt, 0),
        whole_numbers("--generate", generate, 0),
        whole_numbers("--depth", depth, 0),
        whole_numbers("--threads", threads or "", 1),
        checked_whole("repeat", repeat, 1),
        profile,
    )
    with StageProgress() as progress:
        report = run.bench(
            model,
            wanted,
            options=(storage or StorageOptions()).compile_options(),
            progress=progress,
            announce=_announce,
        )
    if json:
        print(json_format.dumps(report.to_json(), ensure_ascii=False))
    elif csv:
        sys.stdout.write(show.comma_separated(report))
    elif markdown:
        sys.stdout.write(show.markdown(report))
    else:
        from rich.console import Console

        show.show(report, Console(width=None if sys.stdout.isatty() else PIPE_WIDTH))
    return 0


def _announce(text: str) -> None:
    print(f"bessemer: measuring {text}", file=sys.stderr)
