"""The loop over layers: repeated stretches of calls are found, and nothing else changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bessemer.codegen.repeats import Segment, find_repeats


def expand(keys: str, segments: list[Segment]) -> str:
    assert [s.start for s in segments] == [
        sum(p.period * p.count for p in segments[:i]) for i in range(len(segments))
    ]
    return "".join(keys[s.start : s.start + s.period] * s.count for s in segments)


def test_layers_between_embedding_and_head() -> None:
    assert find_repeats("e" + "abcd" * 30 + "nh") == [
        Segment(0, 1, 1),
        Segment(1, 4, 30),
        Segment(121, 2, 1),
    ]


def test_two_kinds_of_layers() -> None:
    assert find_repeats("e" + "ab" * 3 + "acd" * 26 + "h") == [
        Segment(0, 1, 1),
        Segment(1, 2, 3),
        Segment(7, 3, 26),
        Segment(85, 1, 1),
    ]


def test_alternating_layers_are_one_turn() -> None:
    assert find_repeats("abcabd" * 4) == [Segment(0, 6, 4)]


def test_two_layers_stay_straight() -> None:
    assert find_repeats("abcabc") == [Segment(0, 6, 1)]
    assert find_repeats("") == []


@given(st.text(alphabet="abc", max_size=60))
def test_expansion_is_the_sequence(keys: str) -> None:
    assert expand(keys, find_repeats(keys)) == keys
