"""Small tokenizers of every kind that models use, built here so that each token is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from bessemer.runtime.pieces import byte_of_char
from bessemer.runtime.tokenizer import Tokenizer

MARK = "\u2581"  # SentencePiece's space
WORDS = ["hello", "world", "cat"]


def _bpe(words: list[str], tokens: list[str], byte_fallback: bool = False) -> models.BPE:
    """A BPE model whose vocabulary is `tokens`, the words' characters, prefixes and the words."""
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for word in words:
        for char in word:
            vocab.setdefault(char, len(vocab))
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    unknown = "<unk>" if "<unk>" in vocab else None
    return models.BPE(
        vocab=vocab, merges=merges, unk_token=unknown, byte_fallback=byte_fallback, fuse_unk=True
    )


def _add_bos(backend: tokenizers.Tokenizer, bos: str) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=None, special_tokens=[(bos, backend.token_to_id(bos))]
    )


def sentencepiece(strip: bool = True) -> tokenizers.Tokenizer:
    """As Llama's (`strip`) or Gemma's: byte fallback, <s> = 1 added at the front, </s> = 2."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), MARK]
    backend = tokenizers.Tokenizer(_bpe([MARK + word for word in WORDS], tokens, True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    replace = normalizers.Replace(" ", MARK)
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = replace
    if strip:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    _add_bos(backend, "<s>")
    return backend


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2's: ids 0 to 255 are the bytes, then words, then <|end|> and an added space run."""
    alphabet = {byte: char for char, byte in byte_of_char().items()}
    backend = tokenizers.Tokenizer(_bpe(["\u0120hello"], [alphabet[i] for i in range(256)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|bos|>", "<|end|>", "<｜end▁of▁sentence｜>"])
    backend.add_tokens([AddedToken("    ", normalized=False, special=False)])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """As T5's: the first token loses its mark."""
    backend = tokenizers.Tokenizer(_bpe([MARK + word for word in WORDS], ["<unk>", MARK]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """A decoder that the piece rules don't know: it puts spaces between words."""
    tokens = ["[UNK]", "hello", "world", "##s", "##ly", ".", ",", "do", "n", "'", "t", "é"]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def wrap(backend: tokenizers.Tokenizer, **config: Any) -> Tokenizer:
    """A runtime tokenizer with this tokenizer_config.json."""
    return Tokenizer(backend, {"tokenizer_config.json": config})


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must be there."""
    token_id = tokenizer.token_id(token)
    assert token_id is not None, token
    return token_id


def write(folder: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    """Write tokenizer.json and `files` (name without .json to content) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
