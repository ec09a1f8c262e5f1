"""Stop strings in streamed text.

Text that may be the beginning of a stop string is held back until it is certain. The result doesn't
depend on how the text is cut into pieces: the stop string that is complete first ends the text, and
where several are complete at the same character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

from bessemer.arguments import shown
from bessemer.errors import UsageError


class StopMatcher:
    """Looks for `stops` in a text that arrives in pieces (Knuth-Morris-Pratt, one state a stop).

    Raises UsageError for a stop that is empty or not a string. A single string is one stop.
    """

    def __init__(self, stops: Sequence[str] | str = ()) -> None:
        if not isinstance(stops, (str, Sequence)):
            raise UsageError(f"stop is {shown(stops)}; it must be text, or a list of texts")
        listed = [stops] if isinstance(stops, str) else list(stops)
        for stop in listed:
            if not isinstance(stop, str):
                raise UsageError(f"a stop string is {stop!r}; it must be text")
            if not stop:
                raise UsageError("a stop string is empty; it would end every text at once")
        self._stops = list(dict.fromkeys(listed))
        self._failures = [_failures(stop) for stop in self._stops]
        self._held = ""
        self._matched = [0] * len(self._stops)
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown now, and whether a stop string has been found (it is never shown)."""
        if self.stopped or not self._stops:
            return ("" if self.stopped else text), self.stopped
        start = len(self._held)
        buffer = self._held + text
        for index in range(start, len(buffer)):
            found = self._advance(buffer[index])
            if found:
                self.stopped = True
                self._held = ""
                return buffer[: index + 1 - found], True
        keep = max(self._matched)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut], False

    def flush(self) -> str:
        """The text that was held back, at the end of a text without a stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> int:
        """Feed one character; returns the length of the longest stop that it completes, or 0."""
        longest = 0
        for which, stop in enumerate(self._stops):
            length = self._matched[which]
            while length and stop[length] != char:
                length = self._failures[which][length - 1]
            if stop[length] == char:
                length += 1
            self._matched[which] = length
            if length == len(stop):
                longest = max(longest, length)
        return longest


def _failures(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
