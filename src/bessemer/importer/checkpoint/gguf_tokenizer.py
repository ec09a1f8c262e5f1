"""The tokenizer inside a GGUF file, as the files that Hugging Face folders have.

Two kinds occur with the supported architectures: ``gpt2``, byte-level BPE with merges, and
``llama``, a SentencePiece BPE with scores and byte fallback. Both become a tokenizer.json for the
`tokenizers` library.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.importer.checkpoint.files import damaged, write_json
from bessemer.importer.checkpoint.gguf_file import GGUFMetadata
from bessemer.importer.checkpoint.pretokenizers import PRE_TOKENIZERS, PreTokenizer

log = logging.getLogger(__name__)

NO_TOKENIZER = ("none", "no_vocab")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""tokenizer.ggml.token_type."""

SPACE_MARK = "▁"
"""What SentencePiece writes for a space."""

NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""End of sequence, of turn and of message: generation stops at each that the file declares."""

PHI3_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""All other special tokens of Phi-3 swallow the white space after them. GGUF can't say that."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id with their types, without unused ones at the end (padding of the embedding)."""

    tokens: list[str]
    types: list[int]

    def ids(self) -> dict[str, int]:
        """Token to id."""
        return {token: index for index, token in enumerate(self.tokens)}


def has_tokenizer(metadata: GGUFMetadata) -> bool:
    """Whether the file brings a tokenizer."""
    model = metadata.string("tokenizer.ggml.model")
    return model is not None and model not in NO_TOKENIZER


def check_sizes(metadata: GGUFMetadata, vocab_size: int) -> None:
    """The tokens must have embeddings; CheckpointError if there are more of them."""
    tokens = metadata.strings("tokenizer.ggml.tokens") or []
    if len(tokens) > vocab_size:
        raise damaged(
            metadata.path, f"the tokenizer has {len(tokens)} tokens, the embedding {vocab_size}"
        )


def generation_config(metadata: GGUFMetadata) -> dict[str, Any]:
    """generation_config.json of the file: BOS, padding and all tokens that end an answer."""
    ends: list[int] = []
    for key in END_KEYS:
        token = metadata.integer(f"tokenizer.ggml.{key}")
        if token is not None and token not in ends:
            ends.append(token)
    values = {
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": metadata.integer("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in values.items() if value is not None}


def write_tokenizer(
    metadata: GGUFMetadata,
    config: dict[str, Any],
    generation: dict[str, Any],
    folder: Path,
) -> None:
    """Writes the tokenizer's files into `folder`; see `Checkpoint.write_tokenizer`."""
    if not has_tokenizer(metadata):
        raise damaged(metadata.path, "the file has no tokenizer (tokenizer.ggml.model)")
    vocabulary = _vocabulary(metadata)
    named = _named_tokens(metadata, vocabulary)
    kind = metadata.string("tokenizer.ggml.model")
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata)
        adds_bos = pre.adds_bos
        body = _byte_level(metadata, vocabulary, pre)
    elif kind == "llama":
        adds_bos = True
        body = _sentencepiece(metadata, vocabulary, named.get("unk_token"))
    else:
        raise damaged(metadata.path, f"tokenizers of the kind '{kind}' can't be read")
    adds_bos = metadata.boolean("tokenizer.ggml.add_bos_token", adds_bos) or False
    adds_eos = metadata.boolean("tokenizer.ggml.add_eos_token", False) or False
    strips = kind == "llama" and config["model_type"] == "phi3"
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, strips),
        **body,
        "post_processor": _post_processor(metadata, vocabulary, named, adds_bos, adds_eos),
    }
    folder.mkdir(parents=True, exist_ok=True)
    _save(metadata, tokenizer, folder / "tokenizer.json")
    write_json(folder / "special_tokens_map.json", dict(named))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "add_bos_token": adds_bos,
            "add_eos_token": adds_eos,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    write_json(folder / "generation_config.json", generation)
    _write_templates(metadata, folder)


def _save(metadata: GGUFMetadata, tokenizer: dict[str, Any], path: Path) -> None:
    """Writes tokenizer.json after the library has accepted it."""
    from tokenizers import Tokenizer

    text = json.dumps(tokenizer, ensure_ascii=False)
    try:
        Tokenizer.from_str(text)
    # The library reports every fault as a bare Exception.
    except Exception as error:
        raise damaged(metadata.path, f"its tokenizer is inconsistent ({error})") from error
    path.write_text(text, encoding="utf-8")


def _vocabulary(metadata: GGUFMetadata) -> Vocabulary:
    tokens = metadata.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise damaged(metadata.path, "the tokenizer has no tokens (tokenizer.ggml.tokens)")
    array = metadata.array("tokenizer.ggml.token_type")
    types = [NORMAL] * len(tokens) if array is None else [int(kind) for kind in array]
    if len(types) != len(tokens):
        raise damaged(metadata.path, f"{len(tokens)} tokens have {len(types)} types")
    # An empty token can't be matched, but keeps its id.
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    size = len(tokens)
    while size and types[size - 1] == UNUSED:
        size -= 1
    vocabulary = Vocabulary(tokens[:size], types[:size])
    ids = vocabulary.ids()
    if len(ids) != size:
        index = next(i for i, token in enumerate(vocabulary.tokens) if ids[token] != i)
        token = vocabulary.tokens[index]
        raise damaged(
            metadata.path, f"the tokens {index} and {ids[token]} have the same text {token!r}"
        )
    return vocabulary


