"""A chat template as fixed pieces around one question, and one system text.

A template is a program; the runner has no interpreter for it. Most do the same thing for every
question: they write something before and behind it. That is found out by rendering questions that
stand for any, and tried with others, which templates are known to treat in their own way.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bessemer.artifact.text.format import Section, TokenizerFile
from bessemer.runtime.chat_template import ChatTemplateError, render
from bessemer.runtime.tokenizer import Tokenizer

TEXT, USER, SYSTEM, DATE = range(4)
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


@dataclass(frozen=True)
class Part:
    """kind: TEXT with the text itself, DATE with the format, USER or SYSTEM; trim: without the
    white space around it.
    """

    kind: int
    text: str = ""
    trim: bool = False


Form = tuple[Part, ...]


def chat_forms(tokenizer: Tokenizer) -> tuple[Form | None, Form | None, str]:
    """The forms without and with a system text, None where there is none; and why not, or "".

    The form with a system text is left out, too, where the template has none.
    """
    if tokenizer.chat_template is None:
        return None, None, "the model has no chat template"
    plain, reason = _form(tokenizer, False)
    with_system, system_reason = _form(tokenizer, True)
    if plain is None and with_system is None:
        return None, None, reason
    if plain is None:
        return None, with_system, f"without a system text {reason}"
    if with_system is None:
        return plain, None, f"with a system text {system_reason}"
    return plain, with_system, ""


def write_chat(file: TokenizerFile, forms: tuple[Form | None, Form | None]) -> None:
    """Write CHAT."""
    packed = bytearray()
    for with_system, form in enumerate(forms):
        for part in form or ():
            place = file.string(part.text.encode())
            packed += struct.pack("<IIIII", with_system, part.kind, TRIM * part.trim, *place)
    file.sections[Section.CHAT] = bytes(packed)


def _form(tokenizer: Tokenizer, with_system: bool) -> tuple[Form | None, str]:
    """The form that gives what the template gives for every probe, or None and the reason."""

    def rendered(user: str, system: str) -> str:
        messages = [{"role": "system", "content": system}] if with_system else []
        return _render(tokenizer, [*messages, {"role": "user", "content": user}], _mark_date)

    try:
        pattern = rendered(USER_MARK, SYSTEM_MARK)
        forms = [_cut(pattern, trim_user, trim_system) for trim_user, trim_system in _TRIMS]
        if forms[0] is None:
            return None, "the chat template doesn't write the texts exactly once"
        trials = [(probe, "You are a pirate.") for probe in PROBES]
        trials += [("Hello", probe) for probe in PROBES] if with_system else []
        for form in forms:
            if form is not None and all(
                rendered(user, system) == _apply(form, user, system) for user, system in trials
            ):
                return form, ""
        return None, "the chat template treats some texts in a way of its own"
    except ChatTemplateError as error:
        return None, str(error)


_TRIMS = ((False, False), (True, False), (False, True), (True, True))


def _render(
    tokenizer: Tokenizer, messages: list[dict[str, str]], clock: Callable[[str], str]
) -> str:
    return render(
        tokenizer.chat_template,
        messages,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        clock=clock,
    )


def _mark_date(pattern: str) -> str:
    """What a template gets for the present time: the place for it."""
    if len(pattern.encode()) > MOST_DATE_BYTES:
        raise ChatTemplateError("the chat template has a very long format of the date")
    return DATE_BEGIN + pattern + DATE_END


def _cut(pattern: str, trim_user: bool, trim_system: bool) -> Form | None:
    """The parts of a prompt with marks in it; None unless each mark is there as it must be."""
    if pattern.count(USER_MARK) != 1 or pattern.count(SYSTEM_MARK) > 1:
        return None
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
