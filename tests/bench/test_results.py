"""Figures from seconds, and how they are shown."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from bessemer.bench.machine import Peaks
from bessemer.bench.plan import Demand, Trial
from bessemer.bench.profile import GroupTime, Profile
from bessemer.bench.results import MemoryUse, Report, Result
from bessemer.bench.show import comma_separated, markdown, show

PEAKS = Peaks(2, flops=1000.0, bytes=400.0)
PROMPT = Result(Trial("pp", 10), 2, (2.0, 1.0, 4.0), Demand(1500, 300, 20), (PEAKS,) * 3)
TOKEN = Result(Trial("tg", 4, 7), 2, (2.0,), Demand(10, 400, 100), (PEAKS,))
MEMORY = MemoryUse(rss_peak=900 << 20, private=100 << 20, weights=500 << 20, cache=300 << 20)
PROFILE = Profile(
    Trial("tg", 4, 7),
    1,
    (
        GroupTime("decode_norm_0", "norm", 3, 1e-3, 1e-3, 0.5e-3, 0.0, 2e9),
        GroupTime("decode_linear_0", "linear", 3, 6e-3, 6e-3, 0.0, 4e9, 7e9),
    ),
    poll=0.5e-3,
    outside=2e-3,
)
REPORT = Report(
    {
        "name": "m|odel", "weights": "f16", "weights_bytes": 500 << 20, "kv": "f16",
        "context": 64,
    },
    {
        "cpu": "A CPU", "cores": 2,
        "peaks": [{"threads": 2, "flops_per_second": 1e9, "read_bytes_per_second": 4e9}],
    },
    [PROMPT, TOKEN],
    MEMORY,
    0.25,
    [PROFILE],
)  # fmt: skip


def test_the_median_counts() -> None:
    assert PROMPT.tokens_per_second == 5.0
    found = PROMPT.to_json()
    assert found["test"] == "pp10"
    assert found["threads"] == 2
    assert found["samples"] == [5.0, 10.0, 2.5]
    assert found["mean"] == pytest.approx(17.5 / 3)
    assert (found["min"], found["max"], found["repeat"]) == (2.5, 10.0, 3)
    assert found["time_to_first_token_s"] == 2.0
    assert found["fma_share"] == pytest.approx(1500 / 2 / 1000)
    assert TOKEN.to_json()["time_to_first_token_s"] is None
    assert TOKEN.to_json()["stddev"] == 0.0


def test_shares_of_reading_count_weights_and_say_what_the_cache_adds() -> None:
    shares = TOKEN.shares()
    assert shares["bandwidth_share"] == pytest.approx(400 / 2 / 400)
    assert shares["bandwidth_share_with_cache"] == pytest.approx(500 / 2 / 400)


def test_shares_are_of_the_peaks_before_each_repeat() -> None:
    """A machine that gives half does not halve the share of what runs on it."""
    slow = Peaks(2, flops=500.0, bytes=200.0)
    result = replace(PROMPT, seconds=(1.0, 2.0, 2.0), peaks=(PEAKS, slow, slow))
    assert result.shares()["fma_share"] == pytest.approx(1.5)
    assert result.shares()["bandwidth_share"] == pytest.approx(0.75)


def test_without_peaks_there_are_no_shares() -> None:
    bare = replace(PROMPT, peaks=())
    assert set(bare.shares().values()) == {None}
    assert "%" not in markdown(replace(REPORT, results=[bare], profiles=()))


def test_memory_that_is_neither_weights_nor_cache() -> None:
    assert MEMORY.to_json()["other_bytes"] == 100 << 20


def test_json_is_whole() -> None:
    found = json.loads(json.dumps(REPORT.to_json()))
    assert [r["test"] for r in found["results"]] == ["pp10", "tg4@d7"]
    assert found["machine"]["peaks"][0]["threads"] == 2
    assert found["memory"]["rss_peak_bytes"] == 900 << 20
    (profile,) = found["profiles"]
    assert profile["total_s"] == pytest.approx(10e-3)
    assert profile["groups"][1]["function"] == "decode_linear_0"
    assert "profiles" not in replace(REPORT, profiles=()).to_json()


def test_csv_reads_back() -> None:
    rows = list(csv.DictReader(io.StringIO(comma_separated(REPORT))))
    assert [r["test"] for r in rows] == ["pp10", "tg4@d7"]
    assert float(rows[0]["tokens_per_second"]) == 5.0
    assert rows[1]["time_to_first_token_s"] == ""


def test_markdown_shows_the_share_that_bounds_a_test() -> None:
    lines = markdown(REPORT).splitlines()
    assert "| pp10 | 2 | 5.0 | 3.8 | 2.5 | 10.0 | 2.000 s | 75 % |  |" in lines
    assert "| tg4@d7 | 2 | 2.0 | 0.0 | 2.0 | 2.0 |  |  | 50 % |" in lines
    groups = [line for line in lines if line.startswith("| decode_")]
    assert groups[0] == "| decode_linear_0 | 3 | 6.000 | 0.000 | 60 % | 4.0 | 7.0 |"
    assert groups[1] == "| decode_norm_0 | 3 | 1.000 | 0.500 | 15 % |  | 2.0 |"
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert set(tables) == {8, 10}


def test_the_terminal_shows_the_same() -> None:
    out = io.StringIO()
    show(REPORT, Console(file=out, width=160))
    for text in ("pp10", "75 %", "tg4@d7, 1 thread:", "(between calls)", "other 100"):
        assert text in out.getvalue()
