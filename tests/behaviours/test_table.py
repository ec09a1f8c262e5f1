"""docs/behaviours.md names tests that exist, for every row."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = (TESTS.parent / "docs" / "behaviours.md").read_text(encoding="utf-8")
FAMILIES = {
    "N": (1, 2, 5, 6, 7, 8, 9, 13, 15, 16, 21, 22),
    "K": (1, 3, 5, 7, 11, 14),
    "T": (1, 2, 3, 4, 5, 6, 8, 9, 15),
    "S": (1, 2, 3, 4, 9, 12),
    "L": (1, 3, 4, 6, 7, 9, 10, 11),
    "C": (1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15),
    "R": (1, 2, 4, 6),
    "P": (2, 6),
}
ROWS = [f"{family}{number:02}" for family, numbers in FAMILIES.items() for number in numbers]


def rows() -> dict[str, str]:
    """The text behind each id."""
    found = re.findall(r"^\| ([A-Z]\d\d) \|(.*)\|$", PAGE, re.MULTILINE)
    assert len(dict(found)) == len(found)
    return dict(found)


def references() -> list[tuple[str, str]]:
    """(file, test name pattern) of everything in backticks that looks like a test."""
    quoted = re.findall(r"`([^`]+\.py)(?:::([\w*]+))?`", PAGE)
    assert len(quoted) > 100
    return quoted


def test_every_row_names_a_test() -> None:
    assert sorted(rows()) == sorted(ROWS)
    for name, text in rows().items():
        assert re.search(r"`[^`]+\.py", text), name


def test_what_is_named_exists() -> None:
    for file, pattern in references():
        path = re.sub(r"^b/", "behaviours/", file).replace("...", "importer/checkpoint")
        found = sorted(TESTS.glob(path))
        assert found, file
        if pattern:
            names = [
                name
                for one in found
                for name in re.findall(r"^def (test_\w+)", one.read_text(), re.MULTILINE)
            ]
            assert fnmatch.filter(names, pattern), f"{file}::{pattern}"
