"""From a row of logits to the next token id.

The steps, in the order in which transformers' `generate` runs them:

1. ids that the tokenizer does not know are cut off (a model's vocabulary is often padded);
2. repetition penalty: once per distinct id of the history, a positive logit is divided by the
   penalty and a negative one multiplied (Keskar et al. 2019, https://arxiv.org/abs/1909.05858);
3. logit bias is added;
4. temperature divides; 0 means greedy, and the steps below are skipped;
5. top-k keeps the k largest logits;
6. top-p keeps the shortest run of most likely ids whose probability, renormalised after step 5,
   reaches p (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751);
7. min-p keeps the ids at least min_p times as likely as the most likely one
   (Nguyen et al. 2024, https://arxiv.org/abs/2407.01082);
8. one uniform number picks an id from the rest.

What is more likely is told by the scores, the logits after step 3: different scores may round to
one probability, and the better one must not be lost for that. Ties are always settled for the lower
id: greedy takes the lowest id of the largest logit, and where equal logits stand on both sides of
the cut of top-k or top-p, the lower ids stay. (min-p has no cut inside a tie: it keeps all of them
or none.) At least one id, the most likely one, always stays.

llama.cpp applies the temperature last instead. The difference shows only in top-p and min-p, which
here see the probabilities after the temperature.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from bessemer.errors import ArgumentError, GenerationError, UsageError

# top-p sorts only a head of the vocabulary, and grows it by this factor until its mass reaches p: a
# first head of 256 is enough for nearly every real distribution, and costs a 500th of the sort.
TOP_P_HEAD = 256
TOP_P_GROWTH = 8
# Summing 2^18 float64 probabilities rounds by less than this: 8 times 0.1 must reach 0.8.
MASS_SLACK = 1e-12

WHOLE_HISTORY = -1

Float64 = NDArray[np.float64]
Ids = NDArray[np.int64]


def _real(name: str, value: object, low: float, high: float, expected: str) -> float:
    """Check one numeric option; returns it as a float or raises UsageError."""
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not low <= number <= high:
        raise ArgumentError(name, repr(value), expected)
    return number


def _integer(name: str, value: object, low: int, expected: str) -> int:
    """Check one whole-number option; returns it as an int or raises UsageError."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < low:
        raise ArgumentError(name, repr(value), expected)
    return int(value)


