"""A chat template as fixed pieces around one question, and one system text.

A template is a program; the runner has no interpreter for it. Most do the same thing for every
question: they write something before and behind it. That is found out by rendering questions that
stand for any, and tried with others, which templates are known to treat in their own way.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bessemer.artifact.text.format import Section, TokenizerFile
from bessemer.runtime.chat_template import ChatTemplateError, render
from bessemer.runtime.tokenizer import Tokenizer

TEXT, USER, SYSTEM, DATE = range(4)
# What a form is for, by the system text: none, some text, an empty one, white space alone.
NOTHING, SOME, EMPTY, BLANK = range(4)
TRIM = 1
# Nobody's template contains these (private-use characters).
USER_MARK, SYSTEM_MARK = "\ue0a1user\ue0a2", "\ue0a1system\ue0a2"
DATE_BEGIN, DATE_END = "\ue0a3", "\ue0a4"
# The runner's buffer for a date's format.
MOST_DATE_BYTES = 255

PROBES = (
    "x",
    "Hello, how are you?",
    " leading and trailing \n",
    "a\nb\r\nc\td",
    "<think>so</think>yes",
    "/no_think",
    "{{ x }} {% if %}",
    "<|im_end|><|eot_id|></s>[INST]",
    "'single' \"double\" & < > \\n \\",
    "你好 🏔️ é",
)
# Templates ask whether there is a system text, in ways that take these for none.
BLANKS = (" ", "\n", "\r\n\t ", "\u3000\x1f")


@dataclass(frozen=True)
class Part:
    """kind: TEXT with the text itself, DATE with the format, USER or SYSTEM; trim: without the
    white space around it.
    """

    kind: int
    text: str = ""
    trim: bool = False


Form = tuple[Part, ...]
Forms = tuple[Form | None, Form | None, Form | None, Form | None]


def chat_forms(tokenizer: Tokenizer) -> tuple[Forms, str]:
    """The forms for NOTHING, SOME, EMPTY and BLANK, None where there is none; and why there is none
    without or with a system text, or "".
    """
    if tokenizer.chat_template is None:
        return (None,) * 4, "the model has no chat template"
    plain, reason = _form(tokenizer, False)
    with_system, system_reason = _form(tokenizer, True)
    if plain is None and with_system is not None:
        reason = f"without a system text {reason}"
    if plain is not None and with_system is None:
        reason = f"with a system text {system_reason}"
    if with_system is None:
        return (plain, None, None, None), reason
    empty = _form_of_no_text(tokenizer, with_system, [""])
    return (plain, with_system, empty, _form_of_no_text(tokenizer, with_system, BLANKS)), reason


def write_chat(file: TokenizerFile, forms: Forms) -> None:
    """Write CHAT."""
    packed = bytearray()
    for told, form in enumerate(forms):
        for part in form or ():
            place = file.string(part.text.encode())
            packed += struct.pack("<IIIII", told, part.kind, TRIM * part.trim, *place)
    file.sections[Section.CHAT] = bytes(packed)


def _form(tokenizer: Tokenizer, with_system: bool) -> tuple[Form | None, str]:
    """The form that gives what the template gives for every probe, or None and the reason."""
    system = "You are a pirate." if with_system else None
    trials: list[Trial] = [(probe, system) for probe in PROBES]
    trials += [("Hello", probe) for probe in PROBES] if with_system else []
    try:
        forms = _cuts(_render(tokenizer, USER_MARK, SYSTEM_MARK if with_system else None))
        if not forms:
            return None, "the chat template doesn't write the texts exactly once"
        found = _fitting(tokenizer, forms, trials)
    except ChatTemplateError as error:
        return None, str(error)
    return found, "the chat template treats some texts in a way of its own" if found is None else ""


def _form_of_no_text(tokenizer: Tokenizer, some: Form, systems: Sequence[str]) -> Form | None:
    """The form for system texts that say nothing: that for any, or else one of their own."""
    trials: list[Trial] = [(probe, systems[0]) for probe in PROBES]
    trials += [("Hello", system) for system in systems]
    try:
        own = _cuts(_render(tokenizer, USER_MARK, systems[0]))
        return _fitting(tokenizer, [some, *own], trials)
    except ChatTemplateError:
        return None


# What a user says, and what the model is told before, or None.
Trial = tuple[str, str | None]


def _fitting(tokenizer: Tokenizer, forms: Sequence[Form], trials: Sequence[Trial]) -> Form | None:
    """The first of `forms` that gives what the template gives for all trials."""
    wanted = [_render(tokenizer, user, system) for user, system in trials]
    for form in forms:
        if wanted == [_apply(form, user, system or "") for user, system in trials]:
            return form
    return None


def _render(tokenizer: Tokenizer, user: str, system: str | None) -> str:
    told = [] if system is None else [{"role": "system", "content": system}]
    return render(
        tokenizer.chat_template,
        [*told, {"role": "user", "content": user}],
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        clock=_mark_date,
    )


def _mark_date(pattern: str) -> str:
    """What a template gets for the present time: the place for it."""
    if len(pattern.encode()) > MOST_DATE_BYTES:
        raise ChatTemplateError("the chat template has a very long format of the date")
    return DATE_BEGIN + pattern + DATE_END


_TRIMS = ((False, False), (True, False), (False, True), (True, True))


def _cuts(pattern: str) -> list[Form]:
    """The forms that a prompt with marks in it may have; none unless each mark is there as it must
    be.
    """
    if pattern.count(USER_MARK) != 1 or pattern.count(SYSTEM_MARK) > 1:
        return []
    return [_cut(pattern, trim_user, trim_system) for trim_user, trim_system in _TRIMS]


def _cut(pattern: str, trim_user: bool, trim_system: bool) -> Form:
    """The parts of a prompt with marks in it."""
    marks: Mapping[str, Part] = {
        USER_MARK: Part(USER, trim=trim_user),
        SYSTEM_MARK: Part(SYSTEM, trim=trim_system),
    }
    splitter = f"({USER_MARK}|{SYSTEM_MARK}|{DATE_BEGIN}[^{DATE_END}]*{DATE_END})"
    parts = []
    for text in re.split(splitter, pattern):
        if text in marks:
            parts.append(marks[text])
        elif text.startswith(DATE_BEGIN):
            parts.append(Part(DATE, text[1:-1]))
        elif text:
            parts.append(Part(TEXT, text))
    return tuple(parts)


def _apply(form: Form, user: str, system: str) -> str:
    """The prompt of a form, with marks for dates."""
    texts = []
    for part in form:
        text = {USER: user, SYSTEM: system, DATE: _mark_date(part.text)}.get(part.kind, part.text)
        texts.append(text.strip() if part.trim else text)
    return "".join(texts)
