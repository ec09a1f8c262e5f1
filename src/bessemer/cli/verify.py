"""`bessemer verify`: files, memory and numbers of a compiled model, against PyTorch."""

from __future__ import annotations

import json as json_format
import sys
from typing import Annotated

from cyclopts import Parameter

from bessemer.arguments import checked_whole
from bessemer.cli.options import Json, Model, StorageOptions, Threads, whole, whole_numbers

EXIT_MISMATCH = 1
# Columns of the table where it isn't read on a terminal.
PIPE_WIDTH = 160


def verify(
    model: Model,
    /,
    *,
    checkpoint: Annotated[
        str | None,
        Parameter(
            help="What a compiled folder was made from, if it isn't where it was.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    lengths: Annotated[
        str, Parameter(help="Lengths of the prompts whose logits are compared, by comma.")
    ] = "1,7,33",
    decode_steps: Annotated[
        int, Parameter(converter=whole, help="Decode steps after each prompt.")
    ] = 8,
    storage: StorageOptions | None = None,
    threads: Threads = None,
    json: Json = False,
) -> int:
    """Check a compiled model, layer by layer.

    Files and symbols; the memory layout and every weight; then logits of prefill and decode against
    PyTorch in float32 on the stored weights; then, on a text, the KL divergence and the perplexity
    against PyTorch on the checkpoint's own weights, which is what storing them costs. A model that
    is not compiled yet is compiled into the cache first. Exits with 1 when a check fails.
    """
    from rich.console import Console

    from bessemer.cli.progress import StageProgress
    from bessemer.verify import verify as check

    with StageProgress() as progress:
        report = check(
            model,
            checkpoint=checkpoint,
            lengths=whole_numbers("--lengths", lengths, 1),
            decode_steps=checked_whole("decode_steps", decode_steps),
            threads=threads,
            options=(storage or StorageOptions()).compile_options(),
            progress=progress,
        )
    if json:
        print(json_format.dumps(report.to_json(), ensure_ascii=False))
    else:
        report.print(Console(width=None if sys.stdout.isatty() else PIPE_WIDTH))
    return 0 if report.ok else EXIT_MISMATCH
