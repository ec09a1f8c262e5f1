"""Patterns as automata find what the library's matcher finds."""

from __future__ import annotations

import random

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from bessemer.artifact.text.automaton import DEAD, MATCH_BEFORE, START, Automaton, build_automaton
from bessemer.artifact.text.charsets import members
from bessemer.artifact.text.format import NotConvertible
from bessemer.artifact.text.patterns import parse
from bessemer.importer.checkpoint.pretokenizers import PRE_TOKENIZERS

TEXTS = 120
ALPHABET = "abcAB '’sStTlLvreE\t\n\r  0123.,-!é中あ😀\u0301½ſK\u212a\u3000\u00a0"

PATTERNS = (
    "a|ab",
    "ab|a",
    "(?:a|ab)(?:c|bcd)?",
    "a{2,3}|b{2}|c{1,}",
    "a*b|a",
    "(?:ab)+(?!a)|b+(?=a)|.",
    "[^ab\\s]+|[a-c]",
    "[a-cé-中]+b?",
    "(?i:k|s|'ll)+",
    r"[\d\s&&[^1]]+",
    r"[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}",
    r"\x61\u0062|\x{63}+|\-|\.",
    r"\P{L}+|\S",
)


def matches(automaton: Automaton, text: str) -> list[tuple[int, int]]:
    """What the runner's matcher does, in Python."""
    found, at = [], 0
    while at < len(text):
        state, end, here = START, at, at
        while state != DEAD:
            inside = here < len(text)
            column = automaton.classes[ord(text[here])] if inside else automaton.class_count
            step = int(automaton.table[state, column])
            if step & MATCH_BEFORE:
                end = here
            if not inside:
                break
            state, here = step & ~MATCH_BEFORE, here + 1
        if end > at:
            found.append((at, end))
        at = max(end, at + 1)
    return found


# In one order: parallel test processes must name the same tests.
SHIPPED = sorted({p for rules in PRE_TOKENIZERS.values() for p in rules.patterns})


@pytest.mark.parametrize("pattern", [*PATTERNS, *SHIPPED])
def test_matches(pattern: str) -> None:
    automaton = build_automaton(parse(pattern), "a pattern")
    splitter = Split(Regex(pattern), "removed", invert=True)
    rng = random.Random(5)
    for _ in range(TEXTS):
        text = "".join(rng.choices(ALPHABET, k=rng.randint(1, 25)))
        expected = [place for _, place in splitter.pre_tokenize_str(text)]
        assert matches(automaton, text) == expected, repr(text)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a*", "may match nothing"),
        ("(a*)*b", "repeats what may be nothing"),
        (r"(\w)\1", r"the escape \\1"),
        ("^a", "an anchor"),
        ("a+?", "as little as it can"),
        ("(?>a)", r"the group \(\?>"),
        ("(?<=a)b", r"the group \(\?<"),
        ("(?!ab)c", "more than one character ahead"),
        ("a++ab", "possessive"),
        ("(?i:ß)", "beyond ASCII"),
        ("(?i:st)", "also one character"),
        (r"\p{Nonsense}", "which the library refuses"),
        ("a{1000}", "too many"),
        ("[b-a]", "a range that is none"),
        ("(a", "unexpected end"),
        ("a)", r"an unopened \)"),
        ("*a", "a repetition of nothing"),
        ("(?:[ab]*a[ab]{14})+", "too many states"),
    ],
)
def test_refused(pattern: str, reason: str) -> None:
    with pytest.raises(NotConvertible, match=reason):
        build_automaton(parse(pattern), "its pattern")


def test_sets_are_the_librarys() -> None:
    """Known members, and both sides of the surrogates."""
    letters, spaces = members(r"\p{L}"), members(r"\s")
    assert letters[[ord(c) for c in "aé中あ"]].all()
    assert not letters[[ord(c) for c in "1 -\u0301"]].any()
    assert letters[0xD7A3]
    assert not letters[0xD800]
    assert spaces[[0x20, 0x0A, 0x85, 0xA0, 0x3000]].all()
    assert spaces.sum() == 25
