"""C has no linter here; what ruff holds Python to is held here."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100


def test_lines_of_c_are_as_long_as_those_of_python() -> None:
    files = [
        file
        for folder in ("src", "tests", "examples")
        for file in sorted((ROOT / folder).rglob("*.[ch]"))
    ]
    assert len(files) > 40
    long = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > WIDTH
    ]
    assert not long
