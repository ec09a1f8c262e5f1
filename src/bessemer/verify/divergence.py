"""How far apart two models are in what they say of the next token: KL divergence and perplexity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def log_softmax(logits: np.ndarray) -> F64:
    """Natural logarithms of the probabilities, along the last axis."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def kl_divergence(reference: np.ndarray, ours: np.ndarray) -> float:
    """Nats that are lost when `ours` stands for `reference`, logits [vocab] of one token: the mean
    of log p - log q over p, the distribution of the reference. NaN where either is not finite.
    """
    if not (np.isfinite(reference).all() and np.isfinite(ours).all()):
        return float("nan")
    log_p, log_q = log_softmax(reference), log_softmax(ours)
    # Rounding alone may give a little less than 0.
    return max(0.0, float(np.sum(np.exp(log_p) * (log_p - log_q))))


def perplexity(logits: np.ndarray, ids: Sequence[int]) -> float:
    """exp of the mean negative log-probability of each token of `ids` but the first, by the logits
    [len(ids), vocab] of the token before it.
    """
    total = sum(
        -float(log_softmax(row)[token]) for row, token in zip(logits[:-1], ids[1:], strict=True)
    )
    return float(np.exp(total / (len(ids) - 1)))
