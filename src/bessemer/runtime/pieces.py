"""How token strings become text: the decoders of tokenizer.json, understood byte by byte.

A `tokenizers` decoder maps a whole list of tokens to text. Streaming needs the same text token by
token, at a constant cost. Nearly every language model uses one of three kinds of decoder, and each
is a map from a token to bytes, plus something done once at the start of the text:

- byte-level BPE (GPT-2): every character of a token stands for one byte;
- SentencePiece with byte fallback (Llama, Gemma): U+2581 stands for a space, `<0xAB>` for a byte,
  and one leading space may be stripped from the text;
- Metaspace: as above without bytes, U+2581 dropped from the first token.

`rules_for` recognises them; any other decoder gives None, and the caller falls back to decoding a
window of tokens again.

Bytes that are not UTF-8 become U+FFFD, one for each maximal ill-formed part, as Unicode recommends
(The Unicode Standard, section 3.9). The `tokenizers` byte-level decoder does the same. Its byte
fallback writes one U+FFFD for *every* byte of a run of byte tokens as soon as the run is
ill-formed, valid characters included; that can't be streamed without taking text back, so it is
not followed.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_of_char() -> Mapping[str, int]:
    """GPT-2's map from a character to the byte that it stands for.

    Bytes that print in Latin-1 stand for themselves, the other 68 are numbered from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


@dataclass(frozen=True)
class PieceRules:
    """What one understood decoder does.

    byte_level: the characters of a token stand for bytes; a token with a character outside that
        alphabet (an added token) stands for itself.
    replacements: (from, to) pairs, applied to each token in order.
    byte_fallback: `<0xAB>` is the byte 0xAB.
    strip_char, strip_count: at most so many of this character are dropped at the start of the text.
    drop_in_first: a character that is dropped from the first token, or None.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_char: str = " "
    strip_count: int = 0
    drop_in_first: str | None = None

    def to_bytes(self, token: str, first: bool = False) -> bytes:
        """The bytes that `token` adds to the text; `first` when it is the first token shown."""
        if self.byte_level:
            table = byte_of_char()
            try:
                return bytes([table[char] for char in token])
            except KeyError:
                return token.encode()
        if first and self.drop_in_first is not None:
            token = token.replace(self.drop_in_first, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


def rules_for(decoder: Mapping[str, Any] | None) -> PieceRules | None:
    """The rules of a decoder as tokenizer.json writes it, or None when it isn't understood."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] or kinds == ["ByteLevel", "Fuse"]:
        return PieceRules(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        keeps = steps[0].get("prepend_scheme", "always") == "never"
        return PieceRules(replacements=((mark, " "),), drop_in_first=None if keeps else mark)
    return _sentencepiece_rules(steps, kinds)


def _sentencepiece_rules(steps: list[Mapping[str, Any]], kinds: list[str]) -> PieceRules | None:
    """Rules for [Replace]*, [ByteFallback], Fuse, [Strip at the left]; None for anything else."""
    shape = re.fullmatch(
        r"(Replace )*(ByteFallback )?Fuse (Strip )?", "".join(f"{k} " for k in kinds)
    )
    if shape is None:
        return None
    replacements: list[tuple[str, str]] = []
    for step in steps:
        if step["type"] == "Replace":
            old = step["pattern"].get("String")
            if not old:  # a regular expression
                return None
            replacements.append((old, step["content"]))
    strip: Mapping[str, Any] = steps[-1] if kinds[-1] == "Strip" else {}
    if strip.get("stop", 0) != 0:
        return None
    return PieceRules(
        replacements=tuple(replacements),
        byte_fallback="ByteFallback" in kinds,
        strip_char=strip.get("content", " "),
        strip_count=strip.get("start", 0),
    )


class PieceDecoder:
    """Turns tokens into text, one by one: complete characters only, none of them twice."""

    def __init__(self, rules: PieceRules) -> None:
        self._rules = rules
        self.reset()

    def reset(self) -> None:
        """Start a new text."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = True
        self._to_strip = self._rules.strip_count

    def push(self, token: str) -> str:
        """The text that `token` completes, often empty inside a character."""
        text = self._utf8.decode(self._rules.to_bytes(token, self._first))
        self._first = False
        return self._strip(text)

    def finish(self) -> str:
        """What is left: U+FFFD when the text ends inside a character."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not self._to_strip or not text:
            return text
        leading = len(text) - len(text.lstrip(self._rules.strip_char))
        dropped = min(leading, self._to_strip)
        self._to_strip = self._to_strip - dropped if dropped == len(text) else 0
        return text[dropped:]
