"""Tokenizers out of GGUF files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from bessemer.errors import CheckpointError
from bessemer.importer.checkpoint import open_checkpoint
from bessemer.importer.checkpoint.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNUSED, USER_DEFINED
from bessemer.importer.checkpoint.pretokenizers import GPT2, PRE_TOKENIZERS

from .builders import LLAMA_METADATA, llama_tensors, tiny_gguf

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def with_tokenizer(path: Path, keys: dict[str, Any], rows: int = 400, **model: Any) -> Path:
    """A tiny llama with `rows` embeddings and the tokenizer keys `keys` (without their prefix)."""
    import numpy as np

    tensors = llama_tensors()
    tensors["token_embd.weight"] = (np.zeros((rows, 64), np.float32), "f32")
    named = {
        key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}": value
        for key, value in keys.items()
    }
    return tiny_gguf(path, tensors, LLAMA_METADATA | model | named)


def load(tmp_path: Path, keys: dict[str, Any], **model: Any) -> Tokenizer:
    path = with_tokenizer(tmp_path / "m.gguf", keys, **model)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.has_tokenizer()
        checkpoint.write_tokenizer(tmp_path / "out")
    return Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))


def file(tmp_path: Path, name: str) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / name).read_text())


def byte_level_keys(pre: str | None = "gpt-2", **more: Any) -> dict[str, Any]:
    """Two control tokens, the 256 bytes, a few merges, one user-defined and two unused tokens."""
    pairs = ["h i", "Ġ hi", "1 2", "12 3", "Ġ Ġ", "' s"]
    merged = ["".join(pair.split(" ")) for pair in pairs]
    tokens = ["<|bos|>", "<|eos｜>", *BYTES, *merged, "<tool  x>", "[PAD1]", "[PAD2]"]
    types = [CONTROL] * 2 + [NORMAL] * (256 + len(merged)) + [USER_DEFINED, UNUSED, UNUSED]
    keys = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": types,
        "merges": pairs,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return keys | ({} if pre is None else {"pre": pre}) | more


# Byte-level BPE.


def test_byte_level_tokens_merge_and_come_back(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level_keys())
    assert tokenizer.get_vocab_size() == 2 + 256 + 6 + 1, "unused tokens at the end are left out"
    assert tokenizer.encode(" hi  123").tokens == ["Ġhi", "Ġ", "Ġ", "123"]
    for text in ("", " ", "héllo\n\n\tx", "日本 😀", "it's"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_control_tokens_are_found_in_text_and_hidden_in_answers(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level_keys())
    ids = tokenizer.encode("<|bos|> hi<|eos｜><tool  x>").ids
    assert ids[0] == 0
    assert ids[2] == 1
    assert tokenizer.decode(ids) == " hi<tool  x>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|> hi<|eos｜><tool  x>"


@pytest.mark.parametrize(
    ("pre", "flag", "bos"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
    ],
)
def test_bos_is_added_as_the_file_says(
    tmp_path: Path, pre: str, flag: bool | None, bos: bool
) -> None:
    keys = byte_level_keys(pre) | ({} if flag is None else {"add_bos_token": flag})
    tokenizer = load(tmp_path, keys)
    assert tokenizer.encode("x").tokens == (["<|bos|>"] if bos else []) + ["x"]
    assert tokenizer.encode("x", add_special_tokens=False).tokens == ["x"]
    assert file(tmp_path, "tokenizer_config.json")["add_bos_token"] is bos


def test_eos_is_added_as_the_file_says(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level_keys(add_eos_token=True, add_bos_token=True))
    assert tokenizer.encode("x").tokens == ["<|bos|>", "x", "<|eos｜>"]


def split(pre: str, text: str) -> list[str]:
    """How a text is split before merging, each piece as text."""
    rules = PRE_TOKENIZERS[pre]
    stages = [pre_tokenizers.Split(Regex(p), "isolated") for p in rules.patterns]
    pieces = pre_tokenizers.Sequence(stages).pre_tokenize_str(text)
    return [piece for piece, _ in pieces]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " I", "'", "LL", " 1234", "  ", " x", "!?", "\n\n"]),
        (
            "smollm",
            ["It", "'s", " I", "'", "LL", " ", "1", "2", "3", "4", "  ", " x", "!?", "\n\n"],
        ),
        ("qwen2", ["It", "'s", " I", "'LL", " ", "1", "2", "3", "4", "  ", " x", "!?\n\n"]),
        ("llama-bpe", ["It", "'s", " I", "'LL", " ", "123", "4", "  ", " x", "!?\n\n"]),
        ("tekken", ["It", "'s", " I", "'L", "L", " ", "1", "2", "3", "4", "  ", " x", "!?\n\n"]),
        ("gpt-4o", ["It's", " I'LL", " ", "123", "4", "  ", " x", "!?\n\n"]),
        ("default", ["It", "'", "s", " I", "'", "LL", " ", "123", "4", "  ", " x", "!?", "\n\n"]),
        (
            "deepseek-coder",
            [
                "It",
                "'",
                "s",
                " I",
                "'",
                "LL",
                " ",
                "1",
                "2",
                "3",
                "4",
                "  ",
                " x",
                "!?",
                "\n",
                "\n",
            ],
        ),
    ],
)
def test_how_each_family_splits(pre: str, pieces: list[str]) -> None:
    text = "It's I'LL 1234   x!?\n\n"
    assert "".join(pieces) == text
    if pre == "tekken":
        # Its case rule keeps a run of capitals together.
        pieces = [*pieces[:3], "'LL", *pieces[5:]]
    assert split(pre, text) == pieces


def test_patterns_are_those_of_transformers() -> None:
    from transformers.integrations.gguf import gguf_tokenizer_mapping as table

    shared = PRE_TOKENIZERS.keys() & table.GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert len(shared) >= 10
    for name in shared:
        assert PRE_TOKENIZERS[name].patterns == (table.GGUF_PRE_TOKENIZER_SPLITS[name],), name


def test_qwen2_normalises_and_llama3_takes_whole_tokens(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level_keys("qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301").ids) == "é"
    # "Ġhi" has no merge that leads to it here, but is a token.
    keys = byte_level_keys("llama-bpe", merges=["1 2"], add_bos_token=False)
    assert load(tmp_path, keys).encode(" hi").tokens == ["Ġhi"]
    keys["pre"] = "smaug-bpe"
    assert load(tmp_path, keys).encode(" hi").tokens == ["Ġ", "h", "i"]


def test_an_unknown_way_of_splitting_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'mystery'.*not known.*qwen2.*smollm"):
        load(tmp_path, byte_level_keys("mystery"))
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_missing_way_of_splitting_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load(tmp_path, byte_level_keys(pre=None))
    assert "tokenizer.ggml.pre is missing" in caplog.text
    assert tokenizer.encode("1234").tokens == ["123", "4"]


# SentencePiece.


def sentencepiece_keys(**more: Any) -> dict[str, Any]:
    words = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "aa", "▁▁", "é"]
    scores = [-20, -21, -22, -23, -1, -2, -3, -5, -4, -6, -7, -24]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *words,
        "<|user|>",
    ]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words) + [USER_DEFINED],
        "scores": [0.0] * 259 + [float(score) for score in scores] + [0.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | more


def reference_pieces(keys: dict[str, Any], text: str) -> list[str]:
    """SentencePiece's BPE: again and again the best-scored pair, the leftmost of equal ones."""
    scores = dict(zip(keys["tokens"], keys["scores"], strict=True))
    normal = {t for t, kind in zip(keys["tokens"], keys["token_type"], strict=True) if kind == 1}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[a + b], index)
            for index, (a, b) in enumerate(itertools.pairwise(symbols))
            if a + b in normal
        ]
        if not pairs:
            break
        index = min(pairs)[1]
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
    pieces = []
    for symbol in symbols:
        known = symbol in normal
        pieces += [symbol] if known else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return pieces


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("spm"), sentencepiece_keys())


