"""The normalizer of a tokenizer as operations, and the tables of Unicode that they need.

Decompositions and compositions are measured, as sets of characters are: the library's Unicode
version counts.
"""

from __future__ import annotations

import base64
import struct
import unicodedata
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from bessemer.artifact.text.automaton import build_automaton
from bessemer.artifact.text.charsets import candidates, spread
from bessemer.artifact.text.format import CODE_POINTS, NotConvertible, Section, TokenizerFile
from bessemer.artifact.text.patterns import parse
from bessemer.artifact.text.pretokenizer import Automata

PREPEND, REPLACE, REPLACE_PATTERN, STRIP, DECOMPOSE, COMPOSE, CHARSMAP = range(1, 8)
CANONICAL, COMPATIBLE = 0, 1
STRIP_LEFT, STRIP_RIGHT = 1, 2
MOST_STEPS = 16

_FORMS = {
    "NFD": (CANONICAL, False),
    "NFC": (CANONICAL, True),
    "NFKD": (COMPATIBLE, False),
    "NFKC": (COMPATIBLE, True),
}
_SYLLABLES = range(0xAC00, 0xAC00 + 11172)
# Marks of the lowest and of the highest class, to see whether the library orders a mark.
_LOW_MARK, _HIGH_MARK = "\u0334", "\u0345"
GRAPHEME_EXTEND, GRAPHEME_CONTROL = 1, 2


class _Operations:
    """Collects operations and what they need."""

    def __init__(self, file: TokenizerFile, automata: Automata) -> None:
        self.file, self.automata = file, automata
        self.packed: list[bytes] = []
        self.forms = False
        self.charsmap: bytes | None = None

    def add(self, kind: int, number: int = 0, old: str = "", new: str = "") -> None:
        places = (*self.file.string(old.encode()), *self.file.string(new.encode()))
        self.packed.append(struct.pack("<IIIIII", kind, number, *places))

    def step(self, step: Mapping[str, Any] | None) -> None:
        """One normalizer of tokenizer.json; a sequence is taken apart."""
        if step is None:
            return
        kind = step["type"]
        if kind == "Sequence":
            for inner in step["normalizers"]:
                self.step(inner)
        elif kind == "Prepend":
            self.add(PREPEND, old=step["prepend"])
        elif kind == "Replace":
            self._replace(step)
        elif kind == "Strip":
            sides = STRIP_LEFT * bool(step["strip_left"]) | STRIP_RIGHT * bool(step["strip_right"])
            self.add(STRIP, sides)
        elif kind in _FORMS:
            compatible, composed = _FORMS[kind]
            self.forms = True
            self.add(DECOMPOSE, compatible)
            if composed:
                self.add(COMPOSE)
        elif kind == "Precompiled":
            self._precompiled(step)
        else:
            raise NotConvertible(f"it has the normalizer {kind}")

    def _replace(self, step: Mapping[str, Any]) -> None:
        text = step["pattern"].get("String")
        if text:
            self.add(REPLACE, old=text, new=step["content"])
            return
        pattern = step["pattern"].get("Regex")
        if not pattern:
            raise NotConvertible("its normalizer replaces nothing by something")
        automaton = build_automaton(parse(pattern), f"its normalizer's pattern {pattern!r}")
        self.add(REPLACE_PATTERN, self.automata.add(automaton), new=step["content"])

    def _precompiled(self, step: Mapping[str, Any]) -> None:
        content = base64.b64decode(step["precompiled_charsmap"])
        if self.charsmap not in (None, content):
            raise NotConvertible("it has two maps of characters")
        self.charsmap = content
        self.add(CHARSMAP)


def write_normalizer(
    file: TokenizerFile, normalizer: Mapping[str, Any] | None, automata: Automata
) -> None:
    """Write NORMALIZER and the tables that it needs; the first two class maps are its.

    Raises NotConvertible for a normalizer that isn't known.
    """
    operations = _Operations(file, automata)
    operations.step(normalizer)
    if len(operations.packed) > MOST_STEPS:
        raise NotConvertible(f"its normalizer has more than {MOST_STEPS} steps")
    file.sections[Section.NORMALIZER] = b"".join(operations.packed)
    file.class_map(_combining_classes() if operations.forms else None)
    file.class_map(_grapheme_classes() if operations.charsmap is not None else None)
    if operations.forms:
        _write_forms(file)
    if operations.charsmap is not None:
        file.sections[Section.CHARSMAP] = operations.charsmap


# -- normal forms ------------------------------------------------------------------------------


def _normalised(form: str, texts: list[str]) -> list[str]:
    """Each text in a normal form of the library's; no text may hold a line end."""
    from tokenizers import normalizers

    result: list[str] = getattr(normalizers, form)().normalize_str("\n".join(texts)).split("\n")
    assert len(result) == len(texts)
    return result


