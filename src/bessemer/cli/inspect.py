"""`bessemer inspect`: a model at any stage of its way."""

from __future__ import annotations

import json as json_format
import sys
from typing import Annotated

from cyclopts import Parameter

from bessemer.cli.options import Json, Model, StorageOptions

BYTES_OF_GB = 1e9


def inspect(
    model: Model,
    stage: Annotated[
        str | None,
        Parameter(
            help="graph, passes, groups, mlir, llvm, asm, weights, abi or memory; "
            "an overview by default."
        ),
    ] = None,
    /,
    *,
    of: Annotated[
        str, Parameter(help="Which graph: imported, or lowered for prefill or decode.")
    ] = "imported",
    after: Annotated[
        str | None, Parameter(help="The graph after a pass: its name, or its number in passes.")
    ] = None,
    module: Annotated[
        str | None, Parameter(help="One module of mlir, llvm or asm, as forward_prefill.")
    ] = None,
    group: Annotated[
        str | None, Parameter(help="One function of mlir, llvm or asm; groups lists them.")
    ] = None,
    form: Annotated[
        str,
        Parameter(
            help="Of mlir: kernel (as emitted), payload (linalg on tensors), or a step of the "
            "backend: bufferized, loops, math, llvm."
        ),
    ] = "kernel",
    checkpoint: Annotated[
        str | None,
        Parameter(
            help="What a compiled folder was made from, if it isn't where it was.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        Parameter(
            help="Of memory: gigabytes that the machine reads in a second, for the estimated speed "
            "of decoding; measured on this one by default."
        ),
    ] = None,
    storage: StorageOptions | None = None,
    json: Json = False,
) -> int:
    """Show a model at one stage of its way to native code.

    A compiled folder shows what it holds; what it doesn't hold is made again from its source. A
    config.json without weights is enough to look at: memory then plans the model's size.
    """
    from bessemer.inspect import Choice
    from bessemer.inspect import inspect as look

    page = look(
        model,
        stage,
        choice=Choice(of, after, module, group, form),
        checkpoint=checkpoint,
        options=(storage or StorageOptions()).compile_options(),
        bandwidth=_bandwidth(stage, bandwidth),
    )
    if json:
        print(json_format.dumps(page.data, ensure_ascii=False, default=str))
    else:
        sys.stdout.write(page.text)
    return 0


def _bandwidth(stage: str | None, stated: float | None) -> float | None:
    """Bytes a second: as stated, or as measured here; None where that can't be done."""
    from bessemer.errors import ArgumentError, BessemerError, UsageError

    if stated is not None:
        if stage != "memory":
            raise UsageError("--bandwidth is for the stage memory")
        if not 0 < stated < float("inf"):
            raise ArgumentError("bandwidth", str(stated), "above 0, and finite")
        return stated * BYTES_OF_GB
    if stage != "memory":
        return None
    try:
        from bessemer.bench.machine import Probes
        from bessemer.runtime.cpu import default_threads

        return Probes().measure(default_threads()).bytes
    except (BessemerError, ModuleNotFoundError) as error:
        print(f"bessemer: the bandwidth can't be measured: {error}", file=sys.stderr)
        return None