@given(st.text(alphabet="abc é😀<0xA>", max_size=24).filter(bool))
@settings(max_examples=300, deadline=None)
def test_sentencepiece_merges_by_score(sentencepiece: Tokenizer, text: str) -> None:
    encoding = sentencepiece.encode(text, add_special_tokens=False)
    assert encoding.tokens == reference_pieces(sentencepiece_keys(), text)
    assert sentencepiece.decode(encoding.ids) == text


def test_sentencepiece_bytes_bos_and_decoding(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece_keys())
    assert tokenizer.encode("é😀").tokens == [
        "<s>",
        "▁",
        "é",
        *("<0xF0>", "<0x9F>", "<0x98>", "<0x80>"),
    ]
    # Bytes of no character come back as U+FFFD, one for each.
    assert tokenizer.decode([tokenizer.token_to_id("<0xA1>")]) == "\ufffd"
    assert tokenizer.encode("<0x41>", add_special_tokens=False).tokens != ["▁", "<0x41>"]
    user = tokenizer.encode("<|user|>a", add_special_tokens=False).tokens
    assert user == ["<|user|>", "▁a"]


def test_sentencepiece_without_a_space_in_front(tmp_path: Path) -> None:
    keys = sentencepiece_keys(add_space_prefix=False, add_bos_token=False)
    tokenizer = load(tmp_path, keys)
    assert tokenizer.encode("ab").tokens == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"


