"""README.md against the program: verbs, options, architectures, formats, variables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bessemer.cli.command_line import VERBS
from bessemer.cli.options import StorageOptions
from bessemer.compile_options import KV_FORMATS
from bessemer.importer import SUPPORTED, UNSUPPORTED
from bessemer.importer.checkpoint.gguf_architectures import ARCHITECTURES
from bessemer.importer.checkpoint.gguf_file import TENSOR_TYPES
from bessemer.weight_formats import WEIGHT_FORMATS
from tests.docs.how_to import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def table(header: str) -> list[list[str]]:
    """Cells of the table whose header line begins so."""
    at = README.index(header)
    lines = README[at:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]


def test_every_verb_is_shown() -> None:
    assert set(VERBS) <= set(re.findall(r"\*\*(\w+)\*\*", README))


def test_the_architectures() -> None:
    rows = table("| architecture |")
    assert {row[0] for row in rows} == set(SUPPORTED)
    from_gguf = {architecture.model_type for architecture in ARCHITECTURES.values()}
    assert {row[0] for row in rows if row[-1] == "yes"} == from_gguf
    assert set(SUPPORTED.values()) == {"export and dynamo"}  # what the text above the table says
    named = {word.strip() for row in table("| not compiled |") for word in row[0].split(",")}
    named = {word.removesuffix(" and others") for word in named}
    assert named <= set(UNSUPPORTED)


def test_the_formats() -> None:
    (checkpoints, weights, kv, _targets) = (row[1] for row in table("| | formats |"))
    for name in TENSOR_TYPES.values():
        assert name.upper() in checkpoints, name
    assert {word for word in re.split(r"\W+", weights) if word in WEIGHT_FORMATS} == set(
        WEIGHT_FORMATS
    )
    for name in KV_FORMATS:
        assert name in kv
    assert StorageOptions().compile_options().kv == "f16"


def test_every_variable_is_named() -> None:
    """Those of ours, by the constants that hold their names."""
    sources = [p.read_text(encoding="utf-8") for p in (ROOT / "src").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'_VARIABLE = "(BESSEMER_\w+)"', text)}
    named = set(re.findall(r"`(BESSEMER_[A-Z_]+)`", README))
    assert read == named


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_that_is_shown_exists(verb: str) -> None:
    shown = set()
    for line in re.findall(rf"bessemer {verb} [^`\n]*", README):
        shown |= set(re.findall(r"(?<=\s)--[a-z-]+", line.split(" # ")[0]))
    if not shown:
        return
    command = [sys.executable, "-m", "bessemer", verb, "--help"]
    known = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert known.returncode == 0
    for option in shown:
        assert option in known.stdout or option == "--help", f"{verb} {option}"
