"""Sampling: the rows S01 to S12 and T15 of BEHAVIOURS, the filters, and bad input."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bessemer.errors import GenerationError, UsageError
from bessemer.runtime.sampling import Sampler, SamplingOptions, logprobs, penalise


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def sampler(vocab: int, banned: tuple[int, ...] = (), **options: Any) -> Sampler:
    return Sampler(SamplingOptions(**options), vocab, banned)


def ids_of(logits: np.ndarray, **options: Any) -> list[int]:
    ids, probs = sampler(logits.size, **options).distribution(logits)
    assert probs.sum() == pytest.approx(1.0, abs=1e-12)
    assert (probs > 0).all()
    return ids.tolist()


finite_rows = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    elements=st.one_of(
        st.floats(-30, 30, width=32),
        st.sampled_from([np.float32(0), np.float32(1), np.float32(-np.inf)]),
    ),
).filter(lambda logits: bool(np.isfinite(logits).any()))


# -- greedy ------------------------------------------------------------------------------------


def test_s01_greedy_takes_the_lowest_id_of_a_tie() -> None:
    greedy = sampler(3)
    assert [greedy.sample(row(1, 3, 3)) for _ in range(20)] == [1] * 20
    for seed in range(20):
        assert sampler(3, seed=seed).sample(row(1, 3, 3)) == 1


@given(finite_rows)
def test_greedy_is_argmax_on_every_path(logits: np.ndarray) -> None:
    best = int(np.argmax(logits))
    assert sampler(logits.size).sample(logits) == best
    # A bias of 0 takes the way through float64.
    assert sampler(logits.size, logit_bias={0: 0.0}).sample(logits) == best
    assert ids_of(logits, temperature=0.0) == [best]


def test_s02_tiny_temperature_is_argmax() -> None:
    logits = row(1.0, 2.0, 2.001, -5.0)
    for temperature in (1e-6, 1e-30, 5e-324):
        for seed in range(50):
            assert sampler(4, temperature=temperature, seed=seed).sample(logits) == 2


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("bias", [{}, {1: 2.0}])
def test_s02_all_minus_infinity_is_an_error(temperature: float, bias: dict[int, float]) -> None:
    drawn = sampler(4, temperature=temperature, logit_bias=bias)
    with pytest.raises(GenerationError, match="no token is left"):
        drawn.sample(np.full(4, -np.inf, np.float32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 2, 5])
def test_n02_nan_logits_are_an_error(temperature: float, place: int) -> None:
    logits = row(1, 2, 3, 4, 5, 6)
    logits[place] = np.nan
    # Also past the tokenizer's end: a NaN anywhere means that the model's numbers are broken.
    with pytest.raises(GenerationError, match="NaN"):
        sampler(4, temperature=temperature).sample(logits)


def test_infinite_logits_are_an_error() -> None:
    with pytest.raises(GenerationError, match=r"infinity \(token 1\)"):
        sampler(3, temperature=1.0).sample(row(0, np.inf, 0))


@pytest.mark.parametrize("shape", [(), (0,), (1, 4)])
def test_logits_must_be_one_row(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="one row"):
        sampler(4).sample(np.zeros(shape, np.float32))


# -- the edge of the vocabulary ----------------------------------------------------------------


def test_t15_ids_past_the_tokenizer_are_never_returned() -> None:
    logits = np.zeros(151936, np.float32)
    logits[151800] = 50.0
    logits[7] = 1.0
    assert sampler(151665).sample(logits) == 7
    assert sampler(151665, repeat_penalty=1.1).sample(logits, [151800]) == 7
    for seed in range(30):
        drawn = sampler(151665, temperature=5.0, seed=seed)
        assert drawn.sample(logits) < 151665


def test_holes_in_the_vocabulary_are_never_returned() -> None:
    logits = row(0, 9, 1, 9)
    assert sampler(4, banned=(1, 3)).sample(logits) == 2
    ids, _ = sampler(4, banned=(1, 3), temperature=1.0).distribution(logits)
    assert ids.tolist() == [0, 2]


def test_a_row_shorter_than_the_limit() -> None:
    drawn = sampler(10, banned=(8,), temperature=1.0, logit_bias={9: 3.0}, seed=1)
    assert drawn.sample(row(0, 0, 0), [9, 2]) in {0, 1, 2}


# -- filters -----------------------------------------------------------------------------------


def test_s03_top_k_above_the_vocabulary() -> None:
    assert ids_of(row(1, 2, 3, 4, 5), temperature=1.0, top_k=50) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("top_k", [0, -1])
def test_s04_top_k_off_gives_many_ids(top_k: int) -> None:
    flat = np.zeros(100, np.float32)
    drawn = {
        sampler(100, temperature=1.0, top_k=top_k, seed=seed).sample(flat) for seed in range(200)
    }
    assert len(drawn) > 50


def test_top_k_keeps_lower_ids_of_a_tie() -> None:
    assert ids_of(row(1, 5, 1, 1, 7), temperature=1.0, top_k=3) == [0, 1, 4]
    assert ids_of(row(2, 2, 2), temperature=1.0, top_k=1) == [0]


@pytest.mark.parametrize("top_p", [0.0, 0.01])
def test_s12_top_p_keeps_the_dominant_token(top_p: float) -> None:
    assert ids_of(row(0, 20, 0, 0), temperature=1.0, top_p=top_p) == [1]


def test_s12_ties_under_top_p_go_to_lower_ids() -> None:
    assert ids_of(np.zeros(4, np.float32), temperature=1.0, top_p=0.5) == [0, 1]
    assert ids_of(np.zeros(4, np.float32), temperature=1.0, top_p=0.51) == [0, 1, 2]
    assert ids_of(np.zeros(4, np.float32), temperature=1.0, top_p=0.0) == [0]
    # Ten times 0.1: rounding of the sum must not cost or add an id.
    for count in range(1, 11):
        kept = ids_of(np.zeros(10, np.float32), temperature=1.0, top_p=count / 10)
        assert kept == list(range(count))
    # A tie that begins inside the nucleus: 0.5, then four times 0.125.
    logits = np.log(row(0.125, 0.125, 0.5, 0.125, 0.125))
    assert ids_of(logits, temperature=1.0, top_p=0.74) == [0, 1, 2]


def test_top_p_looks_past_its_first_head() -> None:
    flat = np.zeros(5000, np.float32)
    flat[4990] = 1.0
    kept = ids_of(flat, temperature=1.0, top_p=0.9)
    rest = math.ceil(0.9 * (4999 + math.e) - math.e)
    assert kept == [*range(rest), 4990]


def plain_top_p(logits: np.ndarray, p: float) -> list[int]:
    """The rule, written down once more: go from the likely to the unlikely until p is reached."""
    probs = np.exp(logits.astype(np.float64) - logits.max())
    probs /= probs.sum()
    kept: list[int] = []
    mass = 0.0
    for index in sorted(range(probs.size), key=lambda i: (-logits[i], i)):
        if kept and mass + 1e-12 >= p:
            break
        kept.append(index)
        mass += probs[index]
    return sorted(i for i in kept if probs[i] > 0)


@given(finite_rows, st.floats(0, 0.999))
def test_top_p_follows_its_rule(logits: np.ndarray, top_p: float) -> None:
    assert ids_of(logits, temperature=1.0, top_p=top_p) == plain_top_p(logits, top_p)


def test_scores_tell_what_is_likely_where_probabilities_are_equal() -> None:
    close = row(0, 3.86e-16, 0)
    _, probs = sampler(3, temperature=3.0).distribution(close)
    assert len(set(probs)) == 1
    assert ids_of(close, temperature=3.0, top_p=0.0) == [1]
    assert ids_of(close, temperature=3.0, top_p=0.5) == [0, 1]
    assert ids_of(close, temperature=3.0, top_k=2, top_p=0.3) == [1]
    assert ids_of(close, temperature=3.0, top_k=1) == [1]
    assert ids_of(close, temperature=3.0, min_p=1.0) == [0, 1, 2]
    # Also where a great temperature makes one score of them, in a head smaller than the row.
    many = np.zeros(1000, np.float32)
    many[900] = 1e-30
    assert ids_of(many, temperature=1e300, top_p=0.0) == [900]
    assert ids_of(many, temperature=1e300, top_p=0.25) == [*range(249), 900]


def test_min_p() -> None:
    logits = np.log(row(0.5, 0.3, 0.15, 0.05))
    assert ids_of(logits, temperature=1.0, min_p=0.29) == [0, 1, 2]
    assert ids_of(logits, temperature=1.0, min_p=0.31) == [0, 1]
    assert ids_of(logits, temperature=1.0, min_p=1.0) == [0]
    assert ids_of(row(3, 3, 1), temperature=1.0, min_p=1.0) == [0, 1]


def test_the_temperature_comes_before_top_p() -> None:
    logits = np.log(row(0.6, 0.3, 0.1))
    assert ids_of(logits, temperature=1.0, top_p=0.6) == [0]
    assert ids_of(logits, temperature=10.0, top_p=0.6) == [0, 1]


def test_top_p_sees_what_top_k_left() -> None:
    # Of the whole, ids 0 and 1 have 0.7; of the two that top-k leaves, id 0 has 4/7.
    logits = np.log(row(0.4, 0.3, 0.3))
    assert ids_of(logits, temperature=1.0, top_p=0.5) == [0, 1]
    assert ids_of(logits, temperature=1.0, top_k=2, top_p=0.5) == [0]


@given(
    finite_rows,
    st.floats(0.01, 10),
    st.integers(-1, 50),
    st.floats(0, 1),
    st.floats(0, 1),
)
# After the temperature exp still tells them apart; divided by their sum all become a third.
@example(row(0, 3.86e-16, 0), 3.0, 0, 0.0, 0.0)
def test_the_best_token_always_stays(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    kept = ids_of(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # Or one of the same probability: logits may differ by less than exp can show.
    scores = logits.astype(np.float64)
    assert np.exp((scores[kept].max() - scores.max()) / temperature) == 1.0
    if top_k > 0:
        assert len(kept) <= top_k
    assert np.isfinite(logits[kept]).all()


# -- penalty and bias --------------------------------------------------------------------------


def test_s09_penalty_once_per_distinct_token() -> None:
    scores = np.array([2.0, -2.0])
    penalise(scores, [0, 1, 0, 1, 0, 1], 2.0)
    assert scores.tolist() == [1.0, -4.0]
    logits = row(2, -2)
    scored = sampler(2, repeat_penalty=2.0).scores(logits, [0, 1, 0, 1, 0, 1])
    assert scored.tolist() == [1.0, -4.0]
    assert logits.tolist() == [2.0, -2.0]


def test_penalty_passes_over_ids_outside_the_row() -> None:
    assert sampler(2, repeat_penalty=2.0).scores(row(2, 3), [-1, 2, 99, 1]).tolist() == [2, 1.5]


def test_penalty_leaves_a_banned_token_banned() -> None:
    assert sampler(2, repeat_penalty=2.0).sample(row(-np.inf, -1), [0, 1]) == 1


def test_repeat_last_n() -> None:
    logits, history = row(4, 4, 4), [0, 1, 2]
    seen = {
        n: sampler(3, repeat_penalty=2.0, repeat_last_n=n).scores(logits, history).tolist()
        for n in (-1, 0, 1, 2, 50)
    }
    assert seen == {
        -1: [2, 2, 2],
        0: [4, 4, 4],
        1: [4, 4, 2],
        2: [4, 2, 2],
        50: [2, 2, 2],
    }


def test_penalty_equals_transformers() -> None:
    torch = pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(3)
    logits = rng.normal(size=50).astype(np.float32)
    history = rng.integers(0, 50, 80).tolist()
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(
        torch.tensor([history]), torch.tensor(logits[None])
    )
    ours = sampler(50, repeat_penalty=1.3).scores(logits, history)
    np.testing.assert_allclose(ours, theirs[0].numpy(), rtol=1e-6)


def test_filters_equal_transformers_on_distinct_logits() -> None:
    torch = pytest.importorskip("torch")
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    rng = np.random.default_rng(4)
    for temperature, top_k, top_p, min_p in ((0.7, 40, 0.9, 0.05), (1.5, 500, 0.5, 0.01)):
        logits = rng.normal(scale=3, size=1000).astype(np.float32)
        scores = torch.tensor(logits[None])
        for warper in (
            TemperatureLogitsWarper(temperature),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
            MinPLogitsWarper(min_p),
        ):
            scores = warper(None, scores)
        theirs = scores.softmax(-1)[0].numpy()
        ids, probs = sampler(
            1000, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        ).distribution(logits)
        assert ids.tolist() == np.flatnonzero(theirs).tolist()
        np.testing.assert_allclose(probs, theirs[ids], rtol=1e-4)


def test_logit_bias() -> None:
    assert sampler(3, logit_bias={2: 5.0}).sample(row(1, 2, 0)) == 2
    assert sampler(3, logit_bias={1: -np.inf}).sample(row(1, 2, 0)) == 0
    with pytest.raises(GenerationError, match="logit_bias"):
        sampler(1, logit_bias={0: -np.inf}).sample(row(1))
    with pytest.raises(UsageError, match=r"token 3.*ends at 2"):
        sampler(3, logit_bias={3: 1.0})


# -- randomness --------------------------------------------------------------------------------


def test_the_seed_decides() -> None:
    logits = np.zeros(1000, np.float32)
    first = sampler(1000, temperature=1.0, seed=7)
    again = sampler(1000, temperature=1.0, seed=7)
    other = sampler(1000, temperature=1.0, seed=8)
    drawn = [first.sample(logits) for _ in range(20)]
    assert drawn == [again.sample(logits) for _ in range(20)]
    assert drawn != [other.sample(logits) for _ in range(20)]
    free = [sampler(1000, temperature=1.0).sample(logits) for _ in range(5)]
    assert len(set(free)) > 1


def test_a_filter_that_removes_nothing_draws_the_same() -> None:
    logits = np.linspace(0, 3, 300).astype(np.float32)
    plain = sampler(300, temperature=1.0, seed=5)
    filtered = sampler(300, temperature=1.0, top_k=300, min_p=1e-9, seed=5)
    assert [plain.sample(logits) for _ in range(50)] == [filtered.sample(logits) for _ in range(50)]


def test_draws_follow_the_distribution() -> None:
    probs = np.array([0.1, 0.2, 0.0, 0.7])
    with np.errstate(divide="ignore"):
        logits = np.log(probs).astype(np.float32)
    drawn = sampler(4, temperature=1.0, seed=11)
    count = 4000
    counts = np.bincount([drawn.sample(logits) for _ in range(count)], minlength=4)
    assert counts[2] == 0
    # Five standard deviations: one seed in a million would fail.
    assert (abs(counts - count * probs) <= 5 * np.sqrt(count * probs * (1 - probs))).all()


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, "hot", None, True]),
        ("top_k", [-2, 1.5, "x", True, None]),
        ("top_p", [-0.1, 1.1, math.nan, None]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repeat_penalty", [0.0, -1.0, math.nan, math.inf]),
        ("repeat_last_n", [-2, 0.5]),
        ("seed", [-1, 1.0, "x", True]),
        ("logit_bias", [{-1: 1.0}, {0: math.nan}, {0: math.inf}, {"a": 1.0}, {0: "x"}, [1]]),
    ],
)
def test_bad_options_are_named(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=name):
            SamplingOptions(**{name: value})  # type: ignore[arg-type]


def test_options_are_frozen_copies() -> None:
    bias = {1: 1}
    options = SamplingOptions(logit_bias=bias, top_k=np.int64(3), temperature=1)  # type: ignore
    bias[1] = 5
    assert options.logit_bias == {1: 1.0}
    assert type(options.top_k) is int
    assert type(options.temperature) is float
    assert hash(options) == hash(dataclasses.replace(options))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.top_k = 1  # type: ignore[misc]
    with pytest.raises(UsageError, match="vocab_limit"):
        Sampler(SamplingOptions(), 0)


# -- log-probabilities -------------------------------------------------------------------------


def test_logprobs() -> None:
    logits = np.log(row(0.2, 0.4, 0.2, 0.2))
    got = logprobs(logits, 3)
    assert [i for i, _ in got] == [1, 0, 2]
    assert [p for _, p in got] == pytest.approx([math.log(0.4), math.log(0.2), math.log(0.2)])
    assert logprobs(logits, 0) == []
    assert len(logprobs(logits, 99)) == 4
    limited = logprobs(logits, 9, vocab_limit=2)
    assert limited == [(1, pytest.approx(math.log(2 / 3))), (0, pytest.approx(math.log(1 / 3)))]
    assert logprobs(row(1000, -1000), 1) == [(0, 0.0)]
    with pytest.raises(UsageError, match="k is -1"):
        logprobs(logits, -1)
    with pytest.raises(GenerationError, match="NaN"):
        logprobs(row(np.nan, 1), 1)
