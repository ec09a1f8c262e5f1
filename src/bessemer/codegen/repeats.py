"""Finding the loop over layers: stretches of calls that repeat with other numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# A stretch becomes a loop from this many repetitions; below, straight code is as short.
LEAST_REPEATS = 3


@dataclass(frozen=True)
class Segment:
    """Calls [start, start + period * count): `count` repetitions of `period` calls."""

    start: int
    period: int
    count: int


def find_repeats(keys: Sequence[Hashable]) -> list[Segment]:
    """Cut a sequence into loops and straight pieces, in order, the longest loop first.
    Deterministic: the earliest start and the shortest period win a tie.
    """
    best = _longest(keys)
    if best is None:
        return [Segment(0, len(keys), 1)] if keys else []
    end = best.start + best.period * best.count
    after = [Segment(end + s.start, s.period, s.count) for s in find_repeats(keys[end:])]
    return [*find_repeats(keys[: best.start]), best, *after]


def _longest(keys: Sequence[Hashable]) -> Segment | None:
    best: Segment | None = None
    covered = 0
    for period in range(1, len(keys) // LEAST_REPEATS + 1):
        run = 0  # length of the stretch in which keys[i] == keys[i + period]
        for i in range(len(keys) - period + 1):
            if i + period < len(keys) and keys[i] == keys[i + period]:
                run += 1
                continue
            count = run // period + 1
            if count >= LEAST_REPEATS and period * count > covered:
                covered = period * count
                best = Segment(i - run, period, count)
            run = 0
    return best
