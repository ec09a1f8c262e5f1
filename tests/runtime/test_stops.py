"""Stop strings: never shown, not even their beginning, however the text is cut (T09)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import UsageError
from bessemer.runtime.stops import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """What is shown for each piece, up to the stop, and at the end."""
    matcher = StopMatcher(stops)
    shown: list[str] = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown.append(text)
        if stopped:
            assert matcher.stopped
            assert matcher.flush() == ""
            return shown, True
    return [*shown, matcher.flush()], False


def test_t09_a_stop_across_pieces() -> None:
    stops = ["lo w", "zz9zzz"]
    assert run(stops, ["hel", "lo ", "wor", "ld"]) == (["he", "l", ""], True)
    assert "".join(run(stops, ["hel", "lo ", "wor", "ld"])[0]) == "hel"


def test_t09_a_false_partial_match_is_released() -> None:
    assert run(["lo w"], ["hel", "lo ", "cat"]) == (["he", "l", "lo cat", ""], False)
    assert run(["lo w"], ["hello "]) == (["hel", "lo "], False)


def test_a_partial_match_that_restarts_inside_itself() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], True)
    assert run(["abac"], list("ababac")) == (["", "", "", "ab", "", ""], True)


def test_the_stop_that_is_complete_first_wins() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], True)
    assert run(["abcd", "bc"], list("abcd")) == (["", "", "a"], True)
    # Complete at the same character: the longest, and nothing of it is shown.
    assert run(["bc", "abc"], ["xabc"]) == (["x"], True)
    assert run(["world", "hello"], ["say hello world"]) == (["say "], True)


def test_nothing_is_shown_after_a_stop() -> None:
    matcher = StopMatcher(["end"])
    assert matcher.push("the end, or") == ("the ", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_without_stops_text_passes() -> None:
    assert run([], ["a", "", "b"]) == (["a", "", "b", ""], False)


def test_one_string_is_one_stop() -> None:
    assert StopMatcher("lo w").push("hello world") == ("hel", True)


def test_bad_stops() -> None:
    for stops in (["a", ""], ""):
        with pytest.raises(UsageError, match="empty"):
            StopMatcher(stops)
    with pytest.raises(UsageError, match="must be text"):
        StopMatcher([3])  # type: ignore[list-item]


def plain(stops: list[str], text: str) -> tuple[str, bool]:
    """The rule once more: cut at the first prefix that ends with a stop."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


letters = st.text(alphabet="ab", max_size=30)


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3), st.data())
def test_cutting_does_not_matter(stops: list[str], data: st.DataObject) -> None:
    pieces = data.draw(st.lists(letters, max_size=6))
    shown, stopped = run(stops, pieces)
    assert ("".join(shown), stopped) == plain(stops, "".join(pieces))


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3), letters)
def test_what_is_shown_could_not_begin_a_stop(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    seen, shown = "", ""
    for char in text:
        piece, stopped = matcher.push(char)
        seen, shown = seen + char, shown + piece
        if stopped:
            break
        held = seen[len(shown) :]
        # All that is held back begins a stop, and it is the longest end of the text that does.
        starts = [n for s in stops for n in range(len(s)) if seen.endswith(s[:n])]
        assert len(held) == max(starts)
