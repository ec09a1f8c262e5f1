"""`bessemer inspect`: a model at any stage of its way."""

from __future__ import annotations

import json as json_format
import sys
from typing import Annotated

from cyclopts import Parameter

from bessemer.cli.options import Json, Model, StorageOptions


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
    storage: StorageOptions | None = None,
    json: Json = False,
) -> int:
    """Show a model at one stage of its way to native code.

    A compiled folder shows what it holds; what it doesn't hold is made again from its source.
    """
    from bessemer.inspect import Choice
    from bessemer.inspect import inspect as look

    page = look(
        model,
        stage,
        choice=Choice(of, after, module, group, form),
        checkpoint=checkpoint,
        options=(storage or StorageOptions()).compile_options(),
    )
    if json:
        print(json_format.dumps(page.data, ensure_ascii=False, default=str))
    else:
        sys.stdout.write(page.text)
    return 0
