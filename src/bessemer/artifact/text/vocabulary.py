"""A tokenizer's model as tables: tokens, merges or scores, and the bytes that ids stand for."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bessemer.artifact.text.format import NONE, NotConvertible, Section, TokenizerFile
from bessemer.runtime.pieces import PieceRules, byte_of_char
from bessemer.runtime.tokenizer import Tokenizer

BPE, UNIGRAM = 1, 2
BYTE_SYMBOLS, BYTE_FALLBACK, FUSE_UNKNOWN, WHOLE_FIRST = 1, 2, 4, 8
TOKEN_KNOWN, TOKEN_SPECIAL = 1, 2
INFO = struct.Struct("<IIIIiiIIIId")
# How much less likely than the least likely token an unknown character is, in the library.
UNKNOWN_PENALTY = 10.0
# The hash table is at most three quarters full.
HASH_FILL = (3, 4)
FNV_START, FNV_PRIME, MASK64 = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


def check_model(tokenizer: Tokenizer, model: Mapping[str, Any], over_bytes: bool) -> PieceRules:
    """How ids become text. Raises NotConvertible for a model that is neither BPE nor unigram, for
    options of theirs that no known language model uses, and for a decoder that isn't understood.
    """
    kind = model.get("type")
    if kind not in ("BPE", "Unigram"):
        raise NotConvertible(f"its model is {kind}; BPE and unigram models are known")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise NotConvertible(f"its BPE model has the option {option}")
    if over_bytes and kind == "Unigram":
        raise NotConvertible("it is a unigram model over bytes")
    unknown = model.get("unk_token")
    if unknown is not None and unknown not in model["vocab"]:
        raise NotConvertible(f"its unknown token {unknown!r} is none of its tokens")
    rules = tokenizer.piece_rules
    if rules is None:
        raise NotConvertible("its decoder is none of the known kinds")
    if rules.strip_count and len(rules.strip_char) != 1:
        raise NotConvertible("its decoder strips more than one kind of character")
    return rules


def write_model(
    file: TokenizerFile, tokenizer: Tokenizer, model: Mapping[str, Any], over_bytes: bool
) -> None:
    """Write the sections of the model (as tokenizer.json has it), of the ids, and INFO.

    Raises NotConvertible as `check_model`.
    """
    rules = check_model(tokenizer, model, over_bytes)
    if model["type"] == "BPE":
        vocab: Mapping[str, int] = model["vocab"]
        flags, unknown = _write_bpe(file, model, tokenizer.vocab_size)
        number, unknown_score = BPE, 0.0
    else:
        vocab = {token: index for index, (token, _) in enumerate(model["vocab"])}
        flags, unknown, unknown_score = _write_unigram(file, model, tokenizer.vocab_size)
        number = UNIGRAM
    encoded = _encoded(vocab, over_bytes)
    if over_bytes:
        flags = flags & ~BYTE_FALLBACK | BYTE_SYMBOLS
        _write_byte_ids(file, [encoded.get(bytes([byte])) for byte in range(256)])
    elif flags & BYTE_FALLBACK:
        _write_byte_ids(file, [vocab.get(f"<0x{byte:02X}>") for byte in range(256)])
    _write_tokens(file, tokenizer, rules, encoded)
    _write_hash(file, encoded)
    add_bos = tokenizer.add_bos
    file.sections[Section.INFO] = INFO.pack(
        tokenizer.vocab_size,
        number,
        flags,
        NONE if unknown is None else unknown,
        -1 if tokenizer.bos_id is None else tokenizer.bos_id,
        -1 if add_bos is None else int(add_bos),
        *file.string(rules.strip_char.encode()),
        rules.strip_count,
        max(map(len, encoded), default=0),
        unknown_score,
    )


def _encoded(vocab: Mapping[str, int], over_bytes: bool) -> dict[bytes, int]:
    """The model's tokens by the bytes of the text that they stand for."""
    if not over_bytes:
        return {token.encode(): token_id for token, token_id in vocab.items() if token}
    alphabet = byte_of_char()
    found: dict[bytes, int] = {}
    for token, token_id in vocab.items():
        # One with a character that stands for no byte can't come from text.
        if token and all(char in alphabet for char in token):
            found[bytes([alphabet[char] for char in token])] = token_id
    return found


