"""Log-probabilities of sampled tokens: against PyTorch, and independent of sampling."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from bessemer.errors import GenerationError, UsageError
from bessemer.runtime.generate import generate_stream
from bessemer.runtime.logprobs import TokenLogprobs, token_logprobs
from bessemer.runtime.sampling import SamplingOptions, log_softmax
from tests.runtime.test_generate import END, PAD_ROWS, TOKENIZER, ScriptedSession, says

ROW = np.random.default_rng(0).normal(0, 4, TOKENIZER.vocab_size + PAD_ROWS).astype(np.float32)


def test_they_are_natural_logarithms_of_the_softmax_over_all_of_the_row() -> None:
    wanted = torch.log_softmax(torch.from_numpy(ROW).double(), -1).numpy()
    np.testing.assert_allclose(log_softmax(ROW), wanted, atol=1e-12)
    found = token_logprobs(ROW, 65, 7, TOKENIZER)
    assert found.logprob == pytest.approx(wanted[65], abs=1e-12)
    best = np.argsort(-ROW, kind="stable")[:7]
    assert [c.id for c in found.top] == best.tolist()
    assert [c.logprob for c in found.top] == pytest.approx(wanted[best].tolist(), abs=1e-12)


def test_large_logits_and_ties() -> None:
    row = np.array([1e30, -1e30, 1e30, -np.inf], np.float32)
    found = token_logprobs(row, 1, 4, TOKENIZER)
    assert [c.id for c in found.top] == [0, 2, 1]  # the lower id first; the impossible one not
    assert found.top[0].logprob == pytest.approx(np.log(0.5))
    impossible = token_logprobs(row, 3, 0, TOKENIZER)
    assert impossible.logprob == -np.inf
    assert impossible.to_json()["logprob"] is None
    with pytest.raises(GenerationError, match="NaN"):
        token_logprobs(np.array([np.nan, 0], np.float32), 0, 1, TOKENIZER)


def test_texts_are_the_tokens_alone() -> None:
    assert token_logprobs(ROW, ord("a"), 0, TOKENIZER).text == "a"
    assert token_logprobs(ROW, END, 0, TOKENIZER).text == "<|end|>"
    assert token_logprobs(ROW, 0xC3, 0, TOKENIZER).text == "\ufffd"  # half of a character
    assert token_logprobs(ROW, len(ROW) - 1, 0, TOKENIZER).text == ""  # padding of the row


def run(session: ScriptedSession, **options: object) -> tuple[TokenLogprobs, ...]:
    stream = generate_stream(session, TOKENIZER, [1], max_tokens=6, **options)  # type: ignore[arg-type]
    return stream.complete().logprobs


def test_every_token_of_an_answer_has_them_its_end_too() -> None:
    seen: list[TokenLogprobs] = []
    found = run(says("abc", END), top_logprobs=2, on_logprobs=seen.append)
    assert [f.id for f in found] == [*b"abc", END]
    assert seen == list(found)
    size = TOKENIZER.vocab_size + PAD_ROWS
    wanted = 1 - np.log(np.exp(1) + size - 1)  # one logit of 1, the others 0
    assert [f.logprob for f in found] == pytest.approx([wanted] * 4)
    assert all(f.top[0].id == f.id for f in found)
    assert all(len(f.top) == 2 for f in found)
    assert run(says("abc")) == ()


def test_sampling_does_not_change_them() -> None:
    biased = SamplingOptions(logit_bias={ord("z"): 50.0}, temperature=0.3, seed=1)
    found = run(says("abc"), top_logprobs=1, sampling=biased)
    plain = run(says("abc"), top_logprobs=1)
    assert {f.id for f in found} == {ord("z")}
    assert [f.top for f in found] == [f.top for f in plain]
    assert found[0].logprob == pytest.approx(plain[0].logprob - 1)


def test_what_is_written_is_json() -> None:
    record = token_logprobs(ROW, 65, 2, TOKENIZER).to_json()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert set(record) == {"id", "text", "logprob", "top"}
    assert set(record["top"][0]) == {"id", "text", "logprob"}


@pytest.mark.parametrize("count", [-1, 1.5, True, "2"])
def test_wrong_counts(count: object) -> None:
    with pytest.raises(UsageError, match="top_logprobs"):
        run(says("abc"), top_logprobs=count)
