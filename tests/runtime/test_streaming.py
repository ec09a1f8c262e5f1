"""Streaming: joined pieces equal the whole text, and no piece ends inside a character (T01-T05)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.runtime.streaming import TextStreamer
from bessemer.runtime.tokenizer import Tokenizer

from . import tiny_tokenizers as tiny

GPT2 = tiny.wrap(tiny.byte_level(), eos_token="<｜end▁of▁sentence｜>")
LLAMA = tiny.wrap(tiny.sentencepiece(), bos_token="<s>", eos_token="</s>")
GEMMA = tiny.wrap(tiny.sentencepiece(strip=False), bos_token="<s>", eos_token="</s>")
METASPACE = tiny.wrap(tiny.metaspace())
WORD_PIECE = tiny.wrap(tiny.word_piece())
ALL = [GPT2, LLAMA, GEMMA, METASPACE, WORD_PIECE]
FAMILY = "👩‍👩‍👧"
FLAG = "🇫🇷"


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The pieces, the last of them from finish()."""
    streamer = TextStreamer(tokenizer)
    return [*(streamer.push(i) for i in ids), streamer.finish()]


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    if tokenizer is GPT2:
        return list(data)
    return [tiny.id_of(tokenizer, f"<0x{b:02X}>") for b in data]


@pytest.mark.parametrize("tokenizer", [GPT2, LLAMA, GEMMA])
def test_t01_an_emoji_in_two_halves(tokenizer: Tokenizer) -> None:
    ids = byte_tokens(tokenizer, "😀".encode())
    assert stream(tokenizer, ids) == ["", "", "", "😀", ""]
    assert stream(tokenizer, ids[:2]) == ["", "", "\ufffd"]
    assert tokenizer.decode(ids[:2]) == "\ufffd"


@pytest.mark.parametrize("tokenizer", [GPT2, LLAMA, GEMMA])
def test_t01_bytes_that_begin_no_character(tokenizer: Tokenizer) -> None:
    # A broken-off emoji before a letter, a stray continuation byte, an overlong form.
    ids = byte_tokens(tokenizer, b"\xf0\x9fA\x98B\xc0\xafC")
    assert stream(tokenizer, ids) == [
        *("", "", "\ufffdA", "\ufffd", "B", "\ufffd", "\ufffd", "C", ""),
    ]


@pytest.mark.parametrize("tokenizer", [GPT2, LLAMA, GEMMA])
@pytest.mark.parametrize("text", ["e\u0301x", FLAG, FAMILY])
def test_t02_combining_characters_come_one_code_point_at_a_time(
    tokenizer: Tokenizer, text: str
) -> None:
    streamer = TextStreamer(tokenizer)
    for char in text:
        pieces = [streamer.push(i) for i in byte_tokens(tokenizer, char.encode())]
        assert "".join(pieces) == char
        assert pieces[-1] == char
    assert streamer.finish() == ""


@pytest.mark.parametrize("tokenizer", [GPT2, LLAMA])
def test_t03_a_lone_byte(tokenizer: Tokenizer) -> None:
    # A1 can't begin a character: it is shown at once.
    assert stream(tokenizer, byte_tokens(tokenizer, b"\xa1")) == ["\ufffd", ""]


def test_t04_the_first_space_is_the_tokenizer_s_choice() -> None:
    word = tiny.id_of(LLAMA, "\u2581hello")
    assert stream(LLAMA, [word, word]) == ["hello", " hello", ""]
    assert stream(GEMMA, [word, word]) == [" hello", " hello", ""]
    # <s> is not shown, so that the word is still the first.
    assert stream(LLAMA, [1, word, word]) == ["", "hello", " hello", ""]
    meta = tiny.id_of(METASPACE, "\u2581hello")
    assert stream(METASPACE, [meta, meta]) == ["hello", " hello", ""]
    bpe = tiny.id_of(GPT2, "\u0120hello")
    assert stream(GPT2, [bpe, bpe]) == [" hello", " hello", ""]


def test_t04_only_one_of_two_leading_spaces_goes() -> None:
    mark = tiny.id_of(LLAMA, "\u2581")
    assert stream(LLAMA, [mark, mark, mark]) == ["", " ", " ", ""]
    assert stream(LLAMA, [*byte_tokens(LLAMA, b"a"), mark]) == ["a", " ", ""]


def test_t05_special_tokens_are_not_shown() -> None:
    (eos,) = GPT2.eos_ids
    grin = byte_tokens(GPT2, "😀".encode())
    assert stream(GPT2, [ord("B"), eos]) == ["B", "", ""]
    # Between the bytes of a character, they don't break it.
    assert stream(GPT2, [*grin[:2], eos, *grin[2:]]) == ["", "", "", "", "😀", ""]


@pytest.mark.parametrize("tokenizer", ALL)
def test_unknown_ids_never_raise(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, [-1, 10**6, 2**40, tokenizer.vocab_size]) == [""] * 5


@pytest.mark.parametrize("tokenizer", ALL)
@given(data=st.data())
def test_joined_pieces_are_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size), max_size=40))
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [GPT2, LLAMA, GEMMA])
@given(text=st.text())
def test_pieces_of_real_text_are_never_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")
    assert pieces[-1] == ""


@given(data=st.data())
def test_random_tokens_of_a_real_tokenizer(smollm2: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, smollm2.vocab_size - 1), max_size=40))
    whole = smollm2._backend.decode(ids, skip_special_tokens=True)
    assert smollm2.decode(ids) == whole
    assert "".join(stream(smollm2, ids)) == whole


@given(text=st.text())
def test_text_through_a_real_tokenizer(smollm2: Tokenizer, text: str) -> None:
    pieces = stream(smollm2, smollm2.encode(text, add_special=False))
    assert "".join(pieces) == smollm2.decode(smollm2.encode(text))
    assert pieces[-1] == ""


def test_a_streamer_starts_anew_after_finish() -> None:
    word = tiny.id_of(LLAMA, "\u2581hello")
    streamer = TextStreamer(LLAMA)
    for _ in range(2):
        assert streamer.push(word) == "hello"
        assert streamer.push(byte_tokens(LLAMA, b"\xf0")[0]) == ""
        assert streamer.finish() == "\ufffd"


def test_a_decoder_that_is_not_understood_streams_through_a_window() -> None:
    tokens = ("hello", "##s", "world", ".", "do", "n", "'", "t")
    ids = [tiny.id_of(WORD_PIECE, token) for token in tokens]
    pieces = stream(WORD_PIECE, ids)
    assert pieces[:4] == ["hello", "s", " world", "."]
    assert "".join(pieces) == WORD_PIECE.decode(ids)


class _Counting:
    """A tokenizer whose decoder the rules don't know, and which counts the ids it decodes."""

    piece_rules = None

    def __init__(self) -> None:
        self.decoded = 0

    def token(self, token_id: int) -> str:
        return "x"

    def is_special(self, token_id: int) -> bool:
        return False

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return "\ufffd" * len(ids)


def test_the_cost_of_a_token_does_not_grow() -> None:
    # The worst case of the window: the text never seems to be complete.
    counting = _Counting()
    streamer = TextStreamer(counting)  # type: ignore[arg-type]
    text = "".join(streamer.push(i) for i in range(1000)) + streamer.finish()
    assert text == "\ufffd" * 1000
    assert counting.decoded < 40 * 1000
