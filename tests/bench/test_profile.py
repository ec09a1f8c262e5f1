"""Tables of profiled code as figures."""

from __future__ import annotations

import pytest

from bessemer.artifact.work import OUTSIDE, POLL, GroupWork, ProfileLayout, Work
from bessemer.bench.plan import Trial
from bessemer.bench.profile import largest, profile_of
from bessemer.errors import UsageError

MS = 1_000_000
LAYOUT = ProfileLayout(64, ("p_linear", "d_linear", "d_norm"))
GROUPS = (
    GroupWork("d_linear", "linear", 2, "1", flops=300, weight_bytes=50, row_bytes=10),
    GroupWork("d_norm", "rms_norm", 1, "1", row_bytes=40),
)
WORK = Work({"forward_prefill": (), "forward_decode": GROUPS}, LAYOUT)


def table(**slots: tuple[int, int]) -> list[int]:
    """The words of a thread's table."""
    numbers = {"outside": OUTSIDE, "poll": POLL}
    for function in LAYOUT.functions:
        numbers[function] = LAYOUT.work_slot(function)
        numbers[f"wait_{function}"] = LAYOUT.wait_slot(function)
    words = [0] * LAYOUT.words
    words[0] = 123456789  # when the last slot ended
    for name, (ns, count) in slots.items():
        words[1 + 2 * numbers[name] : 3 + 2 * numbers[name]] = [ns, count]
    return words


def test_times_are_means_of_threads_per_forward_call() -> None:
    # Two repeats of two tokens on two threads: four forward calls.
    first = table(outside=(2 * MS, 2), d_linear=(6 * MS, 4), wait_d_norm=(1 * MS, 2))
    second = table(outside=(2 * MS, 2), d_linear=(2 * MS, 4), d_norm=(2 * MS, 2), poll=(MS, 2))
    profile = profile_of(Trial("tg", 2), 2, [[first, second], [first, second]], WORK, 8)
    linear, norm = profile.groups
    assert linear.seconds == pytest.approx(2e-3)  # (12 + 4) / 2 threads / 4 calls
    assert linear.busiest == pytest.approx(3e-3)
    assert linear.flops_per_second == pytest.approx(300 / 3e-3)
    assert linear.bytes_per_second == pytest.approx(60 / 3e-3)
    assert norm.seconds == pytest.approx(0.5e-3)
    assert norm.wait == pytest.approx(0.25e-3)
    assert norm.flops_per_second == 0
    assert profile.poll == pytest.approx(0.25e-3)
    assert profile.outside == pytest.approx(1e-3)
    # Nothing is lost: all nanoseconds of both tables, by threads and calls.
    assert profile.total == pytest.approx((2 + 6 + 1 + 2 + 2 + 2 + 1) * 2e-3 / 2 / 4)
    assert profile.waiting == pytest.approx(0.5e-3)
    assert [g.function for g in largest(profile)] == ["d_linear", "d_norm"]


def test_slots_do_not_overlap() -> None:
    slots = [OUTSIDE, POLL]
    for function in LAYOUT.functions:
        slots += [LAYOUT.wait_slot(function), LAYOUT.work_slot(function)]
    assert sorted(slots) == list(range(len(slots)))
    assert LAYOUT.words == 1 + 2 * len(slots)
    assert LAYOUT.nbytes >= 8 * LAYOUT.words
    assert LAYOUT.nbytes % 64 == 0


def test_code_without_a_profile_is_refused() -> None:
    with pytest.raises(UsageError, match="measure itself"):
        profile_of(Trial("tg", 1), 1, [[[0]]], Work(WORK.entries), 8)
