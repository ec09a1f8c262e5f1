"""`verify`: three layers of checks, each building on the ones before."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.artifact.reader import Artifact, Check, verify_files
from bessemer.errors import ArtifactError, BessemerError, UsageError
from bessemer.verify.compare import (
    Comparison,
    compare_trials,
    report_comparisons,
    tolerance_of,
)
from bessemer.verify.files import check_files, check_manifest, check_symbols
from bessemer.verify.memory import check_bits, check_hashes, check_layouts, check_tables
from bessemer.verify.model import compile_again, find_source
from bessemer.verify.reference import (
    Reference,
    graph_reference,
    kept_graphs,
    torch_reference,
)
from bessemer.verify.report import FILES, MEMORY, NUMBERS, STAGES, Report
from bessemer.verify.stored import StoredTensors
from bessemer.verify.trials import Trial, TrialPlan, run_trials

if TYPE_CHECKING:
    from bessemer.compiler import Compilation, CompileOptions

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
    when a model can't be found or compiled, UsageError for lengths or steps that make no sense.
    """
    if any(n < 1 for n in lengths) or not lengths or decode_steps < 0:
        raise UsageError("verify needs prompt lengths of at least 1, and no negative decode steps")
    with _compiled(path_or_model, checkpoint, options, progress) as (folder, source):
        report = Report(f"verification of {folder}")
        plan = Verification(report, tuple(lengths), decode_steps, threads, progress)
        plan.run(folder, source)
    return report


