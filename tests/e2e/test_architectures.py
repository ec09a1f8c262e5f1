"""Every supported architecture, compiled and run, against transformers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.e2e.compiled import CHUNK, F32_ERROR, error, load, reference, tiny_pair, token_ids
from tests.tiny_models import CONFIGS

COUNT = 3 * CHUNK + 5
LENGTHS = (1, 2, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_prefill_and_decode(model_type: str) -> None:
    """Logits of prefills of several lengths, of every row, and of decode steps; K14, K01, K11."""
    _, reference_model = tiny_pair(model_type)
    ids = token_ids(COUNT)
    want = reference(reference_model, ids)
    model = load(model_type)
    session = model.session()
    for length in LENGTHS:
        session.rewind(0)
        assert error(session.prefill(ids[:length]), want[length - 1]) < F32_ERROR, length
    session.rewind(0)
    everything = session.prefill(ids, all_logits=True)
    assert error(everything, want) < F32_ERROR

    # Stepwise, then a chunk in the middle of a sequence, then steps again.
    session.rewind(0)
    session.prefill(ids[:3])
    for i in range(3, CHUNK + 7):
        assert error(session.decode(ids[i]), want[i]) < F32_ERROR, i
    middle = session.prefill(ids[CHUNK + 7 : 2 * CHUNK + 9], all_logits=True)
    assert error(middle, want[CHUNK + 7 : 2 * CHUNK + 9]) < F32_ERROR
    for i in range(2 * CHUNK + 9, COUNT):
        assert error(session.decode(ids[i]), want[i]) < F32_ERROR, i

    # Back to the middle and on with other tokens: equal to a cold run of all of them.
    other = ids[:7] + token_ids(9, seed=1)
    session.rewind(7)
    assert session.tokens == ids[:7]
    assert error(session.prefill(other[7:]), reference(reference_model, other)[-1]) < F32_ERROR


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_same_bits_for_every_thread_count(model_type: str) -> None:
    """Threads share out units of work; they never change the order of a sum."""
    ids = token_ids(COUNT)
    results = []
    for threads in (1, 2, 3, 8):
        session = load(model_type, threads).session()
        rows = [session.prefill(ids[:-6], all_logits=True)]
        rows += [session.decode(i)[None] for i in ids[-6:]]
        results.append(np.concatenate(rows))
    for other in results[1:]:
        assert np.array_equal(results[0], other)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "mixtral", "starcoder2"])
def test_generic_lowering_agrees_with_the_kernels(model_type: str) -> None:
    """The whole model lowered by payloads alone: the reference of the scheduled kernels."""
    ids = token_ids(CHUNK + 6)
    generic = load(model_type, schedule="generic", context=40, chunk=8)
    sessions = [load(model_type).session(), generic.session()]
    got = [s.prefill(ids[:-3], all_logits=True) for s in sessions]
    assert error(got[1], got[0]) < F32_ERROR
    for token in ids[-3:]:
        got = [s.decode(token)[None] for s in sessions]
        assert error(got[1], got[0]) < F32_ERROR


# Weight format -> error against the float32 model: the rounding of the weights themselves, which
# 2 ** -11 and 2 ** -8 relative steps cause, amplified by the peaked attention of these configs.
FORMATS = {"f16": 2e-2, "bf16": 1.5e-1}


@pytest.mark.parametrize("weights", FORMATS)
def test_narrow_weights_and_kv(weights: str) -> None:
    """C09: the same model with narrow weights and an f16 cache agrees within the format."""
    _, reference_model = tiny_pair("llama")
    ids = token_ids(2 * CHUNK)
    want = reference(reference_model, ids)
    session = load("llama", weights=weights, kv="f16").session()
    assert error(session.prefill(ids[:-4], all_logits=True), want[:-4]) < FORMATS[weights]
    for i in range(len(ids) - 4, len(ids)):
        assert error(session.decode(ids[i]), want[i]) < FORMATS[weights]
