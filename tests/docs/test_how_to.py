"""The how-to pages: their examples, done in a copy of the checkout, and their commands run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.how_to import ROOT, Hunk, follow, read_page

PAGES = (
    "add-an-op",
    "add-a-pass",
    "add-a-kernel",
    "add-an-architecture",
    "add-a-weight-format",
)
# A command that hangs is ended; on a busy machine one that compiles takes about a minute.
LIMIT_S = 600


def test_what_a_page_tells_to_do() -> None:
    page = read_page(
        "# T\n```diff\n--- a/src/a.py\n+++ src/a.py\n@@\n one\n-two\n+2\n@@\n four\n+five\n```\n"
        "```python\n# src/b.py\nb = 1\n```\n```python\nshown = only\n```\n"
        "```sh\npython -m pytest tests\n```\n```console\n$ python -m pytest slow\n```\n"
    )
    assert page.hunks == (
        Hunk("src/a.py", "one\ntwo\n", "one\n2\n"),
        Hunk("src/a.py", "four\n", "four\nfive\n"),
    )
    assert page.files == {"src/b.py": "b = 1\n"}
    assert page.commands == ("python -m pytest tests",)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_example_works(name: str, tmp_path: Path) -> None:
    page = read_page((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
    assert page.commands
    assert page.hunks or page.files
    follow(page, tmp_path)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "src"), str(tmp_path)]),
    }
    for command in page.commands:
        mine = re.sub(r"^python ", f'"{sys.executable}" ', command) + " -p no:cacheprovider"
        done = subprocess.run(
            mine,
            shell=True,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


PAGES_WITH_PATHS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = sorted(p.name for p in (ROOT / "src" / "bessemer").iterdir() if p.is_dir())


@pytest.mark.parametrize("page", PAGES_WITH_PATHS, ids=lambda p: p.stem)
def test_links_and_paths_exist(page: Path) -> None:
    """Relative links, and paths in backticks: of the checkout, a room, or the tests of one."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    new = set(read_page(text).files)
    for path in re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / path).exists() or path in new, f"{page.name} names {path}"
    for path in re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w/]+\.\w+)`", text):
        rooms = (ROOT / "src" / "bessemer", ROOT / "tests")
        assert any((room / path).exists() for room in rooms), f"{page.name} names {path}"
