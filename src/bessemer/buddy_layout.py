"""`--layout buddy`: a model as the five files that buddy-mlir's examples are made of.

    forward_prefill-f16.mlir  subgraph0_prefill-f16.mlir   a main graph and what it calls
    forward_decode-f16.mlir   subgraph0_decode-f16.mlir
    arg0-f16.data             every parameter, one after the other, without a header
    arg0-f16.json             what is where in it

The suffix is the precision of the parameters. docs/buddy-layout.md has the interface, and how the
modules are lowered with upstream's tools.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.artifact.layout import StoredWeight
from bessemer.artifact.writer import weight_blocks
from bessemer.artifact_parts import stored_reader
from bessemer.compile_options import CompileOptions, context_of
from bessemer.compiler import Progress, check_room, import_source, opened
from bessemer.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from bessemer.codegen.buddy import BuddyModules
    from bessemer.graph import Graph
    from bessemer.importer.api import Imported

# Precisions that a flat array of numbers can have.
PRECISIONS = ("f32", "f16", "bf16")
# Options of the compilation that say something about this layout.
_USED_OPTIONS = ("weights", "kv", "context", "capture", "layout")


def compile_to_buddy(
    source: Any,
    options: CompileOptions,
    output: Path,
    *,
    progress: Progress = lambda stage, done, total: None,
) -> Path:
    """Write the files of `source` (as `compiler.compile_model` takes it) into the folder `output`.

    weights, kv, context and capture of the options count; another one that was set is a
    UsageError. Raises BessemerError of the stage that failed.
    """
    from bessemer.codegen.buddy import emit_buddy

    precision = _precision(options)
    names = file_names(precision)
    _check_folder(output, names)
    source = opened(source)
    check_room(source, replace(options, weights=precision), output)
    imported = import_source(source, options)
    prefill, decode = _graphs(imported, options)
    progress("codegen", 0, 1)
    modules = emit_buddy(prefill, decode, precision)
    progress("codegen", 1, 1)
    _write(output, modules, prefill, imported, precision, progress)
    return output


def file_names(precision: str) -> tuple[str, ...]:
    """The files of the layout."""
    stems = ("forward_prefill", "subgraph0_prefill", "forward_decode", "subgraph0_decode")
    modules = tuple(f"{stem}-{precision}.mlir" for stem in stems)
    return (*modules, f"arg0-{precision}.data", f"arg0-{precision}.json")


def _precision(options: CompileOptions) -> str:
    """The parameters' precision. UsageError for options that the layout can't follow."""
    defaults = CompileOptions()
    for field in fields(options):
        if field.name in _USED_OPTIONS:
            continue
        if getattr(options, field.name) != getattr(defaults, field.name):
            raise UsageError(
                f"--layout buddy writes MLIR for any machine: leave out --{field.name}"
            )
    precision = options.weights or "f16"
    if precision not in PRECISIONS:
        raise UsageError(
            f"--layout buddy keeps parameters as plain numbers: --weights {precision} has to be "
            f"one of {', '.join(PRECISIONS)}"
        )
    return precision


def _graphs(imported: Imported, options: CompileOptions) -> tuple[Graph, Graph]:
    """Prefill from the start of a sequence with the logits of every row, and decode; both with
    their caches as states.
    """
    from bessemer.graph import DType
    from bessemer.passes.explicit_cache import ExplicitCache
    from bessemer.passes.from_the_start import FromTheStart
    from bessemer.passes.pipeline import PassOptions, lower, run_passes

    lowered = lower(imported.graph, options=PassOptions(without=frozenset({"select_rows"})))
    context = context_of(options, imported.context_length)
    cache = ExplicitCache(context, DType(options.kv))
    prefill = run_passes(lowered.prefill, (FromTheStart(), cache))
    return prefill, run_passes(lowered.decode, (cache,))


def _check_folder(folder: Path, names: tuple[str, ...]) -> None:
    """Raise ArtifactError unless the files may be written there: what else is there is not ours."""
    try:
        if not folder.exists():
            return
        others = sorted(p.name for p in folder.iterdir() if p.name not in names)
    except OSError as error:
        raise ArtifactError(f"{folder}: {error.strerror or error}") from None
    if others:
        raise ArtifactError(
            f"{folder} has other files ({', '.join(others[:3])}): choose another output folder"
        )


def _write(
    folder: Path,
    modules: BuddyModules,
    graph: Graph,
    imported: Imported,
    precision: str,
    progress: Progress,
) -> None:
    """Each file is written beside the folder and moved into it when all are whole."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
            made = Path(name)
            for stem, text in modules.modules.items():
                (made / f"{stem}-{precision}.mlir").write_text(text, encoding="utf-8")
            data = made / f"arg0-{precision}.data"
            with data.open("wb") as stream:
                for block in _numbers(modules, graph, imported, precision, progress):
                    block.tofile(stream)
            index = {
                "precision": precision,
                "elements": sum(p.size for p in modules.parameters),
                "parameters": [asdict(p) for p in modules.parameters],
            }
            text = json.dumps(index, indent=1) + "\n"
            (made / f"arg0-{precision}.json").write_text(text, encoding="utf-8")
            folder.mkdir(exist_ok=True)
            for file in file_names(precision):
                os.replace(made / file, folder / file)
    except OSError as error:
        raise ArtifactError(f"{folder} could not be written: {error.strerror or error}") from error


def _numbers(
    modules: BuddyModules, graph: Graph, imported: Imported, precision: str, progress: Progress
) -> Iterator[np.ndarray]:
    """The bytes of arg0. One parameter is held in memory at a time."""
    checkpoint = imported.checkpoint
    blocks_of = weight_blocks(graph.weights, checkpoint.read, stored_reader(checkpoint))
    total, done = sum(p.size for p in modules.parameters), 0
    for parameter in modules.parameters:
        weight = StoredWeight.place(parameter.name, parameter.shape, precision, "plain", 0)
        yield from blocks_of(weight)
        done += parameter.size
        progress("weights", done, total)