def _write_byte_ids(file: TokenizerFile, ids: Sequence[int | None]) -> None:
    known = [NONE if token_id is None else token_id for token_id in ids]
    file.sections[Section.BYTE_IDS] = np.array(known, "<u4").tobytes()


def _write_bpe(
    file: TokenizerFile, model: Mapping[str, Any], vocab_size: int
) -> tuple[int, int | None]:
    """MERGE_STARTS and MERGES; returns the flags and the id of the unknown token."""
    vocab: Mapping[str, int] = model["vocab"]
    merges: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, pair in enumerate(model["merges"]):
        left, right = pair if isinstance(pair, list) else pair.split(" ", 1)
        merges[vocab[left], vocab[right]] = (rank, vocab[left + right])
    rows = np.array([(*key, *value) for key, value in merges.items()], np.int64).reshape(-1, 4)
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    starts = np.searchsorted(rows[:, 0], np.arange(vocab_size + 1))
    file.sections[Section.MERGE_STARTS] = starts.astype("<u4").tobytes()
    file.sections[Section.MERGES] = rows[:, 1:].astype("<u4").tobytes()
    flags = BYTE_FALLBACK * bool(model.get("byte_fallback"))
    flags |= FUSE_UNKNOWN * bool(model.get("fuse_unk"))
    flags |= WHOLE_FIRST * bool(model.get("ignore_merges"))
    unknown = model.get("unk_token")
    return flags, None if unknown is None else vocab[unknown]


def _write_unigram(
    file: TokenizerFile, model: Mapping[str, Any], vocab_size: int
) -> tuple[int, int | None, float]:
    """SCORES; returns the flags, and the id and the score of the unknown token."""
    scores = np.zeros(vocab_size, "<f8")
    own = np.array([score for _, score in model["vocab"]], np.float64)
    scores[: len(own)] = own
    file.sections[Section.SCORES] = scores.tobytes()
    flags = FUSE_UNKNOWN | BYTE_FALLBACK * bool(model.get("byte_fallback"))
    return flags, model.get("unk_id"), float(own.min()) - UNKNOWN_PENALTY


def _write_tokens(
    file: TokenizerFile, tokenizer: Tokenizer, rules: PieceRules, encoded: Mapping[bytes, int]
) -> None:
    """TOKENS: bytes as text has them; PIECES: as the decoder writes them; FIRSTS: at the start."""
    size = tokenizer.vocab_size
    flags = np.zeros(size, np.uint8)
    pieces, firsts = [b""] * size, [b""] * size
    for token_id in range(size):
        token = tokenizer.token(token_id)
        if token is None:
            continue
        special = tokenizer.is_special(token_id)
        flags[token_id] = TOKEN_KNOWN | TOKEN_SPECIAL * special
        if not special:
            pieces[token_id] = rules.to_bytes(token)
            firsts[token_id] = rules.to_bytes(token, first=True)
    file.sections[Section.FLAGS] = flags.tobytes()
    tokens = list(pieces)
    for text, token_id in encoded.items():
        tokens[token_id] = text
    file.strings_by_id(Section.TOKEN_ENDS, Section.TOKENS, tokens)
    # A special token's piece is never shown, so that its bytes may be anything.
    shown = (f for f in range(size) if not flags[f] & TOKEN_SPECIAL)
    if any(tokens[i] != pieces[i] for i in shown):
        file.strings_by_id(Section.PIECE_ENDS, Section.PIECES, pieces)
    if firsts != pieces:
        file.strings_by_id(Section.FIRST_ENDS, Section.FIRSTS, firsts)


def _write_hash(file: TokenizerFile, encoded: Mapping[bytes, int]) -> None:
    """HASH: ids by the bytes of their tokens."""
    slots = 1
    while slots * HASH_FILL[0] < len(encoded) * HASH_FILL[1]:
        slots *= 2
    table = [NONE] * slots
    for text, token_id in encoded.items():
        at = _hash(text) & (slots - 1)
        while table[at] != NONE:
            at = (at + 1) & (slots - 1)
        table[at] = token_id
    file.sections[Section.HASH] = np.array(table, "<u4").tobytes()


def _hash(data: Iterable[int]) -> int:
    """FNV-1a of 64 bits, its halves xored."""
    value = FNV_START
    for byte in data:
        value = (value ^ byte) * FNV_PRIME & MASK64
    return value ^ value >> 32