def _bias(bias: Mapping[int, float]) -> dict[int, float]:
    """A checked copy of a logit bias: id to a finite number, or -inf for an id that is banned."""
    if not isinstance(bias, Mapping):
        raise UsageError(f"logit_bias is {bias!r}; it must map token ids to numbers")
    checked: dict[int, float] = {}
    for token, value in bias.items():
        key = _integer("a token id in logit_bias", token, 0, "a whole number of at least 0")
        name = f"logit_bias for token {key}"
        number = _real(name, value, -math.inf, math.inf, "a finite number, or -inf to ban the id")
        if number == math.inf:
            raise UsageError(f"{name} is inf; it must be a finite number, or -inf to ban the id")
        checked[key] = number
    return checked


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen; the defaults mean greedy.

    temperature: 0 for greedy, else the divisor of the logits (finite).
    top_k: how many ids stay; 0 or -1 switches it off, more than the vocabulary is the vocabulary.
    top_p: 1 switches it off; 0 keeps the most likely id alone.
    min_p: 0 switches it off; 1 keeps the ids that tie with the most likely one.
    repeat_penalty: above 0; 1 switches it off. It works with greedy, too.
    repeat_last_n: how many of the latest ids the penalty looks at; -1 (the default, as in
        transformers) is the whole history, prompt included, 0 switches the penalty off.
    logit_bias: id to what is added to its logit; -inf bans an id.
    seed: a whole number of at least 0; None draws fresh entropy.

    Raises UsageError when a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = WHOLE_HISTORY
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None

    def __post_init__(self) -> None:
        largest = float(np.finfo(np.float64).max)
        # The smallest penalty that can't push a float32 logit out of float64's range.
        smallest = float(np.finfo(np.float32).tiny)
        checked: dict[str, object] = {
            "temperature": _real(
                "temperature", self.temperature, 0.0, largest, "a finite number of at least 0"
            ),
            "top_k": _integer(
                "top_k", self.top_k, -1, "a whole number from 1, or 0 or -1 to switch it off"
            ),
            "top_p": _real("top_p", self.top_p, 0.0, 1.0, "between 0 and 1; 1 switches it off"),
            "min_p": _real("min_p", self.min_p, 0.0, 1.0, "between 0 and 1; 0 switches it off"),
            "repeat_penalty": _real(
                "repeat_penalty",
                self.repeat_penalty,
                smallest,
                1 / smallest,
                f"from {smallest:.2g} to {1 / smallest:.2g}; 1 switches it off",
            ),
            "repeat_last_n": _integer(
                "repeat_last_n",
                self.repeat_last_n,
                WHOLE_HISTORY,
                "a whole number; -1 is the whole history and 0 switches the penalty off",
            ),
            "logit_bias": _bias(self.logit_bias),
        }
        if self.seed is not None:
            checked["seed"] = _integer(
                "seed", self.seed, 0, "a whole number of at least 0; by default it is a random one"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def penalise(scores: Float64, history: Iterable[int], penalty: float) -> None:
    """Apply the repetition penalty to `scores` [vocab] in place, once per distinct id.

    Ids outside the row (image placeholders, padding) are passed over.
    """
    seen = np.fromiter(history, np.int64)
    seen = seen[(seen >= 0) & (seen < scores.size)]
    # All scores are read before any is written, so that an id counts once however often it occurs.
    values = scores[seen]
    scores[seen] = np.where(values > 0, values / penalty, values * penalty)


def _softmax(scores: Float64, temperature: float = 1.0) -> Float64:
    """Probabilities of `scores` / `temperature` in float64; the maximum must be finite."""
    with np.errstate(over="ignore", under="ignore"):
        # The maximum goes first, so that a tiny temperature gives -inf and never inf - inf.
        weights = np.exp((scores - scores.max()) / temperature)
        return weights / weights.sum()


def _largest(values: NDArray[np.floating], k: int) -> Ids:
    """The positions, ascending, of the k largest of `values`; the lower position wins a tie."""
    if k >= values.size:
        return np.arange(values.size)
    threshold = np.partition(values, values.size - k)[values.size - k]
    above = np.flatnonzero(values > threshold)
    level = np.flatnonzero(values == threshold)[: k - above.size]
    return np.sort(np.concatenate([above, level]))


def _descending(values: NDArray[np.floating]) -> Ids:
    """The positions that sort `values` from large to small; the lower position wins a tie."""
    return np.argsort(-values, kind="stable")


def _nucleus(scores: Float64, probs: Float64, p: float) -> Ids:
    """The positions, ascending, of the shortest run of best scores whose mass reaches `p`."""
    size = min(TOP_P_HEAD, probs.size)
    while True:
        head = _largest(scores, size)
        order = head[_descending(scores[head])]
        mass = np.cumsum(probs[order]) + MASS_SLACK
        if mass[-1] >= p or size == probs.size:
            # Rounding may leave the whole sum just below p; then everything stays.
            keep = min(int(np.searchsorted(mass, p, side="left")) + 1, order.size)
            return np.sort(order[:keep])
        size = min(size * TOP_P_GROWTH, probs.size)


def _argmax(scores: np.ndarray) -> int:
    """The lowest id of the largest score; raises GenerationError when all are -inf."""
    best = int(scores.argmax())  # NumPy takes the first of equal maxima.
    if scores[best] == -np.inf:
        raise GenerationError("no token is left to sample: every logit is -inf (check logit_bias)")
    return best


class Sampler:
    """Draws token ids by `SamplingOptions`; the same seed and logits give the same ids.

    vocab_limit: ids from here on are never returned (the tokenizer's vocabulary size).
    banned: ids below it that are never returned either (holes in the tokenizer's vocabulary).

    A sampler carries the state of its random generator (PCG64): use one per generation, and not
    from two threads at once.
    """

    def __init__(
        self, options: SamplingOptions, vocab_limit: int, banned: Collection[int] = ()
    ) -> None:
        self.options = options
        self.vocab_limit = _integer("vocab_limit", vocab_limit, 1, "a whole number of at least 1")
        strays = sorted(token for token in options.logit_bias if token >= vocab_limit)
        if strays:
            raise UsageError(
                f"logit_bias names token {strays[0]}, but the vocabulary ends at {vocab_limit - 1}"
            )
        self._bias_ids = np.fromiter(options.logit_bias, np.int64)
        self._bias = np.fromiter(options.logit_bias.values(), np.float64)
        self._banned = np.fromiter(sorted(t for t in banned if 0 <= t < vocab_limit), np.int64)
        self._rng = np.random.Generator(np.random.PCG64(options.seed))
        penalised = options.repeat_penalty != 1.0 and options.repeat_last_n != 0
        self._penalised = penalised
        self._plain_greedy = (
            options.temperature == 0.0
            and not penalised
            and not self._bias_ids.size
            and not self._banned.size
        )

    def sample(self, logits: np.ndarray, history: Sequence[int] = ()) -> int:
        """The next token id.

        logits: [vocab], float32; left unchanged. history: the ids so far, prompt included.
        Raises GenerationError when the logits hold NaN or +inf, or when no id is left.
        """
        if self._plain_greedy:
            return _argmax(self._usable(logits))
        scores = self.scores(logits, history)
        if self.options.temperature == 0.0:
            return _argmax(scores)
        ids, probs = self._distribution(scores)
        return self._draw(ids, probs)

    def scores(self, logits: np.ndarray, history: Sequence[int] = ()) -> Float64:
        """The logits after steps 1 to 3 of the module's list: float64, [min(vocab, limit)].

        Raises GenerationError when the logits hold NaN or +inf.
        """
        row = self._usable(logits).astype(np.float64)
        if self._penalised:
            last_n = self.options.repeat_last_n
            recent = history if last_n == WHOLE_HISTORY else history[-last_n:]
            penalise(row, recent, self.options.repeat_penalty)
        inside = self._bias_ids < row.size
        row[self._bias_ids[inside]] += self._bias[inside]
        row[self._banned[self._banned < row.size]] = -np.inf
        return row

    def distribution(self, logits: np.ndarray, history: Sequence[int] = ()) -> tuple[Ids, Float64]:
        """The ids that may be drawn, ascending, and their probabilities (they sum to 1).

        Greedy (temperature 0) gives one id with probability 1. Raises as `sample`.
        """
        scores = self.scores(logits, history)
        if self.options.temperature == 0.0:
            return np.array([_argmax(scores)]), np.ones(1)
        return self._distribution(scores)

    def _usable(self, logits: np.ndarray) -> np.ndarray:
        """The part of the row below the limit, after a look for NaN and +inf in all of it."""
        row = np.asarray(logits)
        if row.ndim != 1 or not row.size:
            raise UsageError(f"logits have shape {row.shape}; one row [vocab] is needed")
        # max() is NaN when any element is.
        peak = row.max()
        if np.isnan(peak):
            raise GenerationError(
                f"the logits hold NaN ({int(np.isnan(row).sum())} of {row.size}): the model's "
                "numbers broke down; `bessemer verify` shows where"
            )
        if peak == np.inf:
            raise GenerationError(
                f"the logits hold infinity (token {int(row.argmax())}): the model's numbers "
                "overflowed; `bessemer verify` shows where"
            )
        return row[: self.vocab_limit]

    def _distribution(self, scores: Float64) -> tuple[Ids, Float64]:
        """Steps 4 to 7 of the module's list."""
        options = self.options
        _argmax(scores)
        ids: Ids = np.arange(scores.size)
        if 0 < options.top_k < scores.size:
            ids = _largest(scores, options.top_k)
            scores = scores[ids]
        probs = _softmax(scores, options.temperature)
        if options.top_p < 1.0:
            ids, probs = self._keep(ids, probs, _nucleus(scores, probs, options.top_p))
        if options.min_p > 0.0:
            likely = np.flatnonzero(probs >= options.min_p * probs.max())
            ids, probs = self._keep(ids, probs, likely)
        possible = np.flatnonzero(probs > 0.0)
        return self._keep(ids, probs, possible)

    @staticmethod
    def _keep(ids: Ids, probs: Float64, positions: Ids) -> tuple[Ids, Float64]:
        kept = probs[positions]
        return ids[positions], kept / kept.sum()

    def _draw(self, ids: Ids, probs: Float64) -> int:
        """Invert the cumulative distribution, ids ascending, at one uniform number of [0, 1)."""
        mass = np.cumsum(probs)
        position = int(np.searchsorted(mass, self._rng.random() * mass[-1], side="right"))
        # The product may round up to the whole mass.
        return int(ids[min(position, ids.size - 1)])


def log_softmax(logits: np.ndarray, vocab_limit: int | None = None) -> Float64:
    """The natural log-probabilities of a row of logits [vocab], float32: float64 of its size.

    The softmax is over all of the row, or its first `vocab_limit` entries. Raises as
    `Sampler.sample`.
    """
    limit = max(np.asarray(logits).size, 1) if vocab_limit is None else vocab_limit
    scores = Sampler(SamplingOptions(), limit).scores(logits)
    below = scores - scores[_argmax(scores)]  # first, so that large logits lose nothing
    return below - math.log(np.exp(below).sum())


def most_likely(scores: Float64, k: int) -> list[tuple[int, float]]:
    """The k largest of `scores` with their positions, largest first; the lower one wins a tie."""
    if k == 0:
        return []
    top = _largest(scores, k)
    return [(int(i), float(scores[i])) for i in top[_descending(scores[top])]]


def logprobs(logits: np.ndarray, k: int, vocab_limit: int | None = None) -> list[tuple[int, float]]:
    """The k most likely ids with their natural log-probabilities, most likely first.

    logits: [vocab], float32; the softmax is over all of the row, or its first `vocab_limit`
    entries, in float64. Equal logits come in the order of their ids; k above the vocabulary gives
    all of it. Raises as `Sampler.sample`, and UsageError for a negative k.
    """
    k = _integer("k", k, 0, "a whole number of at least 0")
    return most_likely(log_softmax(logits, vocab_limit), k)