@cache
def _combining_classes() -> np.ndarray:
    """uint8 [CODE_POINTS]: the canonical combining class; 0 for marks newer than the library."""
    codes = [code for code in range(CODE_POINTS) if unicodedata.combining(chr(code))]
    classes = np.zeros(CODE_POINTS, np.uint8)
    # A mark whose class is known changes places with one of a lower or of a higher class.
    after = _normalised("NFD", [chr(code) + _LOW_MARK for code in codes])
    before = _normalised("NFD", [_HIGH_MARK + chr(code) for code in codes])
    for code, low, high in zip(codes, after, before, strict=True):
        if low != chr(code) + _LOW_MARK or high != _HIGH_MARK + chr(code):
            classes[code] = unicodedata.combining(chr(code))
    classes[ord(_HIGH_MARK)] = unicodedata.combining(_HIGH_MARK)
    return classes


def _write_forms(file: TokenizerFile) -> None:
    """DECOMPOSED, COMPOSED and CODES. Hangul syllables are arithmetic, and left out."""
    chars = [c for c in candidates()[0] if c != "\n" and ord(c) not in _SYLLABLES]
    canonical, compatible = _normalised("NFD", chars), _normalised("NFKD", chars)
    codes: list[int] = []

    def place(char: str, text: str) -> tuple[int, int]:
        if text == char:
            return 0, 0
        codes.extend(map(ord, text))
        return len(codes) - len(text), len(text)

    rows = bytearray()
    pairs: list[tuple[str, int, int]] = []
    changed = [
        entry for entry in zip(chars, canonical, compatible, strict=True) if len(set(entry)) > 1
    ]
    recomposed = _normalised("NFC", [first for _, first, _ in changed])
    for (char, first, second), again in zip(changed, recomposed, strict=True):
        rows += struct.pack("<IIIII", ord(char), *place(char, first), *place(char, second))
        if again == char and len(first) > 1:
            # The pair is the last mark and what the rest composes to.
            pairs.append((first, ord(first[-1]), ord(char)))
    heads = _normalised("NFC", [first[:-1] for first, _, _ in pairs])
    composed = sorted(
        (ord(head), last, code)
        for head, (_, last, code) in zip(heads, pairs, strict=True)
        if len(head) == 1
    )
    file.sections[Section.DECOMPOSED] = bytes(rows)
    file.sections[Section.COMPOSED] = np.array(composed, "<u4").tobytes()
    file.sections[Section.CODES] = np.array(codes, "<u4").tobytes()


# -- characters as readers see them ------------------------------------------------------------


def _charsmap(key: str, value: str) -> bytes:
    """A map of one ASCII character, as SentencePiece writes it: a double array, and the texts."""
    # The root's offset 1 leads to the node of the character; its own offset 1 to the leaf.
    node = 1 ^ ord(key)
    units = np.zeros(256, "<u4")
    units[0] = 1 << 10
    units[node] = ord(key) | 1 << 8 | 1 << 10
    units[node ^ 1] = 1 << 31
    return struct.pack("<I", units.nbytes) + units.tobytes() + value.encode() + b"\0"


@cache
def _grapheme_classes() -> np.ndarray:
    """uint8 [CODE_POINTS]: which code points stick to their neighbours in the library's eyes.

    The map is asked about a whole cluster of less than 6 bytes, and takes the first key that it
    begins with: so "a" and what clusters with it become "X" together. Characters that take more
    bytes can't be in such a cluster, and their class makes no difference. Neither do the few that
    stick to what comes after them: they are no keys.
    """
    from tokenizers import normalizers

    text, codes = candidates()
    short = (codes < 0x10000) & (codes != 0x0A) & (codes != 0x0D)
    chars = [char for char, wanted in zip(text, short, strict=True) if wanted]
    mapper = normalizers.Precompiled(_charsmap("a", "X"))
    lines = mapper.normalize_str("\n".join("a" + char for char in chars)).split("\n")
    # Nothing sticks to a control character: a mark after it stands alone.
    controls = [unicodedata.category(char) in ("Cc", "Zl", "Zp", "Cf") for char in chars]
    known = np.zeros(len(codes), np.uint8)
    known[short] = np.select(
        [[line == "X" for line in lines], controls], [GRAPHEME_EXTEND, GRAPHEME_CONTROL], 0
    )
    classes = np.zeros(CODE_POINTS, np.uint8)
    for kind in (GRAPHEME_EXTEND, GRAPHEME_CONTROL):
        classes[spread(known == kind)] = kind
    classes[[0x0A, 0x0D]] = GRAPHEME_CONTROL
    return classes
