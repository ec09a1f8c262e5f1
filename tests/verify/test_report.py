"""Reports: their JSON, their table, and checks that raise."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from bessemer.errors import ArtifactError
from bessemer.verify.report import FILES, NUMBERS, Report


def test_json_is_what_the_command_line_promises() -> None:
    report = Report("model")
    report.add(FILES, "sizes", True, "3 files")
    report.add(NUMBERS, "prefill 7", False, "relative L2 0.1")
    assert json.loads(json.dumps(report.to_json())) == {
        "ok": False,
        "checks": [
            {"name": "files: sizes", "ok": True, "detail": "3 files"},
            {"name": "numbers: prefill 7", "ok": False, "detail": "relative L2 0.1"},
        ],
    }
    assert [c.name for c in report.failed] == ["prefill 7"]


def test_a_report_without_checks_proves_nothing() -> None:
    assert not Report("model").ok


@pytest.mark.parametrize(
    "error", [ArtifactError("cut off"), ZeroDivisionError("by 0"), KeyError("x")]
)
def test_a_check_that_raises_fails(error: Exception) -> None:
    report = Report("model")

    def check() -> tuple[bool, str]:
        raise error

    assert report.attempt(FILES, "symbols", check) is False
    assert not report.ok
    assert str(error) in report.checks[0].detail


def test_a_check_that_is_interrupted_is_interrupted() -> None:
    def check() -> tuple[bool, str]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Report("model").attempt(FILES, "symbols", check)


def test_table_shows_names_details_and_the_verdict() -> None:
    report = Report("model [x]")
    report.add(FILES, "sizes", True, "[3] files")
    report.add(NUMBERS, "prefill 7", False, "wrong")
    out = io.StringIO()
    report.print(Console(file=out, width=100))
    text = out.getvalue()
    for part in ("model [x]", "sizes", "[3] files", "FAIL", "1 of 2 checks fail"):
        assert part in text
