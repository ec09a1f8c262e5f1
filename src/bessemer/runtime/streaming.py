"""Text that grows token by token, and never shows half a character.

Joined, the pieces equal `Tokenizer.decode` of all the ids.
"""

from __future__ import annotations

from bessemer.runtime.pieces import PieceDecoder
from bessemer.runtime.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# How many tokens may wait for the rest of their character before they are shown as they are.
# A UTF-8 character has at most four bytes, so that more than this many tokens can't be one.
MAX_WAITING = 8


class TextStreamer:
    """Feeds on token ids, and returns the text that each one completes.

    Special tokens and ids that the tokenizer doesn't know add nothing. The cost of a token doesn't
    grow with the length of the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        rules = tokenizer.piece_rules
        self._pieces = PieceDecoder(rules) if rules is not None else None
        self._window = _Window(tokenizer)

    def push(self, token_id: int) -> str:
        """The new text, empty while a character is incomplete."""
        token = self._tokenizer.token(token_id)
        if token is None or self._tokenizer.is_special(token_id):
            return ""
        if self._pieces is not None:
            return self._pieces.push(token)
        return self._window.push(token_id)

    def finish(self) -> str:
        """What is left (one U+FFFD for a broken off character); then a new text starts."""
        if self._pieces is None:
            return self._window.finish()
        text = self._pieces.finish()
        self._pieces.reset()
        return text


class _Window:
    """Streams through a decoder that isn't understood: the last few tokens are decoded again.

    The tokens in the window are those shown last, for context, and those that wait. What the
    waiting ones add is the difference between the text with and without them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        self._waiting.append(token_id)
        added = self._added()
        unfinished = not added or added.endswith(REPLACEMENT)
        if unfinished and len(self._waiting) <= MAX_WAITING:
            return ""
        self._shown, self._waiting = self._waiting, []
        return added

    def finish(self) -> str:
        added = self._added()
        self._shown, self._waiting = [], []
        return added

    def _added(self) -> str:
        before = self._tokenizer.decode(self._shown)
        after = self._tokenizer.decode(self._shown + self._waiting)
        common = 0
        while common < min(len(before), len(after)) and before[common] == after[common]:
            common += 1
        return after[common:]
