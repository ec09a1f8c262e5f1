"""`verify`: three layers of checks, each building on the ones before."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.arguments import checked_model
from bessemer.artifact.reader import Artifact, Check, verify_files
from bessemer.errors import BessemerError, UsageError
from bessemer.installation import what_to_install
from bessemer.runtime.engine import check_threads
from bessemer.verify.files import check_files, check_manifest, check_symbols
from bessemer.verify.memory import check_bits, check_hashes, check_layouts, check_tables
from bessemer.verify.model import compile_again, find_source
from bessemer.verify.numbers import Numbers
from bessemer.verify.quality import text_ids
from bessemer.verify.report import MEMORY, NUMBERS, Report
from bessemer.verify.trials import TrialPlan

if TYPE_CHECKING:
    from bessemer.compile_options import CompileOptions
    from bessemer.compiler import Compilation

# Prompts that are compared in full: one row, a part of a tile, more than a block of keys.
LENGTHS = (1, 7, 33)
DECODE_STEPS = 8

Progress = Callable[[str, int, int], None]  # stage, done, total


def verify(
    path_or_model: Any,
    *,
    checkpoint: Any = None,
    lengths: Sequence[int] = LENGTHS,
    decode_steps: int = DECODE_STEPS,
    threads: int | None = None,
    options: CompileOptions | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Report:
    """Verify a compiled model, or compile a model and verify that.

    path_or_model: an artifact's folder; or a checkpoint (path, hub name, alias), which is compiled
        to the cache first; or a torch module, which is compiled for this call.
    checkpoint: what an artifact was compiled from, when it isn't where the manifest says.
    lengths: of the prompts whose logits are compared.  decode_steps: after each.
    threads: of the compiled model and of PyTorch.  options: of the compilation, if there is one.
    progress: called with a stage, the work done and all of it.

    Never raises for what is wrong with an artifact: that is a failed check. Raises BessemerError
    when a model can't be found or compiled, UsageError for arguments that make no sense.
    """
    check_threads(threads)
    if not lengths or any(n < 1 for n in lengths) or decode_steps < 0:
        raise UsageError("verify needs prompt lengths of at least 1, and no negative decode steps")
    with _compiled(path_or_model, checkpoint, options, progress) as (folder, source):
        report = Report(f"verification of {_title(path_or_model)}")
        run = Verification(report, tuple(lengths), decode_steps, threads, progress)
        run.check(folder, source)
    return report


def _title(model: Any) -> str:
    """What is verified, as the caller knows it: not the folder of the cache that it is in."""
    return str(model) if isinstance(model, (str, Path)) else type(model).__name__


@contextlib.contextmanager
def _compiled(
    model: Any, checkpoint: Any, options: CompileOptions | None, progress: Progress
) -> Iterator[tuple[Path, Any]]:
    """The artifact to verify, and what it is to be compared with."""
    from bessemer.api import compile_to, prepare
    from bessemer.compile_options import CompileOptions

    if isinstance(model, (str, Path)) and looks_like_artifact(checked_model(model)):
        if options not in (None, CompileOptions()):
            raise UsageError(
                f"{model} is compiled already: options of the compilation can't be changed; name "
                "the checkpoint instead"
            )
        yield checked_model(model), checkpoint
        return
    options = options or CompileOptions()
    source = checkpoint if checkpoint is not None else model
    if isinstance(model, (str, Path)):
        yield prepare(model, options, progress=progress).artifact.folder, source
        return
    with tempfile.TemporaryDirectory(prefix="bessemer-") as name:
        yield compile_to(model, options, Path(name) / "model", progress=progress), source


def looks_like_artifact(folder: Path) -> bool:
    """Whether a folder is an artifact, or what is left of one."""
    names = ("manifest.json", "model.so", "libmodel.a", "weights.bin")
    return any((folder / name).exists() for name in names)


@dataclass
class Verification:
    """One run over the layers."""

    report: Report
    lengths: tuple[int, ...]
    decode_steps: int
    threads: int | None
    progress: Progress

    def check(self, folder: Path, source: Any) -> None:
        """Add the checks of all layers that can be looked at."""
        artifact = check_manifest(self.report, folder)
        if artifact is None:
            return
        whole = self._files_and_layouts(artifact)
        if not whole:
            failed = ", ".join(c.name for c in self.report.failed)
            self.report.add(NUMBERS, "logits", False, f"not run, since these failed: {failed}")
            return
        found = find_source(artifact.manifest, source)
        compilation, reason, same_weights = None, found.reason, False
        if found.source is not None:
            compilation, same_weights = self._compile_again(artifact, found.source)
            if compilation is None:
                reason = "the source could not be compared"
        context = artifact.manifest.context_length
        most = context - self.decode_steps
        long = [n for n in self.lengths if n > most]
        if long and self.lengths != LENGTHS:
            raise UsageError(
                f"--lengths {long[0]}: a context of {context} tokens has room for {most} and "
                f"{self.decode_steps} decode steps"
            )
        text = text_ids(artifact.folder, artifact.manifest)
        plan = TrialPlan.for_model(artifact.manifest, self.lengths, self.decode_steps, text)
        Numbers(
            self.report,
            artifact,
            plan,
            compilation,
            reason,
            same_weights,
            self.threads,
            self.progress,
        ).check()

    def _files_and_layouts(self, artifact: Artifact) -> bool:
        """Layer 1, and layer 2 without the source; whether the model may be loaded and run."""
        found = self._integrity(artifact)
        whole = check_files(self.report, artifact, found)
        check_symbols(self.report, artifact)
        runs_here = check_layouts(self.report, artifact)
        if any(c.name.startswith("weight ") for c in found):
            whole &= check_hashes(self.report, found)
        return whole and runs_here

    def _integrity(self, artifact: Artifact) -> list[Check]:
        def progress(done: int, total: int) -> None:
            self.progress("checking files", done, total)

        try:
            return verify_files(artifact, progress)
        except (BessemerError, OSError, ValueError, KeyError) as error:
            return [Check("weight table", False, str(error))]

    def _compile_again(self, artifact: Artifact, source: Any) -> tuple[Compilation | None, bool]:
        """The source up to MLIR, its tables and bits compared with what is stored, and whether the
        bits are the same; None, and a failed check, when it can't be compiled or is the source of
        another model.
        """
        stage = "compiling again"
        self.progress(stage, 0, 1)
        try:
            compilation = compile_again(source, artifact.manifest)
        except ModuleNotFoundError as error:
            needed = what_to_install(error) or str(error)
            self.report.add(MEMORY, "source", False, f"not compared: {needed}")
            return None, False
        except Exception as error:  # a checkpoint may be damaged in any way
            self.report.add(MEMORY, "source", False, f"{type(error).__name__}: {error}")
            return None, False
        finally:
            self.progress(stage, 1, 1)
        if compilation.imported.unused:
            from bessemer.importer.unused import unused_text

            detail = unused_text(compilation.imported.unused)
            self.report.add(MEMORY, "unused tensors", True, f"no fault by itself: {detail}")
        generated, manifest = compilation.generated, artifact.manifest
        same_target = dict(manifest.target) == compilation.target.to_json()
        scratch = generated.scratch if same_target else manifest.scratch
        if not check_tables(self.report, manifest, generated.weights, generated.state, scratch):
            return None, False
        read = compilation.imported.checkpoint.read
        same = check_bits(self.report, artifact, generated.expressions, read, self.progress)
        return compilation, same
