"""Chat templates as pieces: the runner's prompt is the rendered one."""

from __future__ import annotations

import time

import pytest

from bessemer.artifact.text.build import build_tokenizer_file
from bessemer.artifact.text.chat_forms import BLANKS, DATE, NOTHING, PROBES, chat_forms
from bessemer.runtime.chat_template import render
from bessemer.runtime.tokenizer import Tokenizer
from tests.native.text_library import NativeError, NativeTokenizer
from tests.runtime import tiny_tokenizers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|system|>You help.\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}<|assistant|>"
)
# As Llama 3.2: the date, and the system text in the middle.
DATED = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set s = messages[0].content.strip() %}"
    "{% set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}"
    "[system]Today: {{ strftime_now('%d %b %Y') }}\n\n{{ s }}[end]"
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}[assistant]"
)
# As Gemma: a system text goes before the question.
BEFORE = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}"
    "{% for m in messages %}<user>{{ s }}{{ m.content }}</user>{% endfor %}<model>"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}[INST] {{ m.content }} [/INST]{% endfor %}"
)
# Whether there is a system text is asked, and then whether there is anything in it.
ASKED = (
    "{% for m in messages %}{% if m.role != 'system' or m.content %}[{{ m.role }}]"
    "{{ m.content | trim }}{% endif %}{% endfor %}[assistant]"
)
ASKED_CLOSELY = ASKED.replace("or m.content ", "or m.content.strip() ")
NO_EMPTY_SYSTEM = (
    "{% for m in messages %}{% if not m.content.strip() %}{{ raise_exception('empty') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
# As Qwen 3 and DeepSeek R1: a text can switch something.
SWITCHED = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
SWITCHED_BY_SYSTEM = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | replace('/no_think', '')"
    " if m.role == 'system' else m.content }}{% endfor %}"
)


def made(template: str) -> tuple[Tokenizer, NativeTokenizer, str]:
    files = {"tokenizer_config.json": {"bos_token": "<|bos|>"}, "chat_template": template}
    python = Tokenizer(tiny_tokenizers.byte_level(), files)
    written = build_tokenizer_file(python)
    return python, NativeTokenizer(written.content), written.note


def rendered(python: Tokenizer, user: str, system: str | None) -> str:
    told = [] if system is None else [{"role": "system", "content": system}]
    messages = [*told, {"role": "user", "content": user}]
    return render(python.chat_template, messages, bos_token=python.bos_token)


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, DATED, BEFORE, ASKED, ASKED_CLOSELY])
def test_prompts(template: str) -> None:
    python, native, note = made(template)
    assert note == ""
    for text in (*PROBES, "\u3000 wide \u00a0\x1f"):
        for user, system in (
            (text, None),
            (text, "be kind"),
            ("hi", text),
            (text, ""),
            (text, " "),
        ):
            assert native.chat(user, system) == rendered(python, user, system), (user, system)
    for blank in (*BLANKS, "\u00a0 \n\n"):
        assert native.chat("hi", blank) == rendered(python, "hi", blank), blank


def test_the_date_is_that_of_the_run() -> None:
    python, native, _ = made(DATED)
    plain = chat_forms(python)[0][NOTHING]
    assert plain is not None
    assert [part.text for part in plain if part.kind == DATE] == ["%d %b %Y"]
    assert time.strftime("%d %b %Y") in native.chat("x")


@pytest.mark.parametrize("template", [NO_SYSTEM, SWITCHED_BY_SYSTEM])
def test_without_a_system_text(template: str) -> None:
    python, native, note = made(template)
    assert note.endswith("so it takes no --system")
    assert native.chat("hi") == rendered(python, "hi", None)
    with pytest.raises(NativeError, match="leave out --system, or pass --raw"):
        native.chat("hi", "be kind")


def test_a_template_that_refuses_an_empty_system_text() -> None:
    python, native, note = made(NO_EMPTY_SYSTEM)
    assert note == ""
    assert native.chat("hi", "be kind") == rendered(python, "hi", "be kind")
    for blank in ("", " "):
        with pytest.raises(NativeError, match="takes no empty system text here; leave out"):
            native.chat("hi", blank)


@pytest.mark.parametrize("template", [SWITCHED, "{{ messages[0].nothing.at.all }}", "fixed"])
def test_what_is_more_than_pieces(template: str) -> None:
    _, native, note = made(template)
    assert note.startswith("the standalone runner: ")
    assert note.endswith("so it takes --raw alone")
    with pytest.raises(NativeError, match="pass --raw"):
        native.chat("hi")


def test_no_template() -> None:
    python = tiny_tokenizers.wrap(tiny_tokenizers.byte_level())
    written = build_tokenizer_file(python)
    assert "no chat template" in written.note
