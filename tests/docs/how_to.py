"""Reads a how-to page and does what it says, in a copy of the checkout.

Three kinds of code blocks are followed, in the page's order:

- `diff`: hunks for files that exist. A hunk is found by its context and removed lines, which must
  occur exactly once in the file; line numbers are not needed.
- a block whose first line is a comment with a path, `# src/...` or `// tests/...`: a new file.
- `sh`: commands that start with `python`.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEW_FILE = re.compile(r"(?:#|//) (?P<path>[\w./-]+/[\w.-]+)\n")


@dataclass(frozen=True)
class Hunk:
    """A change of one file: the lines that are there before, and after."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class Page:
    """files: path -> content of new files.  commands: shell lines."""

    hunks: tuple[Hunk, ...]
    files: dict[str, str]
    commands: tuple[str, ...]


def read_page(text: str) -> Page:
    """What a page tells to do."""
    hunks: list[Hunk] = []
    files: dict[str, str] = {}
    commands: list[str] = []
    for kind, body in FENCE.findall(text):
        if kind == "diff":
            hunks += _hunks(body)
        elif kind == "sh":
            commands += [line for line in body.splitlines() if line.startswith("python ")]
        elif match := NEW_FILE.match(body):
            files[match["path"]] = body[match.end() :]
    return Page(tuple(hunks), files, tuple(commands))


def _hunks(body: str) -> list[Hunk]:
    found = []
    path = ""
    for part in re.split(r"^@@.*\n", body, flags=re.MULTILINE):
        lines = part.splitlines(keepends=True)
        changes = [line for line in lines if not line.startswith(("--- ", "+++ "))]
        if changes:
            before = "".join(line[1:] for line in changes if line[0] != "+")
            after = "".join(line[1:] for line in changes if line[0] != "-")
            found.append(Hunk(path, before, after))
        for line in lines:
            if line.startswith("+++ "):
                path = line[4:].strip()
    return found


def follow(page: Page, folder: Path) -> None:
    """Copy the checkout to `folder` and make the page's changes there."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for hunk in page.hunks:
        path = folder / hunk.path
        text = path.read_text(encoding="utf-8")
        assert text.count(hunk.before) == 1, (
            f"{hunk.path} does not have, exactly once:\n{hunk.before}"
        )
        path.write_text(text.replace(hunk.before, hunk.after), encoding="utf-8")
    for name, content in page.files.items():
        path = folder / name
        assert not path.exists(), f"{name} is there already"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
