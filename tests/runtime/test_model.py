"""Model and Conversation over a real library and a small tokenizer."""

from __future__ import annotations

import errno
import gc
import os
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.errors import ArtifactError, ContextLengthError, UsageError
from bessemer.runtime import model as models
from bessemer.runtime.conversation import Conversation
from bessemer.runtime.generate import GenerationResult
from bessemer.runtime.model import Model, common_prefix
from bessemer.runtime.weights import load_weights

from . import toy
from .toy_text import VOCAB, favouring, write_model


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model.load(write_model(tmp_path / "toy"), threads=2)


def greedy(ids: Sequence[int], count: int, known: int) -> list[int]:
    """What the toy answers, by its definition."""
    held, out = list(ids), []
    for _ in range(count):
        logits = toy.expected(held, vocab=VOCAB) + favouring()
        out.append(int(np.argmax(logits[:known])))
        held.append(out[-1])
    return out


def test_generate_is_what_the_model_says(model: Model) -> None:
    ids = model.tokenizer.encode("hi there")
    wanted = greedy(ids, 12, model.tokenizer.vocab_size)
    result = model.stream("hi there", max_tokens=12).complete()
    eos = [i for i, t in enumerate(wanted) if t in model.tokenizer.eos_ids]
    assert list(result.tokens) == wanted[: eos[0] + 1] if eos else wanted
    assert model.generate("hi there", max_tokens=12) == result.text
    assert model.generate(ids, max_tokens=12) == result.text
    pieces = list(model.stream("hi there", max_tokens=12))
    assert "".join(pieces) == result.text


def test_t15_ids_past_the_tokenizer(tmp_path: Path) -> None:
    bias = favouring()
    bias[VOCAB - 1] = 1e6
    model = Model.load(write_model(tmp_path / "toy", bias))
    assert model.tokenizer.vocab_size < VOCAB
    result = model.stream("hi", max_tokens=20).complete()
    assert max(result.tokens) < model.tokenizer.vocab_size


def test_stop_and_sampling_options(tmp_path: Path) -> None:
    model = Model.load(write_model(tmp_path / "toy", favouring(a=1000, b=950)))
    assert model.generate("x", max_tokens=4) == "aaaa"
    assert model.generate("x", stop=["aaa"]) == ""
    assert model.generate("x", max_tokens=3, logit_bias={ord("a"): -5000}) == "bbb"
    texts = {model.generate("x", max_tokens=40, temperature=30.0, seed=3) for _ in range(2)}
    assert len(texts) == 1
    assert set(texts.pop()) == {"a", "b"}


def test_without_max_tokens_the_context_is_the_end(tmp_path: Path) -> None:
    model = Model.load(write_model(tmp_path / "toy", favouring(a=1000), capacity=64))
    result = model.stream("x").complete()
    assert (result.finish_reason, len(result.tokens)) == ("length", 64)


