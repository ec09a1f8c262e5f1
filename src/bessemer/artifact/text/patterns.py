"""Regular expressions of pre-tokenizers, as a tree of sets of characters.

What is read is the part of Oniguruma's syntax that tokenizers use and that needs no memory:
alternatives, groups, sets, greedy and possessive repetition, case-insensitive groups of ASCII
letters, and a look at one character ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bessemer.artifact.text.charsets import members
from bessemer.artifact.text.format import CODE_POINTS, Mask, NotConvertible

_ESCAPED_CONTROL = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "a": 0x07, "e": 0x1B}
_SHORT_CLASSES = "sSdDwWhH"
# Letters that fold together with others than their own other case.
_FOLDED = {"s": 0x17F, "k": 0x212A}
# Pairs of letters that Oniguruma also matches as one character, when it ignores case.
_LIGATURES = ("ff", "fi", "fl", "st", "ss")
_MOST_COPIES = 64


@dataclass(frozen=True, eq=False)
class Chars:
    """One character of a set."""

    mask: Mask


@dataclass(frozen=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """The first alternative that leads to a match."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """most: None for any number. possessive: what it took is never given back."""

    item: Node
    least: int
    most: int | None
    possessive: bool = False


@dataclass(frozen=True, eq=False)
class Look:
    """Whether the next character is, or is not, of a set; the end of the text is of none."""

    mask: Mask
    negative: bool


Node = Chars | Sequence | Choice | Repeat | Look


def parse(pattern: str) -> Node:
    """The tree of a pattern. Raises NotConvertible for what isn't understood."""
    return _Parser(pattern).parse()


def literal(text: str) -> Node:
    """The pattern for a text itself."""
    return Sequence(tuple(Chars(_single(ord(char))) for char in text))


def _single(code: int) -> Mask:
    mask = np.zeros(CODE_POINTS, np.bool_)
    mask[code] = True
    return mask


