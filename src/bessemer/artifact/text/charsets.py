"""Sets of characters, as the `tokenizers` library sees them.

A class such as `\\p{L}` means what the library's regular expressions take it for: its Unicode
version is neither Python's nor the newest. So every class is measured: the library matches it
against all code points.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from bessemer.artifact.text.format import CODE_POINTS, Mask

# Planes 4 to 13 hold nothing, 15 and 16 are for private use: one character stands for each of them.
_WHOLE_PLANES = (0, 1, 2, 3, 14)
_SURROGATES = range(0xD800, 0xE000)
PLANE = 0x10000


@cache
def candidates() -> tuple[str, np.ndarray]:
    """The characters that are asked about, and their code points (int64)."""
    codes = np.concatenate(
        [
            np.arange(p * PLANE, (p + 1) * PLANE) if p in _WHOLE_PLANES else [p * PLANE + 0x100]
            for p in range(CODE_POINTS // PLANE)
        ]
    ).astype(np.int64)
    codes = codes[(codes < _SURROGATES.start) | (codes >= _SURROGATES.stop)]
    return codes.astype("<u4").tobytes().decode("utf-32-le"), codes


def spread(known: np.ndarray) -> Mask:
    """A set over all code points from what is known of the candidates, bool[candidates]."""
    codes = candidates()[1]
    mask = np.zeros(CODE_POINTS, np.bool_)
    mask[codes] = known
    for plane in range(CODE_POINTS // PLANE):
        if plane not in _WHOLE_PLANES:
            mask[plane * PLANE : (plane + 1) * PLANE] = mask[plane * PLANE + 0x100]
    return mask


def kept_by(pre_tokenizer: Any) -> Mask:
    """The characters that a pre-tokenizer leaves when it removes the others."""
    text, _ = candidates()
    known = np.zeros(len(text), np.bool_)
    for _, (begin, end) in pre_tokenizer.pre_tokenize_str(text):
        known[begin:end] = True
    return spread(known)


@cache
def members(pattern: str) -> Mask:
    """The characters that a regular expression for one character matches; don't change it.

    Raises whatever the library raises for a pattern that it doesn't take.
    """
    from tokenizers import Regex
    from tokenizers.normalizers import Replace

    # What is left when they are removed: six times as fast as asking for the places of matches.
    text, codes = candidates()
    left = Replace(Regex(f"(?:{pattern})+"), "").normalize_str(text)
    others = np.zeros(CODE_POINTS, np.bool_)
    others[np.frombuffer(left.encode("utf-32-le"), "<u4")] = True
    return spread(~others[codes])


@cache
def numeric() -> Mask:
    """What the library's Digits pre-tokenizer takes for a digit."""
    from tokenizers.pre_tokenizers import Digits

    # Pieces alternate between digits and others; the first is U+0000 to "/".
    text, _ = candidates()
    known = np.zeros(len(text), np.bool_)
    for index, (_, (begin, end)) in enumerate(Digits(False).pre_tokenize_str(text)):
        known[begin:end] = index % 2 == 1
    return spread(known)


@cache
def punctuation() -> Mask:
    """What the library's Punctuation pre-tokenizer splits off."""
    from tokenizers.pre_tokenizers import Punctuation

    return ~kept_by(Punctuation("removed"))


@cache
def word_characters() -> Mask:
    """`\\w` of the library's other regular expressions, which look around whole-word tokens."""
    from tokenizers.pre_tokenizers import Whitespace

    # Its pattern is \w+|[^\w\s]+: a piece that "a" joins is of \w.
    splitter = Whitespace()
    text, _ = candidates()
    known = np.zeros(len(text), np.bool_)
    for piece, (begin, end) in splitter.pre_tokenize_str(text):
        known[begin:end] = len(splitter.pre_tokenize_str("a" + piece[0])) == 1
    return spread(known)
