"""What is said of a wrong command line: the option as it was typed, and what is allowed."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import cyclopts
from cyclopts import exceptions

from bessemer.errors import ArgumentError, UsageError

# Likeness from which an unknown word is held for a misspelt one: rnu for run; --jsn for --json, but
# not --nonsense for --seed, since the dashes of options are alike already.
NEAR_VERB = 0.6
NEAR_OPTION = 0.7

KINDS = {int: "a whole number", float: "a number"}


def explain(
    error: cyclopts.CycloptsError | UsageError, app: cyclopts.App, tokens: Sequence[str]
) -> str:
    """Two lines: what is wrong with the words of a command line, and where to read more."""
    verb = tokens[0] if tokens and tokens[0] in app and not tokens[0].startswith("-") else None
    arguments = _arguments(app, verb)
    if isinstance(error, cyclopts.CycloptsError):
        said = _of_parser(error, app, verb, arguments, tokens)
    else:
        said = _of_verb(error, arguments, tokens)
    return f"{said}\nsee: {' '.join(('bessemer', *([verb] if verb else []), '--help'))}"


def _arguments(app: cyclopts.App, verb: str | None) -> list[Any]:
    """What a verb takes, in the parser's terms."""
    if verb is None:
        return []
    found = app[verb].assemble_argument_collection(default_parameter=app.default_parameter)
    return [argument for argument in found if argument.names != ("*",)]


# -- what a verb says -----------------------------------------------------------------------------


def _of_verb(error: UsageError, arguments: Sequence[Any], tokens: Sequence[str]) -> str:
    """Its words, but for the names that arguments have in Python, or by their other option."""
    if isinstance(error, ArgumentError):
        wanted, rest = error.name, f"{error.value}: it must be {error.allowed}"
    else:
        wanted, space, rest = str(error).partition(" ")
        if not space or not wanted.startswith("-"):
            return str(error)
    for argument in arguments:
        if wanted in (*argument.names, argument.field_info.name):
            option, value = _typed(argument.names, tokens)
            if isinstance(error, ArgumentError) and value is not None:
                rest = f"{_shown(value)}: it must be {error.allowed}"
            return f"{option or argument.name} {rest}"
    return str(error)


def _typed(names: Iterable[str], tokens: Sequence[str]) -> tuple[str | None, str | None]:
    """The last of an option's names that was typed, and its value."""
    found: tuple[str | None, str | None] = (None, None)
    for at, token in enumerate(tokens):
        option, equals, value = token.partition("=")
        if option.replace("_", "-") in names:
            following = tokens[at + 1] if at + 1 < len(tokens) else None
            found = (option, value if equals else following)
    return found


def _shown(value: str) -> str:
    """A value as it was typed, where that can be seen."""
    return value if value.strip() and value.isprintable() else repr(value)


# -- what the parser says -------------------------------------------------------------------------


def _of_parser(
    error: cyclopts.CycloptsError,
    app: cyclopts.App,
    verb: str | None,
    arguments: Sequence[Any],
    tokens: Sequence[str],
) -> str:
    literal = tokens[tokens.index("--") + 1 :] if "--" in tokens else []
    if any(token.startswith("-") for token in literal[1:]):
        return "after -- nothing is an option: give the options before it, and MODEL last"
    if isinstance(error, exceptions.UnknownCommandError):
        return _unknown_verb((error.unused_tokens or [""])[0], app)
    if isinstance(error, exceptions.UnknownOptionError):
        return _unknown_option(error.token.keyword or error.token.value, arguments)
    if isinstance(error, exceptions.MissingArgumentError) and error.argument is not None:
        return _missing(error.argument, error.keyword)
    if isinstance(error, exceptions.CoercionError) and error.argument is not None and error.token:
        return _wrong_kind(error.argument, error.token)
    if isinstance(error, exceptions.RepeatArgumentError):
        return f"{error.token.keyword} is given twice"
    if isinstance(error, exceptions.UnusedCliTokensError):
        takes = " ".join(a.name for a in arguments if a.index is not None)
        takes = f"{takes} and options" if takes else "options alone"
        left = " ".join(_shown(token) for token in error.unused_tokens or [])
        return f"unexpected {left}: {verb} takes {takes}; quote a text of several words"
    return " ".join(str(error).split())


def _unknown_verb(word: str, app: cyclopts.App) -> str:
    verbs = [name for name in app if not name.startswith("-")]
    known = f"the verbs are {', '.join(verbs)}"
    if word.startswith("-"):
        return f"unknown option {word}; begin with a verb: {known}"
    return f"unknown verb {_shown(word)}{_meant(word.lower(), verbs, NEAR_VERB) or f'; {known}'}"


def _unknown_option(word: str, arguments: Sequence[Any]) -> str:
    option = word.partition("=")[0]
    known = [name for a in arguments for name in a.names if name.startswith("--")]
    return f"unknown option {option}{_meant(option, known, NEAR_OPTION)}"


def _meant(word: str, known: Sequence[str], likeness: float) -> str:
    near = difflib.get_close_matches(word, known, 1, likeness)
    return f"; did you mean {near[0]}?" if near else ""


def _missing(argument: Any, typed: str | None) -> str:
    if argument.index is not None:
        about = (argument.parameter.help or "").rstrip(".")
        return f"{argument.name} is missing: {about[:1].lower()}{about[1:]}"
    allowed = _allowed(argument.hint)
    return f"{typed or argument.name} needs a value" + (f": {allowed}" if allowed else "")


def _wrong_kind(argument: Any, token: cyclopts.Token) -> str:
    option = token.keyword or argument.name
    if argument.hint is bool:
        return f"{option}={token.value}: {option} takes no value"
    return f"{option} {_shown(token.value)}: it must be {_allowed(argument.hint) or 'another'}"


def _allowed(hint: Any) -> str:
    """What values of a type are, unless they are texts."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    return KINDS.get(hint, "")
