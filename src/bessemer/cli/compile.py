"""`bessemer compile`: a model to a folder of native code."""

from __future__ import annotations

import json as json_format
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from bessemer.arguments import checked_path
from bessemer.cli.options import Json, Model, StorageOptions
from bessemer.errors import UsageError


@Parameter(name="*")
@dataclass
class CodeOptions:
    """What code is made, and how."""

    target: Annotated[
        str, Parameter(help="What to compile for: native, an architecture, or a triple.")
    ] = "native"
    cpu: Annotated[
        str | None,
        Parameter(
            help="CPU to compile for: a name, baseline for any of the kind, or levels of x86-64 by "
            "comma (v2,v3,v4), of which the best is taken at load."
        ),
    ] = None
    emit: Annotated[
        str, Parameter(help="Forms to keep under ir/, by comma: graph, mlir, llvm, asm.")
    ] = ""
    capture: Annotated[
        str, Parameter(help="How the model is captured: export, or dynamo (TorchDynamo).")
    ] = "export"
    prefix: Annotated[str, Parameter(help="Put before every global symbol.")] = ""
    schedule: Annotated[
        str, Parameter(help="kernels, or generic (every op by its plain lowering).")
    ] = "kernels"
    steering: Annotated[
        bool, Parameter(negative="", help="Let sessions be steered (`run --steering FILE`).")
    ] = False
    layout: Annotated[
        str, Parameter(help="artifact, or buddy: MLIR files and one flat file of parameters.")
    ] = "artifact"
    runner: Annotated[
        bool, Parameter(negative="", help="Also make `run`, a program that needs no Python.")
    ] = False
    static: Annotated[
        bool, Parameter(negative="", help="With --runner: it needs no shared library either.")
    ] = False

    def keywords(self) -> dict[str, Any]:
        """As `CompileOptions` takes them."""
        forms = tuple(form.strip() for form in self.emit.split(",") if form.strip())
        return {**vars(self), "emit": forms}


def compile(
    model: Model,
    /,
    *,
    output: Annotated[
        str | None,
        Parameter(name=["--output", "-o"], help="The folder to make; the cache by default."),
    ] = None,
    storage: StorageOptions | None = None,
    code: CodeOptions | None = None,
    json: Json = False,
) -> int:
    """Compile a model to native code.

    Prints the folder that holds libraries, weights, tokenizer and manifest.
    """
    from bessemer.api import compile_to, prepare
    from bessemer.artifact.reader import open_artifact
    from bessemer.cli.progress import StageProgress

    options = (storage or StorageOptions()).compile_options(**(code or CodeOptions()).keywords())
    folder = None if output is None else checked_path("-o", output)
    if folder is None and options.target != "native":
        raise UsageError(f"--target {options.target}: give the folder for it with -o DIR")
    if folder is None and options.layout != "artifact":
        raise UsageError(f"--layout {options.layout}: give the folder for it with -o DIR")
    began = time.monotonic()
    with StageProgress() as progress:
        if folder is not None and options.layout != "artifact":
            compile_to(model, options, folder, progress=progress)
            return _report_files(folder, json)
        if folder is None:
            prepared = prepare(model, options, progress=progress, waiting=announce_wait)
            artifact, compiled = prepared.artifact, prepared.compiled
        else:
            compile_to(model, options, folder, progress=progress)
            artifact, compiled = open_artifact(folder, check_cpu=False), True
    if not json:
        print(artifact.folder)
        return 0
    manifest = artifact.manifest
    report: dict[str, Any] = {
        "path": str(artifact.folder),
        "name": manifest.name,
        "compiled": compiled,
        "compile_s": round(time.monotonic() - began, 3),
        "context": manifest.context_length,
        "weights_bytes": manifest.weights_nbytes,
        "target": manifest.target,
    }
    print(json_format.dumps(report, ensure_ascii=False))
    return 0


def _report_files(folder: Path, json: bool) -> int:
    """The result of another layout than an artifact."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    report = {"path": str(folder), "files": files}
    print(json_format.dumps(report, ensure_ascii=False) if json else folder)
    return 0


def announce_wait() -> None:
    """Say why nothing happens."""
    import sys

    message = "bessemer: another process is compiling this model; waiting for it"
    print(message, file=sys.stderr, flush=True)
