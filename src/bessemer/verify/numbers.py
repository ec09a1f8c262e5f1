"""Layer 3: numbers.

Logits of prefill and decode against the reference, on the weights that the artifact stores. Where
they differ, the first stage and op at which they do is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bessemer.artifact.reader import Artifact
from bessemer.verify.compare import (
    Comparison,
    compare_trials,
    kl_tolerance_of,
    report_comparisons,
    tolerance_of,
)
from bessemer.verify.quality import check_quality, sample_of
from bessemer.verify.reference import (
    Reference,
    graph_reference,
    kept_graphs,
    torch_reference,
    torch_threads,
)
from bessemer.verify.report import NUMBERS, STAGES, Outcome, Report
from bessemer.verify.stored import StoredTensors
from bessemer.verify.trials import Trial, TrialPlan, run_trials
from bessemer.weight_formats import DEFAULT_FORMAT

if TYPE_CHECKING:
    from bessemer.compiler import Compilation

Progress = Callable[[str, int, int], None]
TENSORS_SHOWN = 3


@dataclass
class Numbers:
    """The comparison of one artifact.

    compilation: its source compiled again; None where there is no source, for the `reason` given.
    same_weights: whether what is stored is what that source gives.
    """

    report: Report
    artifact: Artifact
    plan: TrialPlan
    compilation: Compilation | None
    reason: str
    same_weights: bool
    threads: int | None
    progress: Progress

    def check(self) -> None:
        """Run both, compare, and look closer at what differs."""
        with torch_threads(self.threads if self.compilation is not None else None):
            self._check()

    def _check(self) -> None:
        trials: list[Trial] = []
        if not self.report.attempt(NUMBERS, "run", lambda: self._run(trials)):
            return
        # Of the text only the distributions are looked at, against the checkpoint's own weights: in
        # hundreds of rows an f16 cache alone is beyond the bound of single ones now and then.
        self._on_stored_weights([trial for trial in trials if not trial.is_text])
        if self.compilation is not None and self.same_weights:
            self._on_own_weights(self.compilation, sample_of(trials))

    def _on_stored_weights(self, trials: Sequence[Trial]) -> None:
        found: list[tuple[Reference, StoredTensors]] = []
        if not self.report.attempt(NUMBERS, "reference", lambda: self._prepare(found)):
            return
        reference, tensors = found[0]
        comparisons: list[Comparison] = []

        def compare() -> Outcome:
            comparisons.extend(self._compare(trials, reference))
            rows = sum(c.rows for c in comparisons)
            return rows > 0, f"{rows} rows of logits of {len(trials)} prompts"

        if not self.report.attempt(NUMBERS, "compared", compare):
            return
        if not report_comparisons(self.report, comparisons) and self.compilation is not None:
            self._locate(self.compilation, reference, tensors, comparisons)

    def _run(self, trials: list[Trial]) -> Outcome:
        """The compiled model's part; its weights are released before the reference is loaded."""
        stage = "running the model"
        self.progress(stage, 0, self.plan.trials())
        trials += run_trials(
            self.artifact,
            self.plan,
            threads=self.threads,
            progress=lambda done, total: self.progress(stage, done, total),
        )
        tokens = sum(len(t.ids) for t in trials)
        return bool(trials), f"{len(trials)} prompts, {tokens} tokens, all logits finite"

    def _prepare(self, found: list[tuple[Reference, StoredTensors]]) -> Outcome:
        reference, tensors = self._reference()
        found.append((reference, tensors))
        detail = f"{reference.name}, on the stored weights"
        if tensors.fallen_back:
            names = ", ".join(list(tensors.fallen_back)[:TENSORS_SHOWN])
            detail += f" but for {len(tensors.fallen_back)} of the checkpoint: {names}"
        return True, detail + (f"; not PyTorch: {self.reason}" if self.reason else "")

    def _reference(self) -> tuple[Reference, StoredTensors]:
        if self.compilation is None:
            graphs = kept_graphs(self.artifact)
            tensors = StoredTensors(self.artifact, graphs.expressions)
            return graph_reference(graphs.imported, tensors.read), tensors
        imported, generated = self.compilation.imported, self.compilation.generated
        tensors = StoredTensors(self.artifact, generated.expressions, imported.checkpoint.read)
        return torch_reference(imported, tensors.read), tensors

    def _compare(self, trials: Sequence[Trial], reference: Reference) -> list[Comparison]:
        manifest, stage = self.artifact.manifest, "running the reference"
        self.progress(stage, 0, len(trials))
        return compare_trials(
            trials,
            reference.logits,
            tolerance_of(manifest),
            manifest.rope,
            lambda done, total: self.progress(stage, done, total),
            kl_tolerance_of(manifest),
        )

    def _on_own_weights(self, compilation: Compilation, trial: Trial) -> None:
        """What storing the weights costs. The reference on the stored ones is released by now."""
        imported, stage = compilation.imported, "running the checkpoint's own weights"
        weights = str(self.artifact.manifest.options.get("weights") or DEFAULT_FORMAT)
        self.progress(stage, 0, 1)
        try:
            logits = torch_reference(imported, imported.checkpoint.read).logits
            check_quality(self.report, trial, weights, logits)
        except Exception as error:  # a checkpoint may be damaged in any way
            self.report.add(NUMBERS, "checkpoint", False, f"{type(error).__name__}: {error}")
        self.progress(stage, 1, 1)

    def _locate(
        self,
        compilation: Compilation,
        reference: Reference,
        tensors: StoredTensors,
        comparisons: Sequence[Comparison],
    ) -> None:
        """Find where the first wrong row becomes wrong, on the simplest input that shows it."""
        from bessemer.verify.locate import Case, Locator

        cases = []
        for comparison in comparisons:
            if not comparison.ok and comparison.worst_in is not None:
                trial, section = comparison.worst_in
                ids = tuple(trial.ids[: section.length])
                cases.append(Case(ids, section.pieces, section.steps))
        locator = Locator(
            self.report,
            compilation,
            self.artifact,
            tensors.read,
            reference.logits,
            tolerance_of(self.artifact.manifest),
            min(cases, key=lambda c: (c.steps > 0, len(c.pieces), len(c.ids))),
            self.threads,
        )
        self.progress("looking closer", 0, 1)
        try:
            locator.run()
        except Exception as error:  # it runs what has just been found to be wrong
            detail = f"not found: {type(error).__name__}: {error}"
            self.report.add(STAGES, "first difference", False, detail)
        self.progress("looking closer", 1, 1)
