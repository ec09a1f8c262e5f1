"""Compiling a part of a model, or all of it in another way, and loading it in this process.

For looking for the place where numbers go wrong: a lowered graph cut at any value becomes a small
model whose "logits" are that value.
"""

from __future__ import annotations

import ctypes
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bessemer.artifact.layout import StoredWeight
from bessemer.artifact.manifest import Manifest
from bessemer.artifact.packing import pack
from bessemer.artifact.reader import Artifact
from bessemer.graph import Graph, Value, constant, emit, evaluate_value
from bessemer.runtime.engine import Engine
from bessemer.runtime.library import Library
from bessemer.runtime.memory import allocate
from bessemer.runtime.session import Session

if TYPE_CHECKING:
    from bessemer.backend.target import Target
    from bessemer.codegen.generate import Generated
    from bessemer.compiler import Compilation

Read = Callable[[str], np.ndarray]
C_INTERFACE = "_mlir_ciface_"


class ProbeSession(Session):
    """A session of a part of a model: what it gives may be narrower than the vocabulary, so that
    ids aren't checked against it. One token is prefilled, too, where a session would decode it.
    """

    def _checked(self, ids: Sequence[int] | np.ndarray) -> npt.NDArray[np.int64]:
        return np.asarray(ids, np.int64)

    def _entry(self, count: int, rows: int) -> ctypes._NamedFuncPointer:
        return self._engine.library.prefill

    @property
    def scratch(self) -> npt.NDArray[np.uint8]:
        """The memory of activations, as the last call left it."""
        return self._scratch


def cut(graph: Graph, value: Value) -> Graph:
    """The part of a lowered graph that computes `value`, float32 with rows first."""
    rows, *rest = value.shape
    if len(rest) != 1:
        # Heads and the like become one row; the multiplication makes it a result of its own.
        width = math.prod(int(str(n)) for n in rest)
        value = emit("mul", emit("reshape", value, shape=(rows, width)), constant(1.0))
    return replace(graph, outputs={"logits": value}, updates={})


def build_engine(
    compilation: Compilation,
    prefill: Graph,
    decode: Graph | None,
    schedule: str,
    artifact: Artifact,
    read: Read,
    threads: int | None = None,
) -> Engine:
    """Compile and load lowered graphs for this machine, with the weights of an artifact.

    decode: None when it is not going to be called; then only prefill is compiled.
    Raises CompileError.
    """
    from bessemer.codegen.generate import generate
    from bessemer.compile_options import codegen_options

    options = replace(compilation.options, schedule=schedule)
    context = compilation.generated.state.capacity
    generated = generate(
        prefill, decode or prefill, codegen_options(options, compilation.target, context)
    )
    entries = ["forward_prefill"] + (["forward_decode"] if decode is not None else [])
    manifest, library = link_part(artifact, compilation.target, generated, entries)
    pool = library.create_pool(threads or 1)
    return Engine(manifest, library, pool, _weights(artifact, generated, read))


def link_part(
    artifact: Artifact, target: Target, generated: Generated, entries: list[str]
) -> tuple[Manifest, Library]:
    """Machine code of generated entry points, loaded, and the manifest that fits it: the artifact's
    with the layouts of the part. A missing entry point is the first of `entries`: it is never
    called.

    Raises CompileError.
    """
    from bessemer.backend.link import compile_native, link_shared

    with tempfile.TemporaryDirectory(prefix="bessemer-") as name:
        folder = Path(name)
        objects = _objects(target, generated, entries, folder)
        library = folder / "part.so"
        native = compile_native(target, folder / "native")
        link_shared([*objects, *native], library, target)
        manifest = _manifest(artifact.manifest, generated, entries)
        return manifest, Library(library, manifest)


def _objects(target: Target, generated: Generated, entries: list[str], folder: Path) -> list[Path]:
    from bessemer.backend.codegen import compile_module

    found = []
    exports = [C_INTERFACE + e for e in entries]
    for entry in entries:
        for stem in (entry, entry.replace("forward", "groups")):
            path = folder / f"{stem}.o"
            text = generated.modules[stem]
            wanted = exports if stem == entry else []
            own = [e for e in wanted if e == C_INTERFACE + entry]
            module = compile_module(text, target, stem, exports=own or None)
            path.write_bytes(module.object)
            found.append(path)
    return found


def _manifest(manifest: Manifest, generated: Generated, entries: list[str]) -> Manifest:
    symbols = {e: C_INTERFACE + (e if e in entries else entries[0]) for e in manifest.entry_points}
    return replace(
        manifest,
        weights=tuple(generated.weights),
        state=generated.state,
        scratch=generated.scratch,
        vocab_size=generated.vocab_size,
        hidden_size=generated.hidden_size,
        entry_points=symbols,
        levels=(),
        prefix="",
    )


def _weights(artifact: Artifact, generated: Generated, read: Read) -> np.ndarray:
    """The memory of the part's weights: the artifact's bytes at the part's places."""
    memory = allocate(max((w.offset + w.nbytes for w in generated.weights), default=0))
    stored = {w.name: w for w in artifact.manifest.weights}
    for weight in generated.weights:
        place = memory[weight.offset : weight.offset + weight.nbytes]
        have = stored.get(weight.name)
        if have is not None and _same_form(have, weight):
            place[:] = artifact.stored(weight.name)
            continue
        at = 0
        for block in pack(evaluate_value(generated.expressions[weight.name], read), weight):
            place[at : at + block.nbytes] = block
            at += block.nbytes
    return memory


def _same_form(a: StoredWeight, b: StoredWeight) -> bool:
    return (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)
