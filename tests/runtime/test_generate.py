"""The token loop on a scripted session: ends, stops, cancelling, and what the session holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from bessemer.errors import ContextLengthError, GenerationError, UsageError
from bessemer.runtime.generate import Generation, generate_stream
from bessemer.runtime.sampling import SamplingOptions
from bessemer.runtime.tokenizer import Tokenizer

from . import tiny_tokenizers as tiny

# Ids 0 to 255 are bytes.
TOKENIZER = tiny.wrap(tiny.byte_level(), bos_token="<|bos|>", eos_token="<|end|>")
END = tiny.id_of(TOKENIZER, "<|end|>")
OTHER_END = tiny.id_of(TOKENIZER, "<｜end▁of▁sentence｜>")
PAD_ROWS = 8  # logits past the tokenizer


class ScriptedSession:
    """Says the tokens of `script` one after the other, then starts over; keeps what it was fed.

    interrupt_at: Ctrl-C arrives in the call that would feed this position.
    """

    def __init__(
        self, script: Sequence[int], capacity: int = 64, interrupt_at: int | None = None
    ) -> None:
        self.script = list(script)
        self.capacity = capacity
        self.fed: list[int] = []
        self.calls: list[str] = []
        self.said = 0
        self.interrupt_at = interrupt_at

    @property
    def position(self) -> int:
        return len(self.fed)

    def _logits(self) -> np.ndarray:
        logits = np.zeros(TOKENIZER.vocab_size + PAD_ROWS, np.float32)
        logits[self.script[self.said % len(self.script)]] = 1.0
        self.said += 1
        return logits

    def _feed(self, ids: Sequence[int]) -> np.ndarray:
        assert len(self.fed) + len(ids) <= self.capacity, "fed past the context's end"
        for token in ids:
            if self.position == self.interrupt_at:
                self.interrupt_at = None
                raise KeyboardInterrupt
            self.fed.append(token)
        return self._logits()

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        self.calls.append("prefill")
        return self._feed(ids)

    def decode(self, token: int) -> np.ndarray:
        self.calls.append("decode")
        return self._feed([token])

    def rewind(self, n: int) -> None:
        self.calls.append("rewind")
        del self.fed[n:]


def says(text: str, *more: int, capacity: int = 64) -> ScriptedSession:
    return ScriptedSession([*text.encode(), *more], capacity)


# -- the end of the context --------------------------------------------------------------------


def test_k03_seven_tokens_fit_after_ten_of_sixteen() -> None:
    session = says("abcdefghijkl", capacity=16)
    result = generate_stream(session, TOKENIZER, range(10), max_tokens=50).complete()
    assert result.text == "abcdefg"
    assert result.tokens == tuple(b"abcdefg")
    assert result.finish_reason == "length"
    assert result.prompt_tokens == 10
    # The last is not fed.
    assert session.fed == [*range(10), *b"abcdef"]
    assert result.fed == 6
    assert result.unfed == (ord("g"),)


def test_k03_a_second_turn_that_does_not_fit() -> None:
    session = says("abc", END, capacity=32)
    generate_stream(session, TOKENIZER, [5] * 20, max_tokens=4).complete()
    assert session.position == 23
    before = list(session.fed)
    with pytest.raises(ContextLengthError, match=r"20 tokens.*23.*43.*32"):
        generate_stream(session, TOKENIZER, [6] * 20, max_tokens=4)
    assert session.fed == before
    # The session lives: a shorter turn goes on.
    assert generate_stream(session, TOKENIZER, [7] * 3, max_tokens=4).complete().text == "abc"


def test_k07_a_full_context_gives_one_token() -> None:
    session = says("abc", capacity=64)
    result = generate_stream(session, TOKENIZER, [1] * 64, max_tokens=10).complete()
    assert result.tokens == (ord("a"),)
    assert result.finish_reason == "length"
    assert session.calls == ["prefill"]


@pytest.mark.parametrize("count", [65, 100])
def test_k07_a_longer_prompt_is_an_error(count: int) -> None:
    session = says("abc", capacity=64)
    with pytest.raises(ContextLengthError, match=rf"{count} tokens.*64"):
        generate_stream(session, TOKENIZER, [1] * count, max_tokens=10)
    assert session.calls == []


def test_a_session_that_filled_up_meanwhile_is_left_alone() -> None:
    session = says("abc", capacity=16)
    late = generate_stream(session, TOKENIZER, [1] * 10, max_tokens=4)
    generate_stream(session, TOKENIZER, [2] * 10, max_tokens=1).complete()
    with pytest.raises(ContextLengthError, match=r"10.*20.*16"):
        next(late)
    assert session.fed == [2] * 10


def test_without_max_tokens_the_context_is_the_limit() -> None:
    result = generate_stream(says("a", capacity=20), TOKENIZER, [1] * 5).complete()
    assert len(result.tokens) == 16


# -- max_tokens, EOS, stop strings -------------------------------------------------------------


def test_max_tokens() -> None:
    result = generate_stream(says("abcdef"), TOKENIZER, [1], max_tokens=3).complete()
    assert (result.text, result.finish_reason) == ("abc", "length")


def test_max_tokens_zero_only_feeds_the_prompt() -> None:
    session = says("abc")
    result = generate_stream(session, TOKENIZER, [1, 2], max_tokens=0).complete()
    assert (result.text, result.tokens, result.finish_reason) == ("", (), "length")
    assert result.unfed == ()
    assert result.time_to_first_token_s is None
    assert session.fed == [1, 2]


@pytest.mark.parametrize("bad", [-1, 1.5, True, "3"])
def test_bad_max_tokens(bad: object) -> None:
    with pytest.raises(UsageError, match="max_tokens"):
        generate_stream(says("a"), TOKENIZER, [1], max_tokens=bad)  # type: ignore[arg-type]


def test_an_empty_prompt() -> None:
    with pytest.raises(UsageError, match="no tokens"):
        generate_stream(says("a"), TOKENIZER, [], max_tokens=3)


@pytest.mark.parametrize("eos", [END, OTHER_END])
def test_t08_any_eos_of_the_union_stops(eos: int) -> None:
    files = {
        "tokenizer_config.json": {"eos_token": "<|end|>"},
        "generation_config.json": {"eos_token_id": [END, OTHER_END]},
    }
    tokenizer = Tokenizer(tiny.byte_level(), files)
    session = says("ab", eos)
    generation = generate_stream(session, tokenizer, [1], max_tokens=9)
    assert list(generation) == ["a", "b"]
    result = generation.result
    assert (result.text, result.finish_reason) == ("ab", "stop")
    assert result.tokens == (*b"ab", eos)
    assert result.unfed == (eos,)


def test_eos_ids_can_be_given() -> None:
    session = says("ab", OTHER_END)
    result = generate_stream(session, TOKENIZER, [1], max_tokens=9, eos_ids={ord("b")}).complete()
    assert (result.text, result.finish_reason) == ("a", "stop")
    # None stops here, and a special token is not shown.
    result = generate_stream(says("ab", END), TOKENIZER, [1], max_tokens=6, eos_ids=()).complete()
    assert (result.text, result.finish_reason) == ("abab", "length")


def test_an_eos_as_the_last_token_allowed_is_a_stop() -> None:
    result = generate_stream(says("ab", END), TOKENIZER, [1], max_tokens=3).complete()
    assert result.finish_reason == "stop"


def test_t09_stop_strings_do_not_leak() -> None:
    session = says("hello world")
    generation = generate_stream(session, TOKENIZER, [1], max_tokens=50, stops=["lo w", "zz9zzz"])
    pieces = list(generation)
    assert "".join(pieces) == generation.result.text == "hel"
    assert generation.result.finish_reason == "stop"
    assert bytes(generation.result.tokens) == b"hello w"
    assert bytes(session.fed[1:]) == b"hello "


def test_t09_a_partial_stop_is_released_at_the_end() -> None:
    for more, reason in (((END,), "stop"), ((), "length")):
        generation = generate_stream(
            says("hello", *more), TOKENIZER, [1], max_tokens=5 + len(more), stops=["lo w"]
        )
        assert "".join(generation) == generation.result.text == "hello"
        assert generation.result.finish_reason == reason


def test_the_text_of_a_special_token_is_a_stop() -> None:
    session = says("ab", OTHER_END)
    result = generate_stream(
        session, TOKENIZER, [1], max_tokens=9, stops="<｜end▁of▁sentence｜>"
    ).complete()
    assert (result.text, result.finish_reason) == ("ab", "stop")


def test_bad_stops_are_found_before_the_session_is_touched() -> None:
    session = says("a")
    with pytest.raises(UsageError, match="empty"):
        generate_stream(session, TOKENIZER, [1], max_tokens=9, stops=[""])
    assert session.calls == []


def test_t01_a_character_in_pieces_and_one_broken_off() -> None:
    generation = generate_stream(says("é😀", END), TOKENIZER, [1], max_tokens=9)
    assert list(generation) == ["é", "😀"]
    generation = generate_stream(says("a😀"), TOKENIZER, [1], max_tokens=3)
    assert list(generation) == ["a", "\ufffd"]
    assert generation.result.text == "a\ufffd"


# -- sampling ----------------------------------------------------------------------------------


def test_t15_padding_of_the_vocabulary_is_never_sampled() -> None:
    past = TOKENIZER.vocab_size + 3
    session = ScriptedSession([past])
    result = generate_stream(session, TOKENIZER, [1], max_tokens=3).complete()
    assert result.tokens == (0, 0, 0)
    options = SamplingOptions(temperature=1.0, seed=3)
    result = generate_stream(session, TOKENIZER, [1], max_tokens=20, sampling=options).complete()
    assert max(result.tokens) < TOKENIZER.vocab_size
    assert len(set(result.tokens)) > 5


def test_the_penalty_sees_the_prompt_the_answer_and_the_history() -> None:
    def first(prompt: Sequence[int], history: Sequence[int] = ()) -> tuple[int, ...]:
        options = SamplingOptions(repeat_penalty=4.0, logit_bias={ord("z"): 0.5})
        return (
            generate_stream(
                says("a"), TOKENIZER, prompt, max_tokens=2, sampling=options, history=history
            )
            .complete()
            .tokens
        )

    # "a" has logit 1, "z" has 0.5 after the bias.
    assert first([1]) == (ord("a"), ord("z"))
    assert first(list(b"a")) == (ord("z"), ord("z"))
    assert first([1], history=b"a") == (ord("z"), ord("z"))


def test_bad_logits_end_the_generation_but_not_the_session() -> None:
    class Broken(ScriptedSession):
        def _logits(self) -> np.ndarray:
            logits = super()._logits()
            return logits * np.nan if self.said == 3 else logits

    session = Broken(b"abcdef")
    generation = generate_stream(session, TOKENIZER, [1], max_tokens=5)
    assert next(generation) == "a"
    assert next(generation) == "b"
    with pytest.raises(GenerationError, match="NaN"):
        next(generation)
    assert list(generation) == []
    with pytest.raises(UsageError, match="failed"):
        _ = generation.result
    assert generate_stream(session, TOKENIZER, [2], max_tokens=2).complete().text == "de"


# -- cancelling --------------------------------------------------------------------------------


def test_r04_ctrl_c_in_decode() -> None:
    session = ScriptedSession(b"abcdefgh", interrupt_at=5)
    generation = generate_stream(session, TOKENIZER, [1, 2, 3], max_tokens=9)
    assert list(generation) == ["a", "b", "c"]
    result = generation.result
    assert (result.text, result.finish_reason) == ("abc", "cancelled")
    assert session.fed == [1, 2, 3, *b"ab"]
    assert bytes(result.unfed) == b"c"
    # The next turn goes on from what is held.
    again = generate_stream(session, TOKENIZER, [*result.unfed, 9], max_tokens=2).complete()
    assert again.text == "de"
    assert session.fed == [1, 2, 3, *b"abc", 9, *b"d"]


@pytest.mark.parametrize("interrupt_at", [4, 6])
def test_r04_ctrl_c_in_prefill(interrupt_at: int) -> None:
    session = ScriptedSession(b"abc", interrupt_at=interrupt_at)
    session.fed = [1, 2, 3, 4]
    generation = generate_stream(session, TOKENIZER, [5, 6, 7, 8], max_tokens=9)
    assert list(generation) == []
    assert generation.result.finish_reason == "cancelled"
    assert generation.result.tokens == generation.result.unfed == ()
    assert session.fed == [1, 2, 3, 4]
    assert generate_stream(session, TOKENIZER, [5], max_tokens=1).complete().text == "a"


def test_cancel_between_pieces() -> None:
    session = says("hello", capacity=64)
    generation = generate_stream(session, TOKENIZER, [1], max_tokens=9, stops=["lx"])
    assert [next(generation), next(generation)] == ["h", "e"]
    generation.cancel()
    assert list(generation) == []
    assert generation.result.finish_reason == "cancelled"
    assert bytes(session.fed[1:]) == b"h"


def test_what_was_held_back_comes_out_when_cancelled() -> None:
    held: list[Generation] = []

    def stop_at_first_l(token: int) -> None:
        if token == ord("l"):
            held[0].cancel()

    held.append(
        generate_stream(
            says("hello"), TOKENIZER, [1], max_tokens=9, stops=["lx"], on_token=stop_at_first_l
        )
    )
    assert list(held[0]) == ["h", "e", "l"]
    assert held[0].result.text == "hel"


def test_cancel_before_the_start_leaves_the_session() -> None:
    session = says("abc")
    session.fed = [1, 2]
    generation = generate_stream(session, TOKENIZER, [3], max_tokens=9)
    with pytest.raises(UsageError, match="not over"):
        _ = generation.result
    generation.cancel()
    assert generation.result.finish_reason == "cancelled"
    assert list(generation) == []
    assert session.fed == [1, 2]
    assert session.calls == []


def test_ctrl_c_in_a_callback_loses_no_text() -> None:
    def interrupt(token: int) -> None:
        if token == ord("b"):
            raise KeyboardInterrupt

    session = says("abcd")
    generation = generate_stream(session, TOKENIZER, [1], max_tokens=9, on_token=interrupt)
    assert list(generation) == ["a", "b"]
    assert generation.result.text == "ab"
    assert generation.result.finish_reason == "cancelled"


def test_cancel_after_the_end_changes_nothing() -> None:
    generation = generate_stream(says("ab", END), TOKENIZER, [1], max_tokens=9)
    result = generation.complete()
    generation.cancel()
    assert generation.result is result
    assert list(generation) == []


# -- callbacks and figures ---------------------------------------------------------------------


def test_on_token_sees_every_token() -> None:
    seen: list[int] = []
    generate_stream(says("é", END), TOKENIZER, [1], max_tokens=9, on_token=seen.append).complete()
    assert seen == [*"é".encode(), END]


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("bessemer.runtime.generate.time.perf_counter", lambda: clock[0])

    class Slow(ScriptedSession):
        def prefill(self, ids: Sequence[int]) -> np.ndarray:
            clock[0] += 2.0
            return super().prefill(ids)

        def decode(self, token: int) -> np.ndarray:
            clock[0] += 0.5
            return super().decode(token)

    generation = generate_stream(Slow(b"abc"), TOKENIZER, [1] * 8, max_tokens=3)
    clock[0] += 50.0  # waiting before the start doesn't count, nor between pieces
    for _ in generation:
        clock[0] += 50.0
    result = generation.result
    assert result.prefill_s == 2.0
    assert result.time_to_first_token_s == 2.0
    assert result.decode_s == 1.0
    assert result.prefill_tokens_per_second == 4.0
    assert result.decode_tokens_per_second == 2.0


def test_figures_without_tokens() -> None:
    result = generate_stream(says("a"), TOKENIZER, [1], max_tokens=1).complete()
    assert result.decode_tokens_per_second == 0.0
