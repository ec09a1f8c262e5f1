"""Names, steps and demands of tests."""

from __future__ import annotations

import pytest

from bessemer.artifact.work import GroupWork, Step, Work
from bessemer.bench.plan import Demand, Trial, plan
from bessemer.errors import UsageError


def test_names_are_those_of_llama_bench() -> None:
    names = [t.name for t in plan([1, 512], [64], [0, 2000], 4096)]
    assert names == ["pp1", "pp512", "tg64", "pp1@d2000", "pp512@d2000", "tg64@d2000"]


def test_zero_leaves_a_kind_out_and_repeats_go() -> None:
    assert [t.name for t in plan([0], [8, 8], [], 100)] == ["tg8"]
    with pytest.raises(UsageError, match="nothing to measure"):
        plan([0], [], [0], 100)


def test_what_does_not_fit_is_named() -> None:
    assert plan([100], [], [0], 100)
    with pytest.raises(UsageError, match=r"pp100@d1 needs a context of 101 .* 100"):
        plan([100], [], [1], 100)
    with pytest.raises(UsageError, match="from 0"):
        plan([-1], [], [0], 100)


def test_a_prompt_goes_in_chunks_and_wants_logits_at_its_end() -> None:
    steps = list(Trial("pp", 20, 5).steps(8))
    assert steps == [Step(5, 8, 0), Step(13, 8, 0), Step(21, 4, 1)]


def test_generation_goes_token_by_token() -> None:
    assert list(Trial("tg", 3, 5).steps(8)) == [Step(5, 1, 1), Step(6, 1, 1), Step(7, 1, 1)]


@pytest.mark.parametrize("window", [0, 1, 4, 100])
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 9), (7, 1), (3, 5), (20, 6)])
def test_keys_by_counting(start: int, rows: int, window: int) -> None:
    seen, touched = 0, set()
    for row in range(start, start + rows):
        keys = [k for k in range(row + 1) if not window or k > row - window]
        seen += len(keys)
        touched.update(keys)
    assert Step(start, rows).keys(window) == (seen, len(touched))


def test_demand_adds_up_all_steps() -> None:
    linear = GroupWork("f", "linear", 2, "T", flops=10, weight_bytes=100, row_bytes=7)
    head = GroupWork("h", "linear", 1, "R", flops=1000, weight_bytes=5)
    table = GroupWork("e", "embedding", 1, "T", row_weight_bytes=3, row_weight_limit=20)
    attention = GroupWork("a", "flash", 3, "T", key_flops=2, key_bytes=4, windows={0: 2, 3: 1})
    work = Work({"forward_prefill": (linear, head, table, attention)})
    demand = Demand.of(Trial("pp", 10), work, 8)  # rows 0..7, then 8 and 9
    keys = 2 * sum(range(1, 11)) + (1 + 2 + 3 * 8)
    assert demand.flops == 10 * 10 + 1000 + 2 * keys
    assert demand.weight_bytes == 2 * 105 + 20 + 6
    assert demand.cache_bytes == 4 * ((2 * 8 + 8) + (2 * 10 + 4))
