"""What storing the weights in their format costs, beside what compiling them does.

The compiled model against PyTorch in float32 on the checkpoint's own weights: how far apart the
distributions of the next token are, and how well each expects a text that neither has seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from bessemer.artifact.manifest import Manifest
from bessemer.errors import ArtifactError
from bessemer.runtime.tokenizer import Tokenizer
from bessemer.verify.compare import Logits
from bessemer.verify.divergence import kl_divergence, perplexity
from bessemer.verify.report import NUMBERS, Outcome, Report
from bessemer.verify.trials import Trial

# Written for this purpose, so that it is in no model's training data: tales, facts, code.
TEXT = Path(__file__).with_name("text.txt")


@dataclass(frozen=True)
class Allowed:
    """mean, worst: KL divergence of the rows in nats.  perplexity: its change, as a share."""

    mean: float
    worst: float
    perplexity: float


# By the format of the weights, about twenty times what SmolLM2-135M shows on the text: small
# models suffer most, and others have larger outliers. Measured (mean and worst KL, perplexity):
# f16 2e-6, 2e-5, 0.00 %; bf16 5e-5, 3e-4, -0.12 %; q8_0 1.2e-3, 1.6e-2, +0.03 %. What is beyond is
# no rounding. With f32 weights there is the f16 cache alone, which is as exact as f16 weights.
ALLOWED: Mapping[str, Allowed] = MappingProxyType(
    {
        "f32": Allowed(1e-4, 1e-2, 0.005),
        "f16": Allowed(1e-4, 1e-2, 0.005),
        "bf16": Allowed(1e-3, 1e-1, 0.02),
        "q8_0": Allowed(2e-2, 1.0, 0.02),
    }
)


def text_ids(folder: Path, manifest: Manifest) -> list[int]:
    """The text in the model's tokens; none where it has no tokenizer that fits."""
    try:
        ids = Tokenizer.load(folder).encode(TEXT.read_text(encoding="utf-8"))
    except ArtifactError:
        return []
    return ids if max(ids, default=0) < manifest.vocab_size else []


def sample_of(trials: Sequence[Trial]) -> Trial:
    """The text, or else the longest prompt of which every row is there."""
    whole = [t for t in trials if t.sections[0].first == 0]
    return max(whole, key=lambda t: (t.is_text, t.prompt))


def check_quality(report: Report, trial: Trial, weights: str, reference: Logits) -> None:
    """Add what the format of the weights costs on a trial's first section, all rows of a prompt.

    reference: on the checkpoint's own weights.
    """
    section, allowed = trial.sections[0], ALLOWED[weights]
    ids = trial.ids[: section.length]
    expected = np.asarray(reference(ids))

    def divergence() -> Outcome:
        rows = [kl_divergence(*pair) for pair in zip(expected, section.logits, strict=True)]
        mean, worst = float(np.mean(rows)), float(np.max(rows))
        report.measured |= {"kl_mean": mean, "kl_max": worst, "kl_tokens": len(rows)}
        detail = (
            f"mean {mean:.1e} nats (at most {allowed.mean:g}), worst {worst:.1e} (at most "
            f"{allowed.worst:g}), {len(rows)} rows of "
        )
        detail += "text" if trial.is_text else "random tokens"
        return mean <= allowed.mean and worst <= allowed.worst, detail

    def change() -> Outcome:
        ours, theirs = perplexity(section.logits, ids), perplexity(expected, ids)
        report.measured |= {"perplexity": ours, "perplexity_of_checkpoint": theirs}
        share = ours / theirs - 1
        detail = f"{ours:.3f}, the checkpoint's {theirs:.3f}: {100 * share:+.2f} % (at most "
        return abs(share) <= allowed.perplexity, f"{detail}{100 * allowed.perplexity:g} %)"

    report.attempt(NUMBERS, "KL of stored weights", divergence)
    if trial.is_text:
        report.attempt(NUMBERS, "perplexity", change)