def test_phi3_swallows_white_space_behind_its_markers(tmp_path: Path) -> None:
    import numpy as np

    tensors = {
        "token_embd.weight": (np.zeros((400, 64)), "f32"),
        "output_norm.weight": (np.ones(64), "f32"),
    }
    for layer in range(2):
        for name, shape in (
            ("attn_norm", (64,)),
            ("ffn_norm", (64,)),
            ("attn_qkv", (96, 64)),
            ("attn_output", (64, 64)),
            ("ffn_up", (192, 64)),
            ("ffn_down", (64, 96)),
        ):
            tensors[f"blk.{layer}.{name}.weight"] = (np.zeros(shape), "f32")
    keys = {f"tokenizer.ggml.{key}": value for key, value in sentencepiece_keys().items()}
    path = tiny_gguf(tmp_path / "m.gguf", tensors, LLAMA_METADATA | keys, "phi3")
    with open_checkpoint(path) as checkpoint:
        checkpoint.write_tokenizer(tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    ids = tokenizer.encode("<|user|>\na<s>\na", add_special_tokens=False).ids
    assert [tokenizer.id_to_token(index) for index in ids] == [
        "<|user|>",
        "▁a",
        "<s>",
        "▁",
        "<0x0A>",
        "a",
    ]


# The files around it.


def test_the_files_that_are_written(tmp_path: Path) -> None:
    keys = byte_level_keys(
        eot_token_id=2,
        eom_token_id=1,
        padding_token_id=0,
        **{
            "tokenizer.chat_template": "{{ bos_token }}é\n",
            "tokenizer.chat_templates": ["tool_use", "../evil"],
            "tokenizer.chat_template.tool_use": "T",
            "tokenizer.chat_template.../evil": "E",
        },
    )
    load(tmp_path, keys)
    assert file(tmp_path, "generation_config.json") == {
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
        "pad_token_id": 0,
    }
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos｜>", "pad_token": "<|bos|>"}
    assert file(tmp_path, "special_tokens_map.json") == names
    config = file(tmp_path, "tokenizer_config.json")
    assert names.items() <= config.items()
    assert config["model_max_length"] == 128
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ bos_token }}é\n"
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jinja"))
    assert written == ["out/additional_chat_templates/tool_use.jinja", "out/chat_template.jinja"]


