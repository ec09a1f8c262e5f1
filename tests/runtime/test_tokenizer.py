"""The tokenizer: BOS, EOS, special tokens, decoding, and damaged files (T03 to T06, T08, T15)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import ArtifactError, UsageError
from bessemer.runtime.pieces import rules_for
from bessemer.runtime.tokenizer import Tokenizer

from . import tiny_tokenizers as tiny

BOS_CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    return tiny.wrap(tiny.sentencepiece(), **BOS_CONFIG)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return tiny.wrap(tiny.byte_level(), bos_token="<|bos|>", eos_token="<|end|>")


# -- BOS ---------------------------------------------------------------------------------------


def test_t06_exactly_one_bos(llama: Tokenizer) -> None:
    plain = llama.encode("hello")
    assert plain[0] == llama.bos_id == 1
    assert plain.count(1) == 1
    assert llama.adds_bos
    # A rendered template that starts with BOS.
    rendered = "<s>hello"
    assert llama.encode(rendered).count(1) == 1
    assert llama.encode_chat(rendered).count(1) == 1
    assert llama.encode("hello", add_special=False).count(1) == 0
    assert llama.encode_chat("hello").count(1) == 0


def test_two_bos_that_the_text_holds_stay_two(llama: Tokenizer) -> None:
    assert llama.encode("<s><s>hello")[:3].count(1) == 2
    assert llama.encode("") == [1]


@pytest.mark.parametrize("added_by_backend", [False, True])
def test_add_bos_token_wins_over_the_post_processor(added_by_backend: bool) -> None:
    for wanted in (False, True):
        backend = tiny.byte_level()
        if added_by_backend:
            tiny._add_bos(backend, "<|bos|>")
        tokenizer = tiny.wrap(backend, bos_token="<|bos|>", add_bos_token=wanted)
        bos = tokenizer.bos_id
        assert tokenizer.encode("hi") == [bos] * wanted + tokenizer.encode_chat("hi")
        assert tokenizer.encode("<|bos|>hi") == [bos, *tokenizer.encode_chat("hi")]
        assert tokenizer.adds_bos is wanted


def test_no_bos_declared(gpt2: Tokenizer) -> None:
    assert not gpt2.adds_bos
    bare = tiny.wrap(tiny.byte_level(), bos_token=None)
    assert bare.bos_id is None
    assert bare.bos_token is None
    assert not bare.adds_bos
    # A null in tokenizer_config.json wins over the model's configuration (Qwen2).
    files = {"tokenizer_config.json": {"bos_token": None}, "config.json": {"bos_token_id": 3}}
    assert Tokenizer(tiny.byte_level(), files).bos_id is None
    assert Tokenizer(tiny.byte_level(), {"config.json": {"bos_token_id": 3}}).bos_id == 3


# -- EOS and special tokens --------------------------------------------------------------------


def test_t08_eos_is_the_union_of_all_sources() -> None:
    backend = tiny.sentencepiece()
    files = {
        "tokenizer_config.json": {"eos_token": {"content": "</s>"}},
        "generation_config.json": {"eos_token_id": [1, 40, True, None, "x", -1, 10**9]},
        "config.json": {"eos_token_id": 41, "text_config": {"eos_token_id": [42]}},
    }
    tokenizer = Tokenizer(backend, files)
    assert tokenizer.eos_ids == {1, 2, 40, 41, 42}
    assert tokenizer.eos_token == "</s>"
    assert Tokenizer(tiny.sentencepiece(), {}).eos_ids == frozenset()


def test_special_tokens_map_is_the_second_choice() -> None:
    special = {"eos_token": "<s>", "bos_token": {"content": "</s>"}, "pad_token": "<unk>"}
    files = {"tokenizer_config.json": {"eos_token": "</s>"}, "special_tokens_map.json": special}
    tokenizer = Tokenizer(tiny.sentencepiece(), files)
    assert tokenizer.eos_ids == {2}
    assert tokenizer.bos_id == 2
    assert tokenizer.special_tokens == {
        "eos_token": "</s>",
        "bos_token": "</s>",
        "pad_token": "<unk>",
    }


def test_t05_an_eos_with_full_width_bars_is_special_and_not_shown() -> None:
    backend = tiny.byte_level()
    name = "<｜end▁of▁sentence｜>"
    tokenizer = tiny.wrap(backend, eos_token=name)
    (eos,) = tokenizer.eos_ids
    assert tokenizer.is_special(eos)
    assert tokenizer.decode([ord("B"), eos]) == "B"
    assert tokenizer.decode([eos], skip_special=False) == name
    assert tokenizer.token_bytes(eos) == name.encode()


def test_an_end_of_turn_token_that_is_not_marked_special_is_hidden() -> None:
    backend = tiny.byte_level()
    backend.add_tokens(["<|im_end|>"])
    end = tiny.id_of(Tokenizer(backend, {}), "<|im_end|>")
    assert not Tokenizer(backend, {}).is_special(end)
    assert Tokenizer(backend, {"generation_config.json": {"eos_token_id": [end]}}).is_special(end)


def test_an_ordinary_token_stays_visible_as_padding_or_eos() -> None:
    backend = tiny.byte_level()
    newline = backend.encode("\n").ids[0]
    bang = backend.encode("!").ids[0]
    files = {
        "tokenizer_config.json": {"pad_token": "!"},
        "generation_config.json": {"eos_token_id": newline},
    }
    tokenizer = Tokenizer(backend, files)
    assert tokenizer.eos_ids == {newline}
    assert tokenizer.decode([bang, newline]) == "!\n"


def test_added_tokens_that_only_the_configuration_lists() -> None:
    backend = tiny.byte_level()
    new = backend.get_vocab_size()
    entry = {"content": "<|im_start|>", "special": True, "normalized": False, "lstrip": False}
    tokenizer = tiny.wrap(backend, added_tokens_decoder={str(new): entry})
    assert tokenizer.encode("<|im_start|>") == [new]
    assert tokenizer.is_special(new)
    assert tokenizer.vocab_size == new + 1
    with pytest.raises(ArtifactError, match="don't belong together"):
        tiny.wrap(tiny.byte_level(), added_tokens_decoder={str(new + 5): entry})


def test_extra_special_tokens_are_hidden() -> None:
    backend = tiny.byte_level()
    backend.add_tokens(["<a>", "<b>", "<c>"])
    config = {"additional_special_tokens": ["<a>"], "extra_special_tokens": {"image": "<b>"}}
    tokenizer = tiny.wrap(backend, **config)
    hidden = [tokenizer.is_special(tiny.id_of(tokenizer, t)) for t in ("<a>", "<b>", "<c>")]
    assert hidden == [True, True, False]


def test_t15_vocabulary_size_and_holes() -> None:
    vocab = {"a": 0, "b": 1, "c": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    tokenizer = Tokenizer(backend, {})
    assert tokenizer.vocab_size == 5
    assert tokenizer.missing_ids == {2, 3}
    assert tokenizer.decode([1, 2, 5, -1, 10**7]) == "b"
    assert [tokenizer.token(i) for i in (1, 2, 5, -1)] == ["b", None, None, None]
    assert tokenizer.token_bytes(2) == b""


# -- decoding ----------------------------------------------------------------------------------


def test_t03_a_lone_byte_is_one_replacement_character(gpt2: Tokenizer, llama: Tokenizer) -> None:
    alone = tiny.id_of(llama, "<0xA1>")
    for text in (gpt2.decode([0xA1]), llama.decode([alone])):
        assert text == "\ufffd"
        assert json.loads(json.dumps({"text": text}))["text"] == "\ufffd"
    assert gpt2.token_bytes(0xA1) == llama.token_bytes(alone) == b"\xa1"


@given(st.lists(st.integers(0, 263)))
def test_byte_level_equals_the_library(ids: list[int]) -> None:
    tokenizer = tiny.wrap(BYTE_LEVEL)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


BYTE_LEVEL = tiny.byte_level()
SENTENCEPIECE = {strip: tiny.sentencepiece(strip) for strip in (True, False)}


@pytest.mark.parametrize("strip", [True, False])
@given(text=st.text())
def test_t04_sentencepiece_equals_the_library_on_text(strip: bool, text: str) -> None:
    backend = SENTENCEPIECE[strip]
    tokenizer = tiny.wrap(backend, **BOS_CONFIG)
    ids = tokenizer.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("strip", [True, False])
@given(ids=st.lists(st.integers(259, 275) | st.sampled_from([0, 1, 2, 35, 260])))
def test_t04_sentencepiece_equals_the_library_on_tokens(strip: bool, ids: list[int]) -> None:
    # 35 is <0x20>: a space by another name. Runs of it are valid UTF-8.
    backend = SENTENCEPIECE[strip]
    tokenizer = tiny.wrap(backend, **BOS_CONFIG)
    assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)


def test_t04_leading_space(llama: Tokenizer, gpt2: Tokenizer) -> None:
    space_hello = tiny.id_of(llama, "\u2581hello")
    assert llama.decode([space_hello, space_hello]) == "hello hello"
    assert llama.token_bytes(space_hello) == b" hello"
    gemma = tiny.wrap(tiny.sentencepiece(strip=False), **BOS_CONFIG)
    assert gemma.decode([space_hello]) == " hello"
    word = tiny.id_of(gpt2, "\u0120hello")
    assert gpt2.decode([word]) == " hello"
    assert gpt2.token_bytes(word) == b" hello"


@given(st.lists(st.integers(0, 13)))
def test_t04_metaspace_equals_the_library(ids: list[int]) -> None:
    assert tiny.wrap(METASPACE).decode(ids) == METASPACE.decode(ids)


METASPACE = tiny.metaspace()


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"Regex": "_+"}, "content": " "},
                {"type": "Fuse"},
            ],
        },
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 1},
            ],
        },
    ],
)
def test_a_decoder_that_is_not_understood_is_not_guessed(decoder: dict | None) -> None:
    assert rules_for(decoder) is None


def test_ids_may_be_numpy_s(gpt2: Tokenizer) -> None:
    assert gpt2.decode(np.array([72, 105, 255], np.int64)) == "Hi\ufffd"


def test_real_text_round_trips(smollm2: Tokenizer) -> None:
    for text in (
        "Hello, world",
        " a\n\n\tb  c",
        "naïve 12345 日本語 👩‍👩‍👧 e\u0301",
        "",
        "x" * 5000,
    ):
        assert smollm2.decode(smollm2.encode(text)) == text
    assert smollm2.vocab_size == 49152
    assert not smollm2.missing_ids
    end = smollm2.token_id("<|im_end|>")
    assert end in smollm2.eos_ids
    assert smollm2.is_special(end)


# -- what a tokenizer.json must not do, and bad input ------------------------------------------


def test_a_stored_truncation_does_not_cut_prompts() -> None:
    backend = tiny.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    assert len(tiny.wrap(backend).encode("0123456789")) == 10
    assert len(tiny.wrap(backend).encode("ab")) == 2


def test_a_lone_surrogate_is_refused(gpt2: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"U\+DC80.*position 2"):
        gpt2.encode("ab\udc80")


@pytest.mark.parametrize("name", ["модель é b", 'it\'s "x"', "-dash"])
def test_load_from_a_folder_with_any_name(tmp_path: Path, name: str) -> None:
    folder = tiny.write(
        tmp_path / name, tiny.sentencepiece(), tokenizer_config=dict(BOS_CONFIG, add_bos_token=True)
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.eos_ids == {2}
    assert tokenizer.chat_template is None


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    folder = tiny.write(tmp_path / "a", tiny.byte_level())
    (folder / "config.json").write_text("{oops")
    with pytest.raises(ArtifactError, match=r"config\.json is not valid JSON"):
        Tokenizer.load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ArtifactError, match="no JSON object"):
        Tokenizer.load(folder)
    (folder / "config.json").unlink()
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ArtifactError, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    with pytest.raises(ArtifactError, match="can't be read"):
        Tokenizer.load(folder)


def test_chat_template_sources(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    folder = tiny.write(tmp_path, tiny.byte_level(), chat_template={"chat_template": "J"})
    assert Tokenizer.load(folder).chat_template == "J"
    tiny.write(tmp_path, tiny.byte_level(), tokenizer_config={"chat_template": "C"})
    assert Tokenizer.load(folder).chat_template == "C"
    tiny.write(tmp_path, tiny.byte_level(), tokenizer_config={"chat_template": named})
    assert Tokenizer.load(folder).chat_template == {"default": "D", "rag": "R"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("Ü", encoding="utf-8")
    (folder / "chat_template.jinja").write_text("F", encoding="utf-8")
    merged = {"default": "F", "rag": "R", "tool_use": "Ü"}
    assert Tokenizer.load(folder).chat_template == merged
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ArtifactError, match=r"chat_template\.jinja"):
        Tokenizer.load(folder)
