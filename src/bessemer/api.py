"""From what a user names to a model that runs: found, in the cache, or compiled now."""

from __future__ import annotations

import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.arguments import checked_model, checked_path, shown
from bessemer.artifact import cache
from bessemer.artifact.manifest import LIBRARY_FILE, MANIFEST_FILE, WEIGHTS_FILE, is_artifact
from bessemer.artifact.reader import Artifact, open_artifact
from bessemer.compile_options import CompileOptions
from bessemer.compiler import Progress, compile_model
from bessemer.errors import ArtifactError, UsageError
from bessemer.installation import compiling_modules

if TYPE_CHECKING:
    from bessemer.runtime.model import Model

log = logging.getLogger(__name__)


def _no_progress(stage: str, done: int, total: int) -> None:
    """Nobody is watching."""


def _announce_wait() -> None:
    log.info("another process is compiling this model; waiting for it")


@dataclass(frozen=True)
class Prepared:
    """An artifact that is there now. compiled: whether it was made by this call.
    compile_seconds: what that took.
    """

    artifact: Artifact
    compiled: bool
    compile_seconds: float


def compile(
    source: Any,
    *,
    weights: str | None = None,
    kv: str = "f16",
    context: int | None = None,
    output: str | Path | None = None,
    target: str = "native",
    cpu: str | None = None,
    emit: Sequence[str] = (),
    capture: str = "export",
    threads: int | None = None,
    progress: Progress | None = None,
    **others: Any,
) -> Model:
    """Compile a model and load it.

    source: a Hugging Face folder, a `.gguf` file, a hub name, an alias, a transformers model, or
    any torch module that takes token ids and positions and gives logits.
    weights: "f32", "f16", "bf16" or "q8_0" (also "w8a32", "w8a16", "w8a8"); when None, q8_0 for a
    checkpoint whose matrices are quantised, else f16.  kv: dtype of the KV cache.  context: tokens
    of a session; the model's own maximum, at most 4096, when None.  output: the artifact's folder;
    without one a named model goes to the cache (and is found there the next time), a module to a
    temporary folder that lives as long as the result.  target, cpu: the machine to compile for; the
    result can't run when that isn't this one.  emit: intermediate forms to keep ("graph", "mlir",
    "llvm", "asm").  capture: "export" or "dynamo".  threads: of the returned model.  progress:
    called with stage, done, total.  others: further fields of `CompileOptions`.

    Raises UsageError, CheckpointError, UnsupportedError, CompileError or ArtifactError.
    """
    from bessemer.runtime.engine import check_threads
    from bessemer.runtime.model import Model

    check_threads(threads)
    _check_progress(progress)
    options = compile_options(
        weights=weights,
        kv=kv,
        context=context,
        target=target,
        cpu=cpu,
        emit=tuple(emit) if isinstance(emit, list) else emit,
        capture=capture,
        **others,
    )
    if options.layout != "artifact":
        raise UsageError(
            f"--layout {options.layout} is no compiled model that could be loaded: write it with "
            "`bessemer compile`"
        )
    if isinstance(source, (str, Path)) and output is None:
        artifact = prepare(source, options, progress=progress or _no_progress).artifact
    else:
        folder = _temporary_folder() if output is None else checked_path("output", output)
        try:
            compile_to(source, options, folder, progress=progress or _no_progress)
            artifact = open_artifact(folder, check_cpu=target == "native")
        except BaseException:
            if output is None:
                shutil.rmtree(folder.parent, ignore_errors=True)
            raise
    model = Model(artifact, threads)
    if target == "native":
        model.engine  # noqa: B018 - load it now, so that errors come from here
    if output is None and not isinstance(source, (str, Path)):
        weakref.finalize(model, shutil.rmtree, artifact.folder.parent, ignore_errors=True)
    return model


def load(folder: str | Path, *, threads: int | None = None) -> Model:
    """Load a compiled model. Raises ArtifactError when it is damaged or can't run here."""
    from bessemer.runtime.model import Model

    return Model.load(folder, threads=threads)


def compile_options(**values: Any) -> CompileOptions:
    """CompileOptions of keyword arguments; UsageError names one that doesn't exist."""
    unknown = sorted(set(values) - set(CompileOptions.__dataclass_fields__))
    if unknown:
        known = ", ".join(CompileOptions.__dataclass_fields__)
        raise UsageError(f"there is no option {', '.join(unknown)}; known: {known}")
    return CompileOptions(**values)


def _check_progress(progress: object) -> None:
    if progress is not None and not callable(progress):
        raise UsageError(f"progress is {shown(progress)}; it must be a function")


def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="bessemer-")) / "model"


def prepare(
    source: str | Path,
    options: CompileOptions,
    *,
    progress: Progress = _no_progress,
    waiting: Callable[[], None] = _announce_wait,
) -> Prepared:
    """The artifact of what a user names: a compiled folder itself, else from the cache, where it is
    compiled to first if need be.

    waiting: called when another process is compiling it and is waited for.
    """
    if is_artifact(checked_model(source)):
        if options != CompileOptions():
            raise UsageError(
                f"{source} is compiled already: options of the compilation can't be changed; name "
                "the checkpoint instead"
            )
        return Prepared(open_artifact(source), False, 0.0)
    check_manifest_is_there(checked_model(source))
    from bessemer.importer.checkpoint import resolve

    with compiling_modules():
        path = resolve(source)
        content = cache.checkpoint_fingerprint(path, _read_fingerprint)
        key = cache.cache_key(content, options.to_json())
        artifact, made = cache.find_or_make(
            key,
            lambda folder: compile_model(path, options, folder, key=key, progress=progress),
            waiting,
        )
    return Prepared(artifact, made, artifact.manifest.compile_seconds if made else 0.0)


def check_manifest_is_there(path: Path) -> None:
    """Raise ArtifactError for a compiled folder without manifest.json: as a checkpoint, which it
    looks like with its config.json, it would only be said to have no weights.
    """
    compiled = all((path / name).is_file() for name in (WEIGHTS_FILE, LIBRARY_FILE))
    if compiled and not (path / MANIFEST_FILE).exists():
        raise ArtifactError(
            f"{path} looks like a compiled model whose {MANIFEST_FILE} is missing: put it back, or "
            "compile the model again"
        )


def compile_to(
    source: Any,
    options: CompileOptions,
    folder: Path,
    *,
    progress: Progress = _no_progress,
) -> Path:
    """Compile to a folder of the user's, whatever the cache has."""
    from bessemer.artifact.folder import check_destination

    # Before minutes of work: may it be written there?
    if options.layout == "artifact":
        check_destination(folder)
    if isinstance(source, (str, Path)) and is_artifact(checked_model(source)):
        raise UsageError(f"{source} is a compiled model already; name the checkpoint instead")
    with compiling_modules():
        if options.layout == "buddy":
            from bessemer.buddy_layout import compile_to_buddy

            return compile_to_buddy(source, options, folder, progress=progress)
        return compile_model(source, options, folder, progress=progress)


def _read_fingerprint(path: Path) -> tuple[str, list[Path]]:
    """The content key of a checkpoint and the files that it stands for."""
    from bessemer.importer.checkpoint import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        return checkpoint.fingerprint(), [file for _, file in checkpoint.content_files()]
