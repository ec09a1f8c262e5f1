"""BEHAVIOURS, KV cache and context, on compiled models, against cold runs in transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from bessemer.artifact.layout import KEY_BLOCK
from bessemer.errors import ContextLengthError, UsageError
from bessemer.runtime.conversation import Conversation
from bessemer.runtime.model import Model
from bessemer.runtime.session import Session
from tests.behaviours.models import (
    build,
    causal_lm,
    save_folder,
    scripted,
    stepwise,
    text_model,
)
from tests.e2e.compiled import F32_ERROR, error, load, reference, tiny_pair, token_ids
from tests.tiny_models import DYNAMIC_ROPE, LONG_ROPE

WINDOW, CONTEXT, CHUNK = 8, 32, 4
# A mix of full and sliding layers, and layers that all slide.
SLIDING = ["gemma3_text", "mistral", "gpt_oss"]


def greedy(session: Session, logits: np.ndarray, count: int) -> list[int]:
    """`count` tokens by argmax; the last one is fed too."""
    said = []
    for _ in range(count):
        said.append(int(logits.argmax()))
        logits = session.decode(said[-1])
    return said


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_k01_prefill_generate_append(model_type: str) -> None:
    """Prefill 5, generate 3, append 4: as a cold run on all 12; and the greedy ids are its ids."""
    _, model = tiny_pair(model_type)
    session = load(model_type).session()
    ids = token_ids(5)
    said = greedy(session, session.prefill(ids), 3)
    rest = token_ids(4, seed=1)
    warm = session.prefill(rest)
    want = reference(model, [*ids, *said, *rest])
    assert session.tokens == [*ids, *said, *rest]
    assert error(warm, want[-1]) < F32_ERROR
    assert said == want[4:7].argmax(-1).tolist()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model with text and a context of 64 that always says `a`."""
    model = scripted(text_model(), b"a")
    folder = save_folder(tmp_path_factory.mktemp("small") / "checkpoint", model)
    return build(folder, context=64, chunk=24)


def in_context(model: Model, context: int) -> Session:
    """A session with that much room left of a context of 64, the first tokens being there."""
    session = model.session()
    if context < session.capacity:
        session.prefill(token_ids(session.capacity - context))
    return session


def test_k03_the_context_ends_an_answer(tmp_path: Any) -> None:
    """Context 16, prompt 10, max_tokens 50: 7 tokens, the last not fed, and `length`. Context 32,
    two turns of 20: the second is an error with both counts, and the session lives.
    """
    model = scripted(text_model(), b"a")
    folder = save_folder(tmp_path / "checkpoint", model)
    short = build(folder, context=16)
    stream = short.stream("0123456789", max_tokens=50)
    assert "".join(stream) == "a" * 7
    assert (stream.result.finish_reason, len(stream.result.tokens)) == ("length", 7)
    assert (stream.result.fed, stream.result.prompt_tokens) == (6, 10)

    talk = Conversation(build(folder, context=32))
    first = talk.ask("h", max_tokens=2)
    assert "".join(first) == "aa"
    assert first.prompt_tokens == 20
    held, messages = talk.session.position, list(talk.messages)
    with pytest.raises(ContextLengthError, match=rf"{held}.*32") as caught:
        talk.ask("h", max_tokens=2)
    assert "42 tokens" in str(caught.value)
    assert (talk.session.position, talk.messages) == (held, messages)
    talk.reset()
    assert "".join(talk.ask("h", max_tokens=2)) == "aa"


def test_k07_prompts_about_as_long_as_the_context(small: Model) -> None:
    stream = small.stream("h" * 64)
    assert "".join(stream) == "a"
    assert (stream.result.finish_reason, stream.result.prompt_tokens) == ("length", 64)
    for count in (65, 100):
        with pytest.raises(ContextLengthError, match=rf"{count} tokens.*64"):
            small.stream("h" * count)
        with pytest.raises(ContextLengthError, match=rf"{count} more tokens.*64"):
            small.session().prefill([3] * count)
    full = small.session()
    full.prefill([3] * 64)
    with pytest.raises(ContextLengthError, match=r"1 more tokens after 64 make 65.*64"):
        full.decode(3)
    assert full.position == 64
    assert small.generate("h", max_tokens=3) == "aaa"


@pytest.fixture(scope="module", params=SLIDING)
def sliding(request: pytest.FixtureRequest) -> tuple[Model, PreTrainedModel]:
    """Window 8, context 32 in chunks of 4; rings of fewer rows than the context."""
    model = causal_lm(request.param, sliding_window=WINDOW)
    return build(model, context=96, chunk=CHUNK), model


def test_k05_a_window_and_a_longer_context() -> None:
    """Window 8, context 32, prompt 12: runs up to the end; global layers keep all 32."""
    model = causal_lm("gemma3_text", sliding_window=WINDOW)
    compiled = build(model, context=CONTEXT, chunk=CHUNK)
    layout = compiled.manifest.state
    full = [layer for layer in layout.layers if not layer.window]
    assert full
    assert all(layout.ring_rows(layer) >= CONTEXT for layer in full)
    ids = token_ids(CONTEXT)
    assert error(stepwise(compiled.session(), ids, 12), reference(model, ids)) < F32_ERROR


