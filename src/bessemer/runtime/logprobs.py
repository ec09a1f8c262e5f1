"""What a model thought of each token that it said.

Log-probabilities are natural ones, of the softmax over the whole row of raw logits: before the
repetition penalty, the bias, the temperature and the cuts of sampling. They say what the model
computed, not what the sampler made of it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bessemer.runtime.sampling import log_softmax, most_likely
from bessemer.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Candidate:
    """One of the likeliest tokens of a step. text: the token's alone."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """A token of an answer.

    text: the token's alone, special tokens by their name; U+FFFD where it holds a part of a
    character.  logprob: natural, of the raw logits.  top: the likeliest tokens at its place, most
    likely first, the lower id first on a tie; impossible ones (a logit of -inf) are left out.
    """

    id: int
    text: str
    logprob: float
    top: tuple[Candidate, ...]

    def to_json(self) -> dict[str, Any]:
        """As a line of a dump holds it; a logprob of -inf, which JSON doesn't have, is null."""
        data = asdict(self)
        data["logprob"] = self.logprob if math.isfinite(self.logprob) else None
        return {**data, "top": list(data["top"])}


def token_logprobs(
    logits: np.ndarray, token: int, count: int, tokenizer: Tokenizer
) -> TokenLogprobs:
    """What the logits [vocab], float32, say of `token` and of the `count` likeliest tokens.

    Raises GenerationError when they hold NaN or +inf.
    """
    scores = log_softmax(logits)
    top = tuple(
        Candidate(i, tokenizer.token_text(i), value)
        for i, value in most_likely(scores, count)
        if math.isfinite(value)
    )
    return TokenLogprobs(token, tokenizer.token_text(token), float(scores[token]), top)