@contextlib.contextmanager
def _compiled(
    model: Any, checkpoint: Any, options: CompileOptions | None, progress: Progress
) -> Iterator[tuple[Path, Any]]:
    """The artifact to verify, and what it is to be compared with."""
    if isinstance(model, (str, Path)) and looks_like_artifact(Path(model).expanduser()):
        yield Path(model).expanduser(), checkpoint
        return
    from bessemer.api import compile_to, prepare
    from bessemer.compiler import CompileOptions

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

    def run(self, folder: Path, source: Any) -> None:
        artifact = check_manifest(self.report, folder)
        if artifact is None:
            return
        whole = self._files(artifact)
        found = find_source(artifact.manifest, source)
        compilation = self._again(artifact, found.source, given=source is not None)
        if whole and compilation is not None:
            self._compare_tables(artifact, compilation)
        self._numbers(artifact, compilation, found.reason, whole)

    # -- files and memory --------------------------------------------------------------------------

    def _files(self, artifact: Artifact) -> bool:
        """Layers 1 and 2 without the source; whether the model may be loaded."""
        found = self._integrity(artifact)
        whole = check_files(self.report, artifact, found)
        check_symbols(self.report, artifact)
        runs = check_layouts(self.report, artifact)
        if any(c.name.startswith("weight ") for c in found):
            whole &= check_hashes(self.report, found)
        return whole and runs

    def _integrity(self, artifact: Artifact) -> list[Check]:
        try:
            return verify_files(artifact, lambda done, total: self.progress("hash", done, total))
        except (BessemerError, OSError, ValueError, KeyError) as error:
            return [Check("weight table", False, str(error))]

    def _again(self, artifact: Artifact, source: Any, *, given: bool) -> Compilation | None:
        """The source compiled again up to MLIR; None when there is no source."""
        if source is None:
            return None
        self.progress("compile", 0, 1)
        try:
            return compile_again(source, artifact.manifest)
        except Exception as error:
            name = "checkpoint" if given else "source"
            self.report.add(MEMORY, name, False, f"{type(error).__name__}: {error}")
            return None
        finally:
            self.progress("compile", 1, 1)

    def _compare_tables(self, artifact: Artifact, compilation: Compilation) -> None:
        generated, manifest = compilation.generated, artifact.manifest
        same_target = dict(manifest.target) == compilation.target.to_json()
        scratch = generated.scratch if same_target else manifest.scratch
        check_tables(self.report, manifest, generated.weights, generated.state, scratch)
        check_bits(
            self.report,
            artifact,
            generated.expressions,
            compilation.imported.checkpoint.read,
            self.progress,
        )

    # -- numbers -----------------------------------------------------------------------------------

    def _numbers(
        self, artifact: Artifact, compilation: Compilation | None, reason: str, whole: bool
    ) -> None:
        if not whole:
            failed = ", ".join(c.name for c in self.report.failed if c.layer in (FILES, MEMORY))
            self.report.add(NUMBERS, "logits", False, f"not run: {failed} failed")
            return
        manifest = artifact.manifest
        plan = TrialPlan.for_model(manifest, self.lengths, self.decode_steps)
        trials: list[Trial] = []

        def run() -> tuple[bool, str]:
            self.progress("run", 0, plan.trials())
            trials.extend(
                run_trials(
                    artifact,
                    plan,
                    threads=self.threads,
                    progress=lambda d, n: self.progress("run", d, n),
                )
            )
            tokens = sum(len(t.ids) for t in trials)
            return bool(trials), f"{len(trials)} prompts, {tokens} tokens, all logits finite"

        if not self.report.attempt(NUMBERS, "run", run):
            return
        references: list[tuple[Reference, StoredTensors]] = []

        def prepare() -> tuple[bool, str]:
            self.progress("reference", 0, len(trials))
            references.append(self._reference(artifact, compilation))
            reference, tensors = references[0]
            detail = f"{reference.name}, on the stored weights"
            if tensors.fallen_back:
                names = ", ".join(list(tensors.fallen_back)[:3])
                detail += f"; {len(tensors.fallen_back)} from the checkpoint: {names}"
            return True, detail + (f"; PyTorch's model: {reason}" if reason else "")

        if not self.report.attempt(NUMBERS, "reference", prepare):
            return
        reference, tensors = references[0]
        comparisons: list[Comparison] = []

        def compare() -> tuple[bool, str]:
            comparisons.extend(
                compare_trials(
                    trials,
                    reference.logits,
                    tolerance_of(manifest),
                    manifest.rope,
                    lambda d, n: self.progress("reference", d, n),
                )
            )
            rows = sum(c.rows for c in comparisons)
            return rows > 0, f"{rows} rows of logits"

        if not self.report.attempt(NUMBERS, "compared", compare):
            return
        if not report_comparisons(self.report, comparisons) and compilation is not None:
            self._locate(artifact, compilation, reference, tensors, comparisons)

    def _reference(
        self, artifact: Artifact, compilation: Compilation | None
    ) -> tuple[Reference, StoredTensors]:
        if compilation is not None:
            imported = compilation.imported
            tensors = StoredTensors(
                artifact, compilation.generated.expressions, imported.checkpoint.read
            )
            return torch_reference(imported, tensors.read, self.threads), tensors
        graphs = kept_graphs(artifact)
        tensors = StoredTensors(artifact, graphs.expressions)
        return graph_reference(graphs.imported, tensors.read), tensors

    def _locate(
        self,
        artifact: Artifact,
        compilation: Compilation,
        reference: Reference,
        tensors: StoredTensors,
        comparisons: Sequence[Comparison],
    ) -> None:
        """Find where the first wrong row becomes wrong, on the shortest input that shows it."""
        from bessemer.verify.locate import Case, Locator

        cases = []
        for comparison in comparisons:
            if not comparison.ok and comparison.worst_in is not None:
                trial, section = comparison.worst_in
                ids = trial.ids[: section.length]
                cases.append(Case(tuple(ids), section.pieces, section.steps))
        case = min(cases, key=lambda c: (c.steps > 0, len(c.pieces), len(c.ids)))
        self.progress("locate", 0, 1)
        try:
            Locator(
                self.report,
                compilation,
                artifact,
                tensors.read,
                reference.logits,
                tolerance_of(artifact.manifest),
                case,
                self.threads,
            ).run()
        except Exception as error:
            self.report.add(
                STAGES, "first difference", False, f"not found: {type(error).__name__}: {error}"
            )
        self.progress("locate", 1, 1)


__all__ = ["ArtifactError", "Progress", "Verification", "looks_like_artifact", "verify"]
