"""KL divergence and perplexity, and what a format of weights may cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from bessemer.artifact.reader import read_manifest
from bessemer.cli import main
from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from bessemer.verify import quality
from bessemer.verify.compare import Comparison
from bessemer.verify.divergence import kl_divergence, perplexity
from bessemer.verify.quality import ALLOWED, TEXT, check_quality, sample_of, text_ids
from bessemer.verify.report import Report
from bessemer.verify.trials import TEXT_TOKENS, Section, Trial, TrialPlan
from bessemer.weight_formats import WEIGHT_FORMATS
from tests.behaviours.models import save_folder, text_model

VOCAB, COUNT = 40, 12


def test_kl_of_two_coins() -> None:
    fair = np.log(np.array([0.5, 0.5], np.float32))
    bent = np.log(np.array([0.9, 0.1], np.float32))
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert kl_divergence(fair, bent) == pytest.approx(expected, rel=1e-6)
    assert kl_divergence(bent, fair) != pytest.approx(expected, rel=1e-2)
    assert kl_divergence(fair, bent + 7) == pytest.approx(expected, rel=1e-6)  # not of the size
    assert kl_divergence(bent, bent) == 0
    assert kl_divergence(bent, np.array([0, -1e4], np.float32)) > 100  # no overflow
    assert math.isnan(kl_divergence(fair, np.array([0, np.nan], np.float32)))
    assert math.isnan(kl_divergence(fair, np.array([0, np.inf], np.float32)))


def test_perplexity_is_that_of_the_tokens_after() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    assert perplexity(logits, [1, 2, 3, 4]) == pytest.approx(VOCAB)
    logits[np.arange(3), [2, 3, 4]] = 100
    assert perplexity(logits, [1, 2, 3, 4]) == pytest.approx(1)
    logits[3] = np.nan  # the last row expects what the text doesn't say
    assert perplexity(logits, [1, 2, 3, 4]) == pytest.approx(1)


def test_comparisons_judge_kl_where_a_bound_is_given() -> None:
    exact = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)
    ours = exact * np.float32(1.001)
    section = Section("x", 0, 1, ours[None], (1,))
    for bound, ok in ((None, True), (1e-5, True), (1e-8, False)):
        comparison = Comparison("x", 1e-2, bound)
        comparison.add(Trial([1]), section, 0, exact)
        assert comparison.ok is ok, bound
        assert ("nats" in comparison.detail) is (bound is not None)
    wrong = Comparison("x", math.inf, 1e-3)
    wrong.add(Trial([1]), Section("x", 0, 1, ours[None] * np.nan, (1,)), 0, exact)
    assert not wrong.ok


# --- on logits ------------------------------------------------------------------------------------


def reference(ids: Sequence[int]) -> np.ndarray:
    rows = [np.random.default_rng([*ids[: i + 1]]).standard_normal(VOCAB) for i in range(len(ids))]
    return 3 * np.asarray(rows, np.float32)


def checked(
    change: Callable[[np.ndarray], np.ndarray], weights: str = "q8_0", is_text: bool = True
) -> Report:
    ids = list(range(COUNT))
    logits = change(reference(ids)).astype(np.float32)
    trial = Trial(ids, [Section("text", 0, COUNT, logits, (COUNT,))], is_text)
    report = Report("model")
    check_quality(report, trial, weights, reference)
    return report


def noise(size: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x + size * np.random.default_rng(1).standard_normal(x.shape)


def test_what_rounding_costs_is_allowed_by_format() -> None:
    assert set(ALLOWED) == set(WEIGHT_FORMATS)
    assert checked(noise(1e-5), "f32").ok
    assert checked(noise(0.02), "q8_0").ok
    assert not checked(noise(0.1), "f16").ok
    assert not checked(noise(1.0), "q8_0").ok
    assert not checked(lambda x: x * np.nan, "q8_0").ok


def test_one_row_is_enough() -> None:
    def one_row(x: np.ndarray) -> np.ndarray:
        x[-1] = -x[-1]  # no token comes after it: the perplexity is the same
        return x

    report = checked(one_row)
    assert [c.name for c in report.failed] == ["KL of stored weights"]
    assert report.measured["perplexity"] == report.measured["perplexity_of_checkpoint"]


def test_a_worse_text_is_told_by_its_perplexity() -> None:
    def duller(x: np.ndarray) -> np.ndarray:
        x[np.arange(COUNT - 1), np.arange(1, COUNT)] -= 0.1
        return x

    report = checked(duller)
    assert [c.name for c in report.failed] == ["perplexity"]
    share = report.measured["perplexity"] / report.measured["perplexity_of_checkpoint"]
    assert 1.05 < share < math.exp(0.1)


def test_random_tokens_have_no_perplexity() -> None:
    report = checked(noise(1e-3), is_text=False)
    assert [c.name for c in report.checks] == ["KL of stored weights"]
    assert "random tokens" in report.checks[0].detail
    assert set(report.measured) == {"kl_mean", "kl_max", "kl_tokens"}


def test_a_number_that_is_none_is_null() -> None:
    assert checked(lambda x: x * np.nan).to_json()["measured"]["kl_mean"] is None


def test_the_text_is_taken_before_the_longest_prompt() -> None:
    def trial(length: int, first: int = 0, is_text: bool = False) -> Trial:
        logits = np.zeros((length - first, VOCAB), np.float32)
        return Trial([1] * length, [Section("x", first, length, logits, (length,))], is_text)

    prompts = [trial(3), trial(9), trial(99, first=98), trial(7)]
    assert sample_of(prompts) is prompts[1]
    assert sample_of([*prompts, text := trial(4, is_text=True)]) is text


# --- on a model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a tokenizer, its weights in 8 bits."""
    folder = tmp_path_factory.mktemp("quality")
    options = CompileOptions("q8_0", "f32", context=48, chunk=16)
    return compile_model(save_folder(folder / "llama", text_model()), options, folder / "q8_0")


