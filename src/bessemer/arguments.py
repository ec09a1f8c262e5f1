"""Arguments that callers give, checked before they are used: each wrong one is a UsageError."""

from __future__ import annotations

import os
from numbers import Integral
from pathlib import Path

from bessemer.errors import ArgumentError

# Characters of a wrong value that a message shows.
SHOWN = 60


def checked_path(what: str, value: object, kind: str = "a path") -> Path:
    """A path that was given for `what`, with a leading ~ replaced. kind: what it should have been.

    Raises UsageError when it is none, or empty: that would be the current folder.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(what, shown(value), kind)
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~somebody, whom this machine doesn't know
        return Path(text)


def checked_model(value: object) -> Path:
    """What was given for MODEL, as the path that it may be."""
    return checked_path("MODEL", value, "a folder, a file or a name")


def checked_whole(what: str, value: object, least: int = 0) -> int:
    """A whole number of at least `least` that was given for `what`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise ArgumentError(what, shown(value), f"a whole number of at least {least}")
    return int(value)


def shown(value: object) -> str:
    """A value as messages show it, not longer than a line."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