def test_k05_rings_that_wrap(sliding: tuple[Model, PreTrainedModel]) -> None:
    """Windowed layers keep a ring shorter than the context; it wraps in prefill and in decode."""
    compiled, model = sliding
    layout = compiled.manifest.state
    for layer in layout.layers:
        rows = layout.ring_rows(layer)
        assert rows == 96 if not layer.window else rows <= WINDOW + CHUNK + 2 * KEY_BLOCK
        assert not layer.window or rows < 96
    ids = token_ids(96)
    want = reference(model, ids)
    assert error(compiled.session().prefill(ids, all_logits=True), want) < F32_ERROR
    assert error(stepwise(compiled.session(), ids, 12), want) < F32_ERROR


@pytest.mark.parametrize("keep", [0, 1, 5, 40, 60, 69])
def test_k11_rewind_of_rings(sliding: tuple[Model, PreTrainedModel], keep: int) -> None:
    """Rewinding past what a ring still holds, by one, and to the start: as cold runs."""
    compiled, model = sliding
    session = compiled.session()
    ids, others = token_ids(70), token_ids(6, seed=2)
    session.prefill(ids)
    session.rewind(keep)
    assert session.tokens == ids[:keep]
    want = reference(model, ids[:keep] + others)
    assert error(session.decode(others[0]), want[keep]) < F32_ERROR
    assert error(session.prefill(others[1:]), want[-1]) < F32_ERROR
    # The last kept token again, to have its logits.
    session.rewind(keep + 2)
    assert error(session.decode(others[2]), want[keep + 2]) < F32_ERROR


def test_k11_rewind_to_nothing() -> None:
    for model_type in ("llama", "gemma3_text"):
        _, model = tiny_pair(model_type)
        session = load(model_type).session()
        session.prefill(token_ids(5))
        session.rewind(0)
        others = token_ids(3, seed=1)
        got = session.prefill(others, all_logits=True)
        assert error(got, reference(model, others)) < F32_ERROR


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt_oss"])
def test_k14_any_chunks(model_type: str) -> None:
    """A prompt in pieces of 1, 7, 64 and at once, whatever the compiled chunk."""
    _, model = tiny_pair(model_type)
    ids = token_ids(77)
    want = reference(model, ids)
    compiled = load(model_type)
    for size in (1, 7, 64, len(ids)):
        session = compiled.session()
        pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
        got = np.concatenate([session.prefill(piece, all_logits=True) for piece in pieces])
        assert error(got, want) < F32_ERROR, size


LIMIT = 12
LONG = {"max_position_embeddings": 64, "original_max_position_embeddings": LIMIT}
LONGROPE = {**LONG_ROPE, "original_max_position_embeddings": LIMIT}
BY_LENGTH: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "sliding_window": None, **LONG}),
    "longrope-windowed": ("phi3", {"rope_parameters": LONGROPE, **LONG}),
    "dynamic": (
        "llama",
        {"rope_parameters": {**DYNAMIC_ROPE, "factor": 3.0}, "max_position_embeddings": LIMIT},
    ),
}


def cold(name: str, ids: list[int]) -> np.ndarray:
    """The last row of a fresh model: transformers' own remembers the longest sequence so far."""
    model_type, over = BY_LENGTH[name]
    return reference(causal_lm(model_type, **over), ids)[-1]


@pytest.mark.parametrize("name", ["longrope", "longrope-windowed"])
def test_crossing_the_threshold_of_longrope(name: str) -> None:
    """Every token before, at and past the original length has a cold run's logits: by decode
    steps, by chunks across it, and again after rewinding back below it.
    """
    model_type, over = BY_LENGTH[name]
    compiled = build(causal_lm(model_type, **over), context=40, chunk=8)
    assert compiled.manifest.rope is not None
    assert compiled.manifest.rope.threshold == LIMIT
    ids = token_ids(30)
    session = compiled.session()
    session.prefill(ids[:3])
    for i in range(3, 20):
        assert error(session.decode(ids[i]), cold(name, ids[: i + 1])) < F32_ERROR, i
    assert error(session.prefill(ids[20:]), cold(name, ids)) < F32_ERROR
    session.rewind(LIMIT - 2)
    back = [*ids[: LIMIT - 2], 5]
    assert error(session.decode(5), cold(name, back)) < F32_ERROR
    across = token_ids(9, seed=3)
    assert error(session.prefill(across), cold(name, back + across)) < F32_ERROR
    # The two sets of factors do differ, else this proves nothing.
    other = {**over, "original_max_position_embeddings": 40}
    other["rope_parameters"] = {**LONGROPE, "original_max_position_embeddings": 40}
    short = reference(causal_lm(model_type, **other), ids)[-1]
    assert error(short, cold(name, ids)) > 1e-3


def test_crossing_the_threshold_of_dynamic_rope() -> None:
    """Beyond max_position_embeddings every length has factors of its own. The context may be that
    times the factor.
    """
    model_type, over = BY_LENGTH["dynamic"]
    compiled = build(causal_lm(model_type, **over), context=36, chunk=8)
    with pytest.raises(UsageError, match=r"--context 37.*36"):
        build(causal_lm(model_type, **over), context=37)
    ids = token_ids(30)
    session = compiled.session()
    session.prefill(ids[:9])
    for i in range(9, 18):
        assert error(session.decode(ids[i]), cold("dynamic", ids[: i + 1])) < F32_ERROR, i
    assert error(session.prefill(ids[18:]), cold("dynamic", ids)) < F32_ERROR
    session.rewind(5)
    assert error(session.decode(7), cold("dynamic", [*ids[:5], 7])) < F32_ERROR
