"""Why a config is refused, in a line: the file, the field, its value, and what it must be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bessemer.arguments import shown
from bessemer.errors import CheckpointError, UnsupportedError

# Characters of a message in transformers' own words that are shown; of a longer one the beginning,
# which names the field, and the end, which mostly has the value.
_WORDS_SHOWN = 160
_WORDS_AT_END = 40

_FIELD = re.compile(r"Validation error for field '([^']+)'")
_EXPECTED = re.compile(r"\bexpected (?:an? )?(\w+), got")
# Types of Python by what they are in JSON.
_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "list": "a list",
    "dict": "an object",
    "NoneType": "null",
}
# Errors of checks that transformers wraps: what they are of is in the cause.
_WRAPPED = "StrictDataclassClassValidationError"


@contextmanager
def in_file(file: Path) -> Iterator[None]:
    """Errors that begin with config.json name the file instead, which the caller alone knows."""
    try:
        yield
    except (CheckpointError, UnsupportedError) as error:
        rest = str(error).removeprefix("config.json")
        if rest == str(error):
            raise
        raise type(error)(f"{file}{rest}") from error


def why_refused(error: BaseException, config: Mapping[str, Any]) -> str:
    """What went wrong, in a line.

    A KeyError for a value of the config means that it was looked up in a table of those that are
    known: the fields that have it are named.
    """
    if type(error).__name__ == _WRAPPED and error.__cause__ is not None:
        error = error.__cause__
    if field := _FIELD.match(str(error)):
        return _wrong_type(field[1], str(error), config)
    value = error.args[0] if isinstance(error, KeyError) and error.args else None
    fields = [name for name, field in config.items() if value is not None and _has(field, value)]
    if not fields:
        return f"{type(error).__name__}: {_one_line(error)}"
    return f"{' or '.join(fields)} has {shown(value)}, which is not known"


def _wrong_type(field: str, words: str, config: Mapping[str, Any]) -> str:
    """What a field must be, by transformers' words, which go through every type it may have."""
    kinds = list(dict.fromkeys(_KINDS.get(kind, kind) for kind in _EXPECTED.findall(words)))
    if _KINDS["float"] in kinds and _KINDS["int"] in kinds:
        kinds.remove(_KINDS["int"])
    *first, last = kinds or ["of another type"]
    must_be = f"must be {', '.join(first)}{' or ' if first else ''}{last}"
    if field not in config:
        return f"{field} {must_be}"
    return f"{field} is {shown(config[field])}, and {must_be}"


def _one_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    if len(words) <= _WORDS_SHOWN:
        return words
    return f"{words[: _WORDS_SHOWN - _WORDS_AT_END]} ... {words[-_WORDS_AT_END:]}"


def _has(field: object, value: object) -> bool:
    if isinstance(field, dict):
        return any(_has(part, value) for part in field.values())
    if isinstance(field, list):
        return any(_has(part, value) for part in field)
    return type(field) is type(value) and field == value