def test_transformers_reads_the_folder(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = load(tmp_path, byte_level_keys(add_bos_token=True))
    other = AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert other("a hi")["input_ids"] == tokenizer.encode("a hi").ids
    assert (other.bos_token_id, other.eos_token_id) == (0, 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "no_vocab"}, "has no tokenizer"),
        ({"model": "bert", "tokens": ["a"]}, "'bert' can't be read"),
        ({"model": "gpt2", "pre": "gpt-2", "tokens": ["a"]}, "without tokenizer.ggml.merges"),
        ({"model": "gpt2"}, "no tokens"),
        (byte_level_keys(merges=["ab"]), "the merge 'ab' is not a pair"),
        (byte_level_keys(merges=["zz yy"]), "inconsistent"),
        (byte_level_keys(bos_token_id=4000), "bos_token_id is 4000, the last token is"),
        (byte_level_keys(token_type=[1, 1]), "tokens have 2 types"),
        (byte_level_keys(tokens=["x", "x"], token_type=[1, 1]), "0 and 1 have the same text 'x'"),
        (
            {k: v for k, v in byte_level_keys(add_bos_token=True).items() if k != "bos_token_id"},
            "adds a bos_token, but names none",
        ),
        (
            {k: v for k, v in sentencepiece_keys().items() if k != "scores"},
            "without tokenizer.ggml.scores",
        ),
        (sentencepiece_keys(remove_extra_whitespaces=True), "removes white space"),
    ],
)
def test_tokenizers_that_cannot_be_read(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = with_tokenizer(tmp_path / "m.gguf", keys)
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(CheckpointError, match=message) as caught,
    ):
        checkpoint.write_tokenizer(tmp_path / "out")
    assert str(path) in str(caught.value)


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    path = with_tokenizer(tmp_path / "m.gguf", byte_level_keys(), rows=50)
    with pytest.raises(CheckpointError, match="the tokenizer has 267 tokens, the embedding 50"):
        open_checkpoint(path)


# The real one.

TRICKY = [
    "",
    " ",
    "Hello  world",
    "  leading, trailing  ",
    "12345 abc123 3.14159 1,000,000",
    "٣٤ ½ ² Ⅷ 二〇二四",
    "def f(x):\n\treturn x**2  # ok\n\n\n    pass",
    "It's I'LL they've we'd 'tis",
    "naïve café e\u0301 ﬁ",
    "😀👨‍👩‍👧🇫🇷 ❤️",
    "日本語 한국어 العربية עברית",
    "a\u00a0b\u2003c\r\nd\0e",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "https://x.y/z?q=1&r=%20#frag",
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    with open_checkpoint("smollm2") as checkpoint:
        checkpoint.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def smollm2_reference(smollm2: Path) -> Tokenizer:
    """The pipeline of SmolLM2's own tokenizer.json: single digits, then GPT-2's rule."""
    body = json.loads((smollm2 / "tokenizer.json").read_text())
    model = body["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token["content"] for token in body["added_tokens"]])
    return tokenizer


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.mark.parametrize("text", TRICKY)
def test_smollm2_on_tricky_texts(
    smollm2_tokenizer: Tokenizer, smollm2_reference: Tokenizer, text: str
) -> None:
    encoding = smollm2_tokenizer.encode(text)
    assert encoding.ids == smollm2_reference.encode(text).ids
    assert smollm2_tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


# Some control characters and the first bytes of unused planes have no token in its vocabulary.
@given(st.text(alphabet=st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"])))
@settings(max_examples=200, deadline=None)
def test_smollm2_on_any_text(
    smollm2_tokenizer: Tokenizer, smollm2_reference: Tokenizer, text: str
) -> None:
    encoding = smollm2_tokenizer.encode(text)
    assert encoding.ids == smollm2_reference.encode(text).ids
    assert smollm2_tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


def test_smollm2_facts(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>user\n").ids == [1, 4093, 198]
    config = json.loads((smollm2 / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["add_bos_token"] is False
    assert config["model_max_length"] == 8192
    generation = json.loads((smollm2 / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert "You are a helpful AI assistant" in (smollm2 / "chat_template.jinja").read_text()
    assert GPT2 in PRE_TOKENIZERS["smollm"].patterns