def test_verify_shows_what_the_format_costs(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["verify", str(artifact), "--json", "--lengths", "3", "--decode-steps", "1"]
    code = main(arguments)
    report = json.loads(capsys.readouterr().out)
    checks = {c["name"]: c for c in report["checks"]}
    assert code == 0, [c for c in report["checks"] if not c["ok"]]
    assert "48 rows of text" in checks["numbers: KL of stored weights"]["detail"]
    assert "numbers: perplexity" in checks
    assert "numbers: text of 48 tokens" not in checks  # no row of it is judged by itself
    assert "nats" in checks["numbers: prefill 3"]["detail"]
    measured = report["measured"]
    # 8 bits differ from float32, but not by much.
    assert 1e-8 < measured["kl_mean"] < ALLOWED["q8_0"].mean
    assert measured["kl_tokens"] == 48
    assert measured["perplexity"] != measured["perplexity_of_checkpoint"]

    monkeypatch.setattr(quality, "ALLOWED", {"q8_0": quality.Allowed(0, 0, 0)})
    assert main(arguments) == 1
    report = json.loads(capsys.readouterr().out)
    failed = [c["name"] for c in report["checks"] if not c["ok"]]
    assert failed == ["numbers: KL of stored weights", "numbers: perplexity"]


def test_the_text_fits_the_model(artifact: Path, tmp_path: Path) -> None:
    manifest = read_manifest(artifact)
    ids = text_ids(artifact, manifest)
    assert len(ids) > TEXT_TOKENS
    assert TrialPlan.for_model(manifest, (3,), 1, ids).text == tuple(ids[:48])
    assert text_ids(tmp_path, manifest) == []  # no tokenizer
    assert TrialPlan.for_model(manifest, (3,), 1, []).text == ()


def test_the_text_is_plain_and_long_enough() -> None:
    text = TEXT.read_text(encoding="utf-8")
    assert text.isascii()
    assert len(text.split()) > TEXT_TOKENS
