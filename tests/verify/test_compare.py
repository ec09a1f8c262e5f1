"""Comparing logits: errors, tolerances, near ties, and rotary regimes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from bessemer.artifact.manifest import RopeSwitch
from bessemer.verify.compare import Comparison, compare_trials, relative_l2
from bessemer.verify.trials import Section, Trial

VOCAB = 64


def reference(ids: Sequence[int]) -> np.ndarray:
    """Logits that depend on the ids so far and on the length of the sequence."""
    rows = [
        np.random.default_rng([*ids[: i + 1], 99]).standard_normal(VOCAB) for i in range(len(ids))
    ]
    return np.asarray(rows, np.float32)


def trial(error: float = 0.0, steps: int = 2) -> Trial:
    """A prompt of four and some decode steps, each logit off by a share of the row's size."""
    ids = [5, 3, 8, 1]
    found = Trial(list(ids))
    found.ids += [7] * steps
    exact = reference(found.ids)
    noise = np.random.default_rng(1).standard_normal(exact.shape).astype(np.float32)
    sizes = [np.linalg.norm(x, axis=1, keepdims=True) for x in (exact, noise)]
    ours = exact + noise * error * sizes[0] / sizes[1]
    found.sections.append(Section("prefill 4", 0, 4, ours[:4], (4,)))
    for step in range(steps):
        row = 4 + step
        section = Section("decode", row, row + 1, ours[row : row + 1], (4,), step + 1)
        found.sections.append(section)
    return found


def test_relative_l2() -> None:
    row = np.array([3, 4], np.float32)
    assert relative_l2(row, row) == 0
    assert relative_l2(row * 1.1, row) == pytest.approx(0.1, rel=1e-5)
    assert np.isnan(relative_l2(np.array([np.inf, 0], np.float32), row))
    assert relative_l2(np.ones(2, np.float32), np.zeros(2, np.float32)) == pytest.approx(2**0.5)


@pytest.mark.parametrize(("error", "ok"), [(0.0, True), (5e-5, True), (2e-4, False)])
def test_rows_are_judged_by_the_tolerance(error: float, ok: bool) -> None:
    found = {c.name: c for c in compare_trials([trial(error)], reference, 1e-4)}
    assert {name: c.rows for name, c in found.items()} == {"prefill 4": 4, "decode": 2}
    assert all(c.ok is ok for c in found.values())
    assert found["prefill 4"].worst == pytest.approx(error, rel=1e-2, abs=1e-9)


def test_one_wrong_row_is_enough_and_is_named() -> None:
    wrong = trial()
    wrong.sections[0].logits[2] *= 1.01
    found = compare_trials([wrong], reference, 1e-4)
    assert [c.ok for c in found] == [False, True]
    assert found[0].worst_row == 2
    assert "position 2" in found[0].detail


def test_nan_is_worse_than_any_number() -> None:
    wrong = trial(1.0)
    wrong.sections[0].logits[1, 7] = np.nan
    (prefill, _) = compare_trials([wrong], reference, 1e-4)
    assert not prefill.ok
    assert prefill.worst_row == 1


@pytest.mark.parametrize(("gap", "ok"), [(1e-5, True), (1e-1, False)])
def test_another_token_fails_unless_it_is_a_tie(gap: float, ok: bool) -> None:
    exact = np.zeros(VOCAB, np.float32)
    exact[:8] = np.arange(8)
    exact[3] = exact[7] - gap
    ours = exact.copy()
    ours[3] = exact[7] + 1e-6
    comparison = Comparison("x", 1e-4)
    comparison.add(Trial([1]), Section("x", 0, 1, ours[None], (1,)), 0, exact)
    assert (not comparison.flips) is ok
    assert (comparison.greedy, comparison.near_ties) == (0, int(ok))
    if not ok:
        assert "token 3" in comparison.detail
        assert "instead of 7" in comparison.detail


def test_nothing_compared_is_not_a_success() -> None:
    assert not Comparison("x", 1e-4).ok


def test_length_dependent_rope_asks_the_reference_for_each_regime() -> None:
    asked = []

    def lengths(ids: Sequence[int]) -> np.ndarray:
        asked.append(len(ids))
        return reference(ids)

    compare_trials([trial(steps=3)], lengths, 1e-4)
    assert asked == [7]
    asked.clear()
    compare_trials([trial(steps=3)], lengths, 1e-4, RopeSwitch("longrope", 5))
    assert asked == [5, 7]
    asked.clear()
    compare_trials([trial(steps=3)], lengths, 1e-4, RopeSwitch("dynamic", 4))
    assert asked == [4, 5, 6, 7]
