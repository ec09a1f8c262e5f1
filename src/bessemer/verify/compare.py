"""Comparing logits: relative L2 error, and whether greedy decoding takes the same token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bessemer.artifact.manifest import Manifest, RopeSwitch
from bessemer.verify.divergence import kl_divergence
from bessemer.verify.report import NUMBERS, Report
from bessemer.verify.trials import Section, Trial

F32 = npt.NDArray[np.float32]
Logits = Callable[[Sequence[int]], np.ndarray]  # ids to float32 [len(ids), vocab]

# Relative L2 error of a row of logits against PyTorch float32 on the same weights. Sums in f32 in
# another order give about 1e-6, so 1e-4 leaves room for deep models and peaked attention and is
# far below what any wrong operation gives.
F32_TOLERANCE = 1e-4
# Keys and values rounded to f16 carry a relative error of up to 2^-11 = 5e-4 each.
F16_KV_TOLERANCE = 2e-3
# Activations that meet q8_0 weights are 16-bit integers, each off by up to 2^-15 of the largest of
# its block of 32. Beside an outlier that is much for the others: SmolLM2 reaches 8e-4 with an f32
# cache (and its float formats 1e-5). Activations of 8 bits would give 256 times as much.
INTEGER_TOLERANCE = 2e-3
# What they, and an f16 cache, may cost the distribution of a token, in nats. SmolLM2 reaches 1.2e-5
# (3e-6 without that cache); rounding its weights to 8 bits costs the worst token 1.6e-2.
INTEGER_KL = 2e-4
# Two tokens tie when rounding may swap them: their logits differ by less than this many times the
# error that the tolerance grants to one logit (as a root mean square over the vocabulary).
NEAR_TIE_ERRORS = 6.0


@dataclass
class Comparison:
    """Errors of the rows under one name. worst: the largest, in which trial and section of it.
    kl_tolerance: of the KL divergence of a row, in nats; None where it isn't looked at.
    """

    name: str
    tolerance: float
    kl_tolerance: float | None = None
    rows: int = 0
    worst: float = 0.0
    worst_row: int = -1
    worst_in: tuple[Trial, Section] | None = None
    worst_kl: float = 0.0
    greedy: int = 0
    near_ties: int = 0
    flips: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        near = self.worst <= self.tolerance and self._kl_is_small
        return self.rows > 0 and near and not self.flips

    @property
    def _kl_is_small(self) -> bool:
        return self.kl_tolerance is None or self.worst_kl <= self.kl_tolerance

    @property
    def detail(self) -> str:
        text = f"relative L2 {self.worst:.1e} (at most {self.tolerance:.0e}), "
        if self.kl_tolerance is not None:
            text += f"KL {self.worst_kl:.1e} nats (at most {self.kl_tolerance:.0e}), "
        text += f"greedy {self.greedy} of {self.rows}"
        if self.near_ties:
            text += f" and {self.near_ties} near ties"
        if not self.worst <= self.tolerance:
            text += f"; the worst is position {self.worst_row}"
        return "; ".join([text, *self.flips[:3]])

    def add(self, trial: Trial, section: Section, row: int, reference: F32) -> None:
        """Compare a row of a section with the reference's logits of the same token, [vocab]."""
        ours = section.logits[row - section.first]
        error = relative_l2(ours, reference)
        self.rows += 1
        # NaN is worse than any number.
        if self.worst_in is None or np.isnan(error) or error > self.worst:
            self.worst, self.worst_row, self.worst_in = error, row, (trial, section)
        if self.kl_tolerance is not None:
            divergence = kl_divergence(reference, ours)
            if np.isnan(divergence) or divergence > self.worst_kl:
                self.worst_kl = divergence
        took, right = int(np.argmax(ours)), int(np.argmax(reference))
        if took == right:
            self.greedy += 1
        elif _near_tie(reference, took, right, self.tolerance):
            self.near_ties += 1
        else:
            self.flips.append(
                f"position {row}: token {took} ({float(reference[took]):.4g} in the reference) "
                f"instead of {right} ({float(reference[right]):.4g})"
            )


def relative_l2(ours: np.ndarray, reference: np.ndarray) -> float:
    """|ours - reference| / |reference|; NaN where ours is not finite."""
    wide, exact = ours.astype(np.float64), reference.astype(np.float64)
    if not np.isfinite(wide).all():
        return float("nan")
    size = float(np.linalg.norm(exact))
    return float(np.linalg.norm(wide - exact)) / (size or 1.0)


def _near_tie(reference: F32, took: int, right: int, tolerance: float) -> bool:
    """Whether an error within the tolerance may swap two tokens."""
    typical = float(np.sqrt(np.mean(np.square(reference, dtype=np.float64))))
    distance = float(reference[right]) - float(reference[took])
    return distance <= NEAR_TIE_ERRORS * tolerance * typical


def tolerance_of(manifest: Manifest) -> float:
    """Of the relative L2 error of a row."""
    cache = F16_KV_TOLERANCE if manifest.state.kv_dtype == "f16" else F32_TOLERANCE
    return cache + (INTEGER_TOLERANCE if has_integer_activations(manifest) else 0.0)


def kl_tolerance_of(manifest: Manifest) -> float | None:
    """Of the KL divergence of a row; None where the relative L2 error says enough."""
    return INTEGER_KL if has_integer_activations(manifest) else None


def has_integer_activations(manifest: Manifest) -> bool:
    return any(weight.dtype == "q8_0" for weight in manifest.weights)


def compare_trials(
    trials: Sequence[Trial],
    reference: Logits,
    tolerance: float,
    rope: RopeSwitch | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    kl_tolerance: float | None = None,
) -> list[Comparison]:
    """One comparison for each name of a section. The reference runs once over a trial's whole
    sequence, or once for each set of rotary factors that its sections were computed with.
    """
    found: dict[str, Comparison] = {}
    for t, trial in enumerate(trials):
        for length, sections in _by_length(trial, rope):
            expected = np.asarray(reference(trial.ids[:length]))
            for section in sections:
                comparison = found.setdefault(
                    section.name, Comparison(section.name, tolerance, kl_tolerance)
                )
                for i in range(len(section.logits)):
                    row = section.first + i
                    comparison.add(trial, section, row, expected[row])
            del expected
        progress(t + 1, len(trials))
    return list(found.values())


def _by_length(trial: Trial, rope: RopeSwitch | None) -> Iterable[tuple[int, list[Section]]]:
    """The sections of a trial, by the length of the sequence that the reference has to see."""
    if rope is None:
        return [(len(trial.ids), trial.sections)]
    regimes: dict[int, list[Section]] = {}
    for section in trial.sections:
        regimes.setdefault(rope.regime(section.length), []).append(section)
    return [(max(s.length for s in sections), sections) for sections in regimes.values()]


def report_comparisons(report: Report, comparisons: Sequence[Comparison]) -> bool:
    for comparison in comparisons:
        report.add(NUMBERS, comparison.name, comparison.ok, comparison.detail)
    return bool(comparisons) and all(c.ok for c in comparisons)