WRONG: dict[str, tuple[Callable[[Model], object], str]] = {
    "prompt-none": (lambda m: m.generate(None), "the prompt is None"),  # type: ignore[arg-type]
    "prompt-number": (lambda m: m.generate(5), "the prompt is 5"),  # type: ignore[arg-type]
    "prompt-bytes": (lambda m: m.generate(b"hi"), "the prompt is b'hi'"),  # type: ignore[arg-type]
    "prompt-floats": (lambda m: m.generate([1.5]), "token id 0 is 1.5"),  # type: ignore[list-item]
    "prompt-texts": (lambda m: m.generate(["hi"]), "token id 0 is 'hi'"),  # type: ignore[list-item]
    "prompt-range": (lambda m: m.generate([1, VOCAB]), f"token id {VOCAB} is none"),
    "prompt-empty": (lambda m: m.generate([]), "at least one"),
    "prompt-surrogate": (lambda m: m.generate("\udcff"), "lone surrogate"),
    "stop-number": (lambda m: m.generate("x", stop=5), "stop is 5"),
    "stop-none": (lambda m: m.generate("x", stop=None), "stop is None"),
    "stop-numbers": (lambda m: m.generate("x", stop=[5]), "a stop string is 5"),
    "max_tokens-negative": (lambda m: m.generate("x", max_tokens=-1), "max_tokens is -1"),
    "max_tokens-float": (lambda m: m.generate("x", max_tokens=2.5), "max_tokens is 2.5"),
    "temperature-text": (lambda m: m.generate("x", temperature="hot"), "temperature is 'hot'"),
    "seed-float": (lambda m: m.generate("x", seed=1.5), "seed is 1.5"),
    "bias-list": (lambda m: m.generate("x", logit_bias=[1]), "logit_bias is"),
    "messages-text": (lambda m: m.chat("hi"), "messages must be a list"),  # type: ignore[arg-type]
    "messages-none": (lambda m: m.chat(None), "messages must be a list"),  # type: ignore[arg-type]
    "messages-texts": (lambda m: m.chat(["hi"]), r"messages\[0\] is 'hi'"),  # type: ignore[list-item]
    "content-absent": (lambda m: m.chat([{"role": "user"}]), "no 'content'"),
    "content-number": (lambda m: m.chat([{"role": "user", "content": 5}]), "the content 5"),
    "tools-text": (lambda m: m.chat(TALK, tools="x"), "tools is 'x'"),
    "ask-none": (lambda m: Conversation(m).ask(None), "no 'content'"),  # type: ignore[arg-type]
    "system-number": (lambda m: Conversation(m, 5), "system text is 5"),  # type: ignore[arg-type]
    "model-none": (lambda m: Conversation(None), "needs a model"),  # type: ignore[arg-type]
    "encode-none": (lambda m: m.tokenizer.encode(None), "must be text"),  # type: ignore[arg-type]
    "threads-text": (lambda m: Model.load(m.path, threads="x"), "threads is 'x'"),  # type: ignore[arg-type]
    "folder-none": (lambda m: Model.load(None), "it must be a path"),  # type: ignore[arg-type]
    "folder-empty": (lambda m: Model.load(""), "it must be a path"),
}
TALK = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_make_no_sense_are_named(model: Model, name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        call(model)
    # It has cost the model nothing; and NumPy's numbers are numbers.
    assert model.generate("x", max_tokens=2) == model.generate("x", max_tokens=np.int64(2))


def test_unknown_options_are_named(model: Model) -> None:
    with pytest.raises(UsageError, match=r"no option temprature; known: .*temperature") as error:
        model.generate("x", temprature=1.0)
    for name in ("max_tokens", "stop", "top_logprobs", "on_logprobs"):
        assert f"{name}, " in str(error.value)
    with pytest.raises(UsageError, match="temperature"):
        model.generate("x", temperature=-1.0)


def test_a_prompt_that_is_too_long(model: Model) -> None:
    with pytest.raises(ContextLengthError, match=r"300 tokens.*holds 256"):
        model.generate("a" * 300)
    assert len(model._idle) == 1
    assert model.generate("a" * 256, max_tokens=9) is not None


def test_c14_sessions_are_used_again(model: Model) -> None:
    model.generate("x", max_tokens=16)
    (kept,) = model._idle
    model.generate("x", max_tokens=32)
    assert model._idle == [kept]
    first, second = model.stream("x", max_tokens=2), model.stream("x", max_tokens=2)
    assert first.complete().tokens == second.complete().tokens
    assert len(model._idle) == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_r06_two_thousand_generations(tmp_path: Path) -> None:
    model = Model.load(write_model(tmp_path / "toy", favouring(a=1000)))

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def rounds(count: int) -> None:
        for _ in range(count):
            assert model.generate("hello", max_tokens=2) == "aa"

    rounds(200)
    before = resident()
    rounds(1800)
    assert resident() - before < 4 << 20


def test_threads_share_a_model(model: Model) -> None:
    wanted = {t: model.generate(t, max_tokens=20) for t in ("a", "b", "c", "d")}
    got: dict[str, str] = {}

    def run(text: str) -> None:
        got[text] = model.generate(text, max_tokens=20)

    workers = [threading.Thread(target=run, args=(t,)) for t in wanted]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert got == wanted


def test_cancel_inside_a_step(tmp_path: Path) -> None:
    model = Model.load(write_model(tmp_path / "toy"))
    stream = model.stream([1, toy.SLOW, 2])
    threading.Timer(0.1, stream.cancel).start()
    result: GenerationResult = stream.complete()
    assert (result.finish_reason, result.tokens) == ("cancelled", ())
    assert model.stream([1, 2], max_tokens=1).complete().tokens


def test_an_artifact_without_a_tokenizer(tmp_path: Path) -> None:
    model = Model.load(write_model(tmp_path / "toy", write_tokenizer=None))
    assert not model.has_tokenizer
    with pytest.raises(ArtifactError, match="no tokenizer"):
        model.generate("x")
    assert model.session().prefill([1, 2]).shape == (VOCAB,)


@pytest.mark.parametrize(
    ("kind", "key", "advice"),
    [
        ("hf", "0123", "^/models/m has no tokenizer.*put the model's tokenizer.json there"),
        ("gguf", "0123", "^/models/m has no tokenizer: .* to a session$"),
        ("hf", "", "toy has no tokenizer.*put the model's tokenizer.json there"),
    ],
)
def test_where_a_tokenizer_would_be_found(tmp_path: Path, kind: str, key: str, advice: str) -> None:
    """Not in a folder of the cache."""
    source = {"kind": kind, "path": "/models/m"}
    folder = write_model(tmp_path / "toy", write_tokenizer=None, source=source, key=key)
    with pytest.raises(ArtifactError, match=advice):
        Model.load(folder).generate("x")


@pytest.mark.parametrize(
    ("config", "advised"),
    [
        ({"max_position_embeddings": 64}, False),
        ({"text_config": {"max_position_embeddings": 64}}, False),
        ({"max_position_embeddings": 65}, True),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": 2.0}}, True),
        ({}, True),
    ],
)
def test_a_larger_context_is_advised_where_there_is_one(
    tmp_path: Path, config: dict[str, Any], advised: bool
) -> None:
    model = Model.load(write_model(tmp_path / "toy", capacity=64, config=config))
    with pytest.raises(ContextLengthError, match="shorten the prompt") as error:
        model.generate([1] * 65)
    assert ("larger --context" in str(error.value)) == advised


def test_code_is_loaded_when_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.artifact.reader import open_artifact

    loads: list[int] = []
    real = models.Engine.load
    monkeypatch.setattr(models.Engine, "load", lambda *a: loads.append(1) or real(*a))
    model = Model(open_artifact(write_model(tmp_path / "toy")))
    assert (model.context_length, model.name, loads) == (256, "toy", [])
    model.session()
    model.session()
    assert loads == [1]


def test_bad_threads(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="threads is 0"):
        Model.load(write_model(tmp_path / "toy"), threads=0)


def test_no_memory_for_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.artifact.reader import open_artifact

    artifact = open_artifact(write_model(tmp_path / "m"))

    def refuse(nbytes: int, *, huge: bool = False) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("bessemer.runtime.weights.allocate", refuse)
    nbytes = artifact.manifest.weights_nbytes
    words = rf"no memory for {nbytes} bytes of weights \(.*weights.bin\)"
    for limit, advice in ((resource.RLIM_INFINITY, "; .* set BESSEMER_WEIGHTS=map"), (10**9, "")):
        monkeypatch.setattr("resource.getrlimit", lambda which, soft=limit: (soft, soft))
        with pytest.raises(ArtifactError, match=f"{words}{advice}$"):
            load_weights(artifact, "huge")
    load_weights(artifact, "map")


@pytest.mark.parametrize("mode", ["map", "huge", "auto", None])
def test_both_ways_to_hold_the_weights(tmp_path: Path, mode: str | None) -> None:
    model = Model.load(write_model(tmp_path / "toy", favouring(q=50)), weights_mode=mode)
    weights = model.engine.weights
    assert weights.view(np.float32)[ord("q")] == 50
    assert not weights.flags.writeable
    assert weights.ctypes.data % 4096 == 0
    assert model.generate("x", max_tokens=2) == "qq"


def test_an_unknown_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.artifact.reader import open_artifact

    artifact = open_artifact(write_model(tmp_path / "toy"))
    monkeypatch.setenv("BESSEMER_WEIGHTS", "tape")
    with pytest.raises(UsageError, match=r"'tape'.*must be one of"):
        load_weights(artifact)


def test_a_library_recompiled_at_the_same_place(tmp_path: Path) -> None:
    path = write_model(tmp_path / "toy", favouring(a=1000))
    first = Model.load(path)
    assert first.generate("x", max_tokens=2) == "aa"
    # Another vocabulary is another library at the same path.
    toy.write_toy(path)
    second = Model.load(path)
    assert second.session().prefill([1]).shape == (toy.VOCAB,)
    assert first.generate("x", max_tokens=2) == "aa"


# -- conversations --------------------------------------------------------------------------------


def test_turns_keep_the_cache(tmp_path: Path) -> None:
    model = Model.load(write_model(tmp_path / "toy", favouring(a=1000)))
    talk = Conversation(model, system="S")
    first = talk.ask("hello", max_tokens=5)
    assert first.complete().text == "aaaaa"
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant"]
    second = talk.ask("more", max_tokens=5)
    result = second.complete()
    # All but the end of the first answer was there already.
    assert result.prompt_tokens < second.prompt_tokens
    assert result.prompt_tokens == len("a<|end|>[user]more<|end|>[assistant]") - 2 * 6
    fresh = model.stream_chat(talk.messages[:-1], max_tokens=5).complete()
    assert fresh.tokens == result.tokens
    assert talk.session.tokens[: second.prompt_tokens] == model.encode_chat(talk.messages[:-1])


def test_a_conversation_equals_cold_runs(model: Model) -> None:
    talk = Conversation(model)
    for text in ("one", "two", "three"):
        answer = talk.ask(text, max_tokens=4).complete()
        cold = model.stream_chat(talk.messages[:-1], max_tokens=4).complete()
        assert answer.tokens == cold.tokens


def test_the_same_question_twice(tmp_path: Path) -> None:
    model = Model.load(write_model(tmp_path / "toy", favouring(a=1000)))
    talk = Conversation(model)
    first = talk.ask("hello", max_tokens=3).complete()
    del talk.messages[:]
    again = talk.ask("hello", max_tokens=3).complete()
    assert again.tokens == first.tokens
    assert again.prompt_tokens == 1


def test_reset_and_system(model: Model) -> None:
    talk = Conversation(model)
    talk.ask("hello", max_tokens=3).complete()
    talk.system = "be brief"
    assert talk.messages == [{"role": "system", "content": "be brief"}]
    assert talk.session.position == 0
    talk.ask("hello", max_tokens=3).complete()
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "be brief"}]