def _named_tokens(metadata: GGUFMetadata, vocabulary: Vocabulary) -> dict[str, str]:
    named: dict[str, str] = {}
    for name, key in NAMED_TOKENS.items():
        token = metadata.integer(f"tokenizer.ggml.{key}")
        if token is None:
            continue
        if token >= len(vocabulary.tokens):
            raise damaged(
                metadata.path,
                f"tokenizer.ggml.{key} is {token}, the last token is {len(vocabulary.tokens) - 1}",
            )
        named[name] = vocabulary.tokens[token]
    return named


def _pre_tokenizer(metadata: GGUFMetadata) -> PreTokenizer:
    name = metadata.string("tokenizer.ggml.pre")
    if name is None:
        # Files from before April 2024; llama.cpp does the same, and also says so.
        log.warning(
            "%s: tokenizer.ggml.pre is missing, splitting text by the rule 'default'. A newer "
            "conversion of the model names its own rule.",
            metadata.path,
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise damaged(
            metadata.path,
            f"tokenizer.ggml.pre is '{name}', a way of splitting text that is not known here; "
            f"known are {', '.join(sorted(PRE_TOKENIZERS))}",
        )
    return PRE_TOKENIZERS[name]


def _byte_level(
    metadata: GGUFMetadata, vocabulary: Vocabulary, pre: PreTokenizer
) -> dict[str, Any]:
    merges = metadata.strings("tokenizer.ggml.merges")
    if merges is None:
        raise damaged(metadata.path, "a BPE tokenizer without tokenizer.ggml.merges")
    pairs = []
    for merge in merges:
        # Either side may start with what separates them.
        cut = merge.find(" ", 1)
        if cut < 0:
            raise damaged(metadata.path, f"the merge {merge!r} is not a pair")
        pairs.append([merge[:cut], merge[cut + 1 :]])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, {**byte_level, "use_regex": False}],
        },
        "decoder": {**byte_level, "use_regex": False},
        "model": _bpe(vocabulary, pairs, ignore_merges=pre.ignore_merges),
    }


def _sentencepiece(
    metadata: GGUFMetadata, vocabulary: Vocabulary, unknown: str | None
) -> dict[str, Any]:
    if metadata.boolean("tokenizer.ggml.remove_extra_whitespaces", False):
        raise damaged(metadata.path, "its tokenizer removes white space, which is not supported")
    prefix = metadata.boolean("tokenizer.ggml.add_space_prefix", True)
    space_to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    normalizers: list[dict[str, Any]] = [space_to_mark]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE_MARK})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    merges = _merges_of_scores(metadata, vocabulary)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges_of_scores(metadata: GGUFMetadata, vocabulary: Vocabulary) -> list[list[str]]:
    """SentencePiece merges the pair whose union has the highest score: as ranked merges.

    Every way to cut a token in two tokens is a merge, ranked by the token's score. Only ordinary
    tokens take part: control and byte tokens never arise from text.
    """
    scores = metadata.array("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(vocabulary.tokens):
        raise damaged(metadata.path, "a SentencePiece tokenizer without tokenizer.ggml.scores")
    ordinary = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (NORMAL, USER_DEFINED)
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in ordinary.items():
        score = float(scores[index])
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ordinary and right in ordinary:
                ranked.append((-score, ordinary[left], ordinary[right], left, right))
    ranked.sort()
    return [[left, right] for _, _, _, left, right in ranked]


def _bpe(vocabulary: Vocabulary, merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocabulary.ids(),
        "merges": merges,
    }


def _added_tokens(vocabulary: Vocabulary, strips: bool) -> list[dict[str, Any]]:
    """Tokens that are matched in the text as they are, before anything else."""
    added = []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind not in (UNKNOWN, CONTROL, USER_DEFINED):
            continue
        added.append(
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": strips and token not in PHI3_KEEPS_SPACE,
                "normalized": False,
                "special": kind != USER_DEFINED,
            }
        )
    return added


def _post_processor(
    metadata: GGUFMetadata,
    vocabulary: Vocabulary,
    named: dict[str, str],
    adds_bos: bool,
    adds_eos: bool,
) -> dict[str, Any] | None:
    """Puts BOS before and EOS behind the text, if the file says so."""
    wanted = [name for name, on in (("bos_token", adds_bos), ("eos_token", adds_eos)) if on]
    if not wanted:
        return None
    ids = vocabulary.ids()
    special: dict[str, Any] = {}
    for name in wanted:
        if name not in named:
            raise damaged(metadata.path, f"the tokenizer adds a {name}, but names none")
        token = named[name]
        special[token] = {"id": token, "ids": [ids[token]], "tokens": [token]}

    def surrounded(sequence: str, type_id: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": sequence, "type_id": type_id}}
        before = [named["bos_token"]] if adds_bos else []
        behind = [named["eos_token"]] if adds_eos else []
        return [
            *({"SpecialToken": {"id": token, "type_id": type_id}} for token in before),
            text,
            *({"SpecialToken": {"id": token, "type_id": type_id}} for token in behind),
        ]

    return {
        "type": "TemplateProcessing",
        "single": surrounded("A", 0),
        "pair": surrounded("A", 0) + surrounded("B", 1),
        "special_tokens": special,
    }


def _write_templates(metadata: GGUFMetadata, folder: Path) -> None:
    default = metadata.string("tokenizer.chat_template")
    if default is not None:
        (folder / "chat_template.jinja").write_text(default, encoding="utf-8")
    for name in metadata.strings("tokenizer.chat_templates") or []:
        text = metadata.string(f"tokenizer.chat_template.{name}")
        if text is None or not name.replace("-", "").replace("_", "").isalnum():
            continue
        extra = folder / "additional_chat_templates"
        extra.mkdir(exist_ok=True)
        (extra / f"{name}.jinja").write_text(text, encoding="utf-8")
