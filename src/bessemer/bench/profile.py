"""Where the time of a forward call goes: the tables that profiled code fills, as figures.

Each thread charges its time, without gaps, to slots: a group's function, the barrier before it, the
poll for a cancel, and what lies between two calls. See `artifact.work.ProfileLayout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bessemer.artifact.work import OUTSIDE, POLL, GroupWork, ProfileLayout, Work
from bessemer.bench.plan import Trial
from bessemer.errors import UsageError

NANO = 1e-9


@dataclass(frozen=True)
class GroupTime:
    """One group function, per forward call. seconds: in it, mean of the threads.  busiest: of the
    thread that took longest.  wait: at the barrier before it, mean of the threads.
    flops_per_second, bytes_per_second: its work by the busiest thread's time; 0 where it has none.
    """

    function: str
    kind: str
    calls: int
    seconds: float
    busiest: float
    wait: float
    flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True)
class Profile:
    """groups: in order of use.  poll: waiting where a cancel is looked for.  outside: between two
    forward calls (Python, choosing the token, waking the threads). Seconds per forward call.
    """

    test: Trial
    threads: int
    groups: tuple[GroupTime, ...]
    poll: float
    outside: float

    @property
    def total(self) -> float:
        """All of it: the time from one forward call to the next."""
        inside = sum(g.seconds + g.wait for g in self.groups)
        return inside + self.poll + self.outside

    @property
    def waiting(self) -> float:
        """At barriers."""
        return self.poll + sum(g.wait for g in self.groups)

    def to_json(self) -> dict[str, Any]:
        return {
            "test": self.test.name,
            "threads": self.threads,
            "total_s": self.total,
            "waiting_s": self.waiting,
            "poll_s": self.poll,
            "outside_s": self.outside,
            "groups": [asdict(group) for group in self.groups],
        }


def profile_of(
    test: Trial, threads: int, runs: Iterable[Sequence[Sequence[int]]], work: Work, chunk: int
) -> Profile:
    """runs: for each repeat of the test the words of each thread's table, which began at 0.

    Raises UsageError for a model that was not compiled to measure itself.
    """
    layout = work.profile
    if layout is None:
        raise UsageError("the model was not compiled to measure itself")
    steps = list(test.steps(chunk))
    tables = [_summed(layout, words) for words in zip(*runs, strict=True)]
    forwards = max(1, tables[0][OUTSIDE][1])  # each call starts by charging what lay before it

    def seconds(slot: int) -> list[float]:
        return [table[slot][0] * NANO / forwards for table in tables]

    def mean(slot: int) -> float:
        return sum(seconds(slot)) / len(tables)

    by_function: dict[str, list[GroupWork]] = {}
    for part in work.entries[test.entry]:
        by_function.setdefault(part.function, []).append(part)
    groups = []
    for function, parts in by_function.items():
        slot = layout.work_slot(function)
        busiest = max(seconds(slot))
        flops = sum(part.flops_of(step) for part in parts for step in steps) / len(steps)
        nbytes = sum(part.bytes_of(step) for part in parts for step in steps) / len(steps)
        groups.append(
            GroupTime(
                function,
                parts[0].kind,
                sum(part.calls for part in parts),
                mean(slot),
                busiest,
                mean(layout.wait_slot(function)),
                flops / busiest if busiest else 0.0,
                nbytes / busiest if busiest else 0.0,
            )
        )
    return Profile(test, threads, tuple(groups), mean(POLL), mean(OUTSIDE))


def _summed(layout: ProfileLayout, runs: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    """One thread's table over all repeats."""
    return layout.read([sum(words) for words in zip(*runs, strict=True)])


def largest(profile: Profile) -> list[GroupTime]:
    """The groups by the time that they and the waiting before them take."""
    return sorted(profile.groups, key=lambda g: -(g.seconds + g.wait))