def test_k03_a_turn_that_does_not_fit(tmp_path: Path) -> None:
    model = Model.load(write_model(tmp_path / "toy", favouring(a=1000), capacity=64))
    talk = Conversation(model)
    talk.ask("hello", max_tokens=5).complete()
    before = (list(talk.messages), talk.session.tokens)
    with pytest.raises(ContextLengthError, match=r"have \d+ tokens \(it has \d+\).*holds 64"):
        talk.ask("x" * 60)
    assert (talk.messages, talk.session.tokens) == before
    assert talk.ask("y", max_tokens=1).complete().text == "a"


def test_a_cancelled_answer_stays_as_far_as_it_came(tmp_path: Path) -> None:
    model = Model.load(write_model(tmp_path / "toy", favouring(a=1000)))
    talk = Conversation(model)
    answer = talk.ask("hello", max_tokens=50)
    assert next(answer) == "a"
    answer.cancel()
    assert answer.complete().finish_reason == "cancelled"
    assert talk.messages[-1] == {"role": "assistant", "content": "a"}
    unasked = talk.ask("and?")
    unasked.cancel()
    unasked.complete()
    assert len(talk.messages) == 2


def test_a_bad_option_changes_nothing(model: Model) -> None:
    talk = Conversation(model)
    talk.ask("hello", max_tokens=3).complete()
    before = talk.session.tokens
    with pytest.raises(UsageError):
        talk.ask("x", top_p=7.0)
    assert talk.session.tokens == before


def test_common_prefix() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([5], [6]) == 0