class _Parser:
    """Recursive descent; `_at` is the position in the pattern."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._ignore_case = False

    def parse(self) -> Node:
        node = self._choice()
        if self._at < len(self._text):
            raise self._unknown("an unopened )")
        return node

    def _unknown(self, what: str) -> NotConvertible:
        return NotConvertible(
            f"its pre-tokenizer's pattern {self._text!r} has {what} at position {self._at}"
        )

    def _peek(self, count: int = 1) -> str:
        return self._text[self._at : self._at + count]

    def _take(self) -> str:
        if self._at >= len(self._text):
            raise self._unknown("an unexpected end")
        char = self._text[self._at]
        self._at += 1
        return char

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        begin = self._at
        while self._peek() not in ("", "|", ")"):
            items.append(self._repeated(self._atom()))
        if self._ignore_case:
            letters = self._text[begin : self._at].lower()
            if any(pair in letters for pair in _LIGATURES):
                raise self._unknown("letters without case that are also one character")
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _atom(self) -> Node:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return Chars(self._bracket(self._at - 1))
        if char == "\\":
            return Chars(self._fold(self._escape()))
        if char == ".":
            return Chars(~_single(0x0A))
        if char in "^$":
            raise self._unknown("an anchor")
        if char in "*+?{":
            raise self._unknown("a repetition of nothing")
        return Chars(self._fold(_single(ord(char))))

    def _group(self) -> Node:
        if self._peek(2) in ("?=", "?!"):
            negative = self._peek(2) == "?!"
            self._at += 2
            inner = self._close(self._choice())
            if not isinstance(inner, Chars):
                raise self._unknown("a look at more than one character ahead")
            return Look(inner.mask, negative)
        before = self._ignore_case
        if self._peek(2) == "?:":
            self._at += 2
        elif self._peek(3) == "?i:":
            self._at += 3
            self._ignore_case = True
        elif self._peek() == "?":
            raise self._unknown(f"the group ({self._peek(3)}")
        node = self._close(self._choice())
        self._ignore_case = before
        return node

    def _close(self, node: Node) -> Node:
        if self._take() != ")":
            raise self._unknown("an unclosed group")
        return node

    def _repeated(self, item: Node) -> Node:
        while self._peek() and self._peek() in "*+?{":
            bounds = self._bounds()
            if bounds is None:
                return item
            if isinstance(item, Look):
                raise self._unknown("a repeated look ahead")
            if self._peek() == "?":
                raise self._unknown("a repetition that takes as little as it can")
            braces = self._text[self._at - 1] == "}"
            possessive = self._peek() == "+" and not braces
            self._at += possessive
            item = Repeat(item, bounds[0], bounds[1], possessive)
        return item

    def _bounds(self) -> tuple[int, int | None] | None:
        char = self._take()
        if char != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at : end].partition(",")
        if end < 0 or not (low + high).isdigit() or not (low + high).isascii():
            raise self._unknown("a brace that is no repetition")
        self._at = end + 1
        least = int(low or 0)
        most = (int(high) if high else None) if comma else least
        if least > _MOST_COPIES or (most is not None and (most > _MOST_COPIES or most < least)):
            raise self._unknown("a repetition of too many")
        return least, most

    # -- sets ----------------------------------------------------------------------------------

    def _escape(self) -> Mask:
        """A set after a backslash."""
        char = self._take()
        if char in _SHORT_CLASSES:
            positive = members("\\" + char.lower())
            return positive if char.islower() else ~positive
        if char in "pP":
            if self._take() != "{" or "}" not in self._text[self._at :]:
                raise self._unknown("a property without braces")
            end = self._text.index("}", self._at)
            name, self._at = self._text[self._at : end], end + 1
            return self._measured(f"\\{char}{{{name}}}")
        return _single(self._code_of_escape(char))

    def _code_of_escape(self, char: str) -> int:
        if char in _ESCAPED_CONTROL:
            return _ESCAPED_CONTROL[char]
        if char in "xu":
            braced = self._peek() == "{"
            end = self._text.find("}", self._at) if braced else self._at + (2 if char == "x" else 4)
            digits = self._text[self._at + braced : end]
            self._at = end + braced
            try:
                return int(digits, 16)
            except ValueError:
                raise self._unknown("an escape without a number") from None
        if char.isalnum():
            raise self._unknown(f"the escape \\{char}")
        return ord(char)

    def _measured(self, pattern: str) -> Mask:
        try:
            return members(pattern)
        except Exception as error:  # the library raises bare Exception
            raise self._unknown(f"{pattern}, which the library refuses ({error}),") from None

    def _fold(self, mask: Mask) -> Mask:
        """The set with both cases of its characters, inside (?i:...)."""
        if not self._ignore_case:
            return mask
        folded = mask.copy()
        for code in np.flatnonzero(mask):
            char = chr(code)
            if not char.isascii():
                raise self._unknown("characters without case beyond ASCII")
            if char.isalpha():
                folded[[ord(char.lower()), ord(char.upper())]] = True
                if char.lower() in _FOLDED:
                    folded[_FOLDED[char.lower()]] = True
        return folded

    def _bracket(self, begin: int) -> Mask:
        """A set in brackets, of which `begin` is the opening one."""
        negative = self._peek() == "^"
        self._at += negative
        mask = np.zeros(CODE_POINTS, np.bool_)
        first = True
        while first or self._peek() != "]":
            if self._peek() == "[" or self._peek(2) == "&&":
                return self._whole_bracket(begin)
            mask |= self._bracket_item()
            first = False
        self._at += 1
        mask = self._fold(mask)
        return ~mask if negative else mask

    def _bracket_item(self) -> Mask:
        char = self._take()
        if char == "\\":
            name = self._peek()
            if name and name in _SHORT_CLASSES + "pP":
                return self._escape()
            low = self._code_of_escape(self._take())
        else:
            low = ord(char)
        if self._peek() != "-" or self._peek(2) in ("-]", "-"):
            return _single(low)
        self._at += 1
        char = self._take()
        high = self._code_of_escape(self._take()) if char == "\\" else ord(char)
        if high < low or char == "[":
            raise self._unknown("a range that is none")
        mask = np.zeros(CODE_POINTS, np.bool_)
        mask[low : high + 1] = True
        return mask

    def _whole_bracket(self, begin: int) -> Mask:
        """Sets inside sets are left to the library."""
        at, depth = begin, 0
        while at < len(self._text):
            char = self._text[at]
            at += 2 if char == "\\" else 1
            depth += (char == "[") - (char == "]")
            if depth == 0:
                break
        if depth or self._ignore_case:
            raise self._unknown("a set that can't be read")
        self._at = at
        return self._measured(self._text[begin:at])
