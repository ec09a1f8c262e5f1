"""Chat templates: a list of messages becomes one prompt, as transformers renders it.

A template is a Jinja program from the model's files, and not trusted: it runs in Jinja's immutable
sandbox and sees plain data only (strings, numbers, lists, dicts). The surroundings that templates
are written for are transformers': `trim_blocks`, `lstrip_blocks`, `{% break %}`,
`{% generation %}`, `raise_exception`, `strftime_now`, and a `tojson` that leaves HTML characters
alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bessemer.arguments import shown
from bessemer.errors import BessemerError, UsageError

if TYPE_CHECKING:
    from bessemer.runtime.tokenizer import Tokenizer

# The names under which clients pass a model's reasoning; templates read the first.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# Roles whose messages are nothing without content; an answer may be a call of a tool alone.
ASKING = ("system", "user")
# Templates that are kept compiled. A process serves one model, seldom two.
CACHED_TEMPLATES = 16


class ChatTemplateError(BessemerError):
    """A chat template is missing or broken, or refuses the messages."""


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training.

    Rendering shows the body; what it sets is not seen outside.
    """

    tags = {"generation"}  # noqa: RUF012 (the type that Jinja declares)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=CACHED_TEMPLATES)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the model's chat template has a syntax error in line {error.lineno}: "
            f"{error.message}. Pass --raw to go without it"
        ) from None


def select_template(
    template: str | Mapping[str, str] | None, tools: Sequence[Any] | None = None
) -> str:
    """The source to use: of several, `tool_use` when there are tools, else `default`.

    Raises ChatTemplateError when there is none, or none by these names.
    """
    if isinstance(template, Mapping) and template:
        if tools is not None and "tool_use" in template:
            return template["tool_use"]
        if "default" in template:
            return template["default"]
        names = ", ".join(sorted(template))
        raise ChatTemplateError(
            f"the model has several chat templates ({names}) and none is called 'default'; choose "
            "one, or pass --raw to send the text as it is"
        )
    if not template:
        raise ChatTemplateError(
            "the model has no chat template, so it can't hold a conversation; pass --raw to send "
            "the text as it is"
        )
    assert isinstance(template, str)
    return template


def _plain(value: Any, where: str) -> Any:
    """A copy of `value` in plain data, so that a template gets no object with methods."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {
            _plain(key, where): _plain(item, f"{where}[{key!r}]") for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a NumPy scalar
        return _plain(value.item(), where)
    raise UsageError(
        f"{where} is of type {type(value).__name__}; a chat template takes text, numbers, lists "
        "and dicts"
    )


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked, plain copies of the messages.

    Keys that hold None are left out (templates test for the key), and reasoning is put under the
    names that templates read.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError("messages must be a list of dicts with 'role' and 'content'")
    if not messages:
        raise UsageError("there are no messages; a conversation needs at least one")
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f"{where} is {shown(message)}; it must be a dict with a 'role'")
        plain = {k: v for k, v in _plain(message, where).items() if v is not None}
        _check_content(plain, where)
        reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
        if reasoning is not None:
            plain.setdefault("thinking", reasoning)
            plain["reasoning_content"] = reasoning
        checked.append(plain)
    return checked


def _check_content(message: Mapping[str, Any], where: str) -> None:
    """Templates join what they get with text; a wrong type would fail inside them, or be shown."""
    content = message.get("content")
    if isinstance(content, (str, list)) or (content is None and message["role"] not in ASKING):
        return
    found = "no 'content'" if content is None else f"the content {shown(content)}"
    raise UsageError(f"{where} has {found}; it must be text, or a list of parts")


def render(
    template: str | Mapping[str, str] | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str | None = None,
    eos_token: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    clock: Callable[[str], str] | None = None,
    **variables: Any,
) -> str:
    """The prompt for `messages`, special tokens written out; encode it with `encode_chat`.

    template: Jinja source, or name to source. add_generation_prompt: end with the opening of the
    assistant's turn. tools: JSON schemas. variables: further names that the template may read
    (`enable_thinking`, `pad_token`, ...). A BOS or EOS that is None is undefined in the template.
    clock: what gives the present time in a format of strftime, instead of the system's.

    Raises ChatTemplateError when the template is missing, broken, or refuses the messages
    (`raise_exception`), and UsageError for messages that are none.
    """
    if tools is not None and (isinstance(tools, str) or not isinstance(tools, Sequence)):
        raise UsageError(f"tools is {shown(tools)}; it must be a list of JSON schemas")
    source = select_template(template, tools)
    plain_messages = _messages(messages)
    named = {"bos_token": bos_token, "eos_token": eos_token}
    context: dict[str, Any] = {k: value for k, value in named.items() if value is not None}
    context.update({key: _plain(value, key) for key, value in variables.items()})
    if clock is not None:
        context["strftime_now"] = clock
    compiled = _compile(source)
    try:
        return compiled.render(
            messages=plain_messages,
            tools=_plain(tools, "tools"),
            documents=context.pop("documents", None),
            add_generation_prompt=add_generation_prompt,
            **context,
        )
    except jinja2.exceptions.SecurityError as error:
        raise ChatTemplateError(
            f"the model's chat template does something that is not allowed: {error}"
        ) from None
    except jinja2.UndefinedError as error:
        raise ChatTemplateError(
            f"the model's chat template reads something that these messages lack: {error}"
        ) from None
    except jinja2.TemplateError as error:
        raise ChatTemplateError(
            f"the model's chat template refuses these messages: {error}"
        ) from None
    except Exception as error:  # a template may fail in any way that Python can
        raise ChatTemplateError(
            f"the model's chat template fails on these messages: {type(error).__name__}: {error}"
        ) from None


def encode_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """The token ids of a conversation by the template of its tokenizer, up to the answer.

    Raises as `render`.
    """
    text = render(
        tokenizer.chat_template,
        messages,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        tools=tools,
    )
    return tokenizer.encode_chat(text)
