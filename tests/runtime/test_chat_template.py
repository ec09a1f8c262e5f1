"""Chat templates: equal to transformers' rendering, sandboxed, and clear about what is wrong."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest

from bessemer.errors import BessemerError, UsageError
from bessemer.runtime.chat_template import ChatTemplateError, render, select_template
from bessemer.runtime.tokenizer import Tokenizer

from . import tiny_tokenizers as tiny

BOS, EOS = "<|bos|>", "<|end|>"

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# As Llama 2: BOS first, the system message inside the first user message, roles must alternate.
LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}
  {%- set rest = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}
  {%- set rest = messages %}{% set system = false %}
{% endif %}
{% for message in rest %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {% endif %}
  {% if loop.index0 == 0 and system != false %}
    {%- set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}
  {% else %}
    {%- set content = message['content'] %}
  {% endif %}
  {% if message['role'] == 'user' %}
    {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
  {% elif message['role'] == 'assistant' %}
    {{- ' ' + content.strip() + ' ' + eos_token }}
  {% endif %}
{% endfor %}
"""

# As Llama 3: a date, tools as JSON, header tokens, and the BOS only on the first message.
LLAMA3 = """\
{%- set date = strftime_now('%Y') if strftime_now is defined else 'never' %}
{%- for message in messages %}
  {%- set content = '<|start|>' + message.role + '<|stop|>\n\n' + message.content | trim %}
  {%- set content = content + '<|eot|>' %}
  {%- if loop.first %}{% set content = bos_token + content + date %}{% endif %}
  {{- content }}
{%- endfor %}
{%- if tools is not none and tools %}
  {{- '<tools>' }}
  {%- for tool in tools %}{{ tool | tojson(indent=2) }}{{ ',' if not loop.last }}{% endfor %}
  {{- '</tools>' }}
{%- endif %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif -%}
"""

# As Gemma: no system role, "assistant" is called "model".
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

# As DeepSeek R1: a namespace, full-width bars, and the reasoning cut off from earlier answers.
DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(system='', first=true) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system = ns.system + ('' if ns.first else '\n\n') + message['content'] %}
{%- set ns.first = false %}{%- endif %}{%- endfor %}
{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}
{%- endfor %}
{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}
"""

# As Qwen 3 and SmolLM3: reasoning, tool calls, a macro, break and continue, a generation block.
TOOLS = """\
{%- macro call(tool) %}<call>{{ tool.name }}({{ tool.arguments | tojson }})</call>{% endmacro %}
{%- for message in messages %}
  {%- if message.role == 'skip' %}{% continue %}{% endif %}
  {%- if message.role == 'end' %}{% break %}{% endif %}
  {%- if message.role == 'assistant' %}
    {%- generation %}
    {%- set seen = true %}
    {%- if message.reasoning_content is defined %}
    {{- '<think>' + message.reasoning_content + '</think>' }}{% endif %}
    {{- message.content if message.content else 'NONE' }}
    {%- for tool in message.tool_calls or [] %}{{ call(tool.function) }}{% endfor %}
    {{- eos_token }}
    {%- endgeneration %}
    {{- 'leaked' if seen is defined }}
  {%- else %}
    {{- message.role }}: {{ message.content }}
  {%- endif %}
{% endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{{- documents }}{{ pad_token if pad_token is defined else 'no pad' }}
"""

TALK = [
    {"role": "user", "content": " What is 1 < 2 & 'so'? "},
    {"role": "assistant", "content": '<think>hm</think>Yes "é".'},
    {"role": "user", "content": "Why?\n"},
]
SYSTEM_TALK = [{"role": "system", "content": "Be brief."}, *TALK]
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "skip", "content": "never shown"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "use the tool",
        "tool_calls": [{"function": {"name": "get", "arguments": {"a": ["<b>", 1, None, 2.5]}}}],
    },
    {"role": "assistant", "content": "Rain.", "thinking": "so"},
    {"role": "end", "content": ""},
    {"role": "user", "content": "never shown"},
]
TOOL = {"type": "function", "function": {"name": "get", "description": "<é> & 'x'"}}


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny.byte_level(), bos_token=BOS, eos_token=EOS
    )


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (CHATML, TALK),
        (CHATML, SYSTEM_TALK),
        (LLAMA2, TALK),
        (LLAMA2, SYSTEM_TALK),
        (LLAMA3, SYSTEM_TALK),
        (GEMMA, TALK),
        (DEEPSEEK, TALK),
        (DEEPSEEK, [*SYSTEM_TALK, {"role": "system", "content": "again"}]),
        (TOOLS, TOOL_TALK),
    ],
)
@pytest.mark.parametrize("extra", [{}, {"tools": [TOOL, TOOL]}, {"enable_thinking": False}])
def test_equals_transformers(
    theirs: Any, template: str, messages: list[Any], prompt: bool, extra: dict[str, Any]
) -> None:
    expected = theirs.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=prompt, **extra
    )
    ours = render(
        template,
        messages,
        add_generation_prompt=prompt,
        bos_token=BOS,
        eos_token=EOS,
        **extra,
    )
    assert ours == expected


def test_the_text_itself() -> None:
    assert render(CHATML, TALK[:1]) == (
        "<|im_start|>user\n What is 1 < 2 & 'so'? <|im_end|>\n<|im_start|>assistant\n"
    )
    rendered = render(LLAMA3, TALK[:1], bos_token=BOS, tools=[TOOL])
    assert rendered.startswith(f"{BOS}<|start|>user")
    assert f"{datetime.now():%Y}" in rendered
    assert "\"<é> & 'x'\"" in rendered  # neither HTML nor ASCII escapes


def test_a_real_template(smollm2: Tokenizer) -> None:
    rendered = render(
        smollm2.chat_template,
        [{"role": "user", "content": "What is the capital of France?"}],
        bos_token=smollm2.bos_token,
        eos_token=smollm2.eos_token,
    )
    assert rendered.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.encode_chat(rendered)
    assert ids[0] == smollm2.token_id("<|im_start|>")
    assert smollm2.decode(ids, skip_special=False) == rendered


def test_t06_one_bos_from_template_and_tokenizer() -> None:
    tokenizer = tiny.wrap(tiny.sentencepiece(), bos_token="<s>", eos_token="</s>")
    rendered = render(GEMMA, TALK[:1], bos_token=tokenizer.bos_token)
    assert rendered.startswith("<s>")
    for ids in (tokenizer.encode(rendered), tokenizer.encode_chat(rendered)):
        assert ids[0] == tokenizer.bos_id
        assert ids.count(1) == 1


def test_an_absent_bos_is_undefined() -> None:
    template = "{{ 'none' if bos_token is not defined else bos_token }}"
    assert render(template, TALK) == "none"
    assert render(template, TALK, bos_token="<s>") == "<s>"


# -- which template ----------------------------------------------------------------------------


def test_several_templates() -> None:
    several = {"default": "D", "tool_use": "T"}
    assert render(several, TALK) == "D"
    assert render(several, TALK, tools=[TOOL]) == "T"
    assert select_template({"default": "D"}, [TOOL]) == "D"
    with pytest.raises(ChatTemplateError, match=r"\(a, b\)"):
        render({"b": "B", "a": "A"}, TALK)


@pytest.mark.parametrize("template", [None, "", {}])
def test_no_template(template: Any) -> None:
    with pytest.raises(BessemerError, match=r"no chat template.*--raw"):
        render(template, TALK)


# -- what goes wrong ---------------------------------------------------------------------------


def test_a_template_that_refuses() -> None:
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        render(GEMMA, SYSTEM_TALK, bos_token=BOS)
    with pytest.raises(ChatTemplateError, match="must alternate"):
        render(LLAMA2, [TALK[0], TALK[0]], bos_token=BOS, eos_token=EOS)


def test_a_broken_template() -> None:
    with pytest.raises(ChatTemplateError, match="syntax error in line 2"):
        render("\n{% if %}", TALK)
    with pytest.raises(ChatTemplateError, match="TypeError"):
        render("{{ messages[0].content + 1 }}", TALK)
    with pytest.raises(ChatTemplateError, match=r"lack.*nothing"):
        render("{{ messages[0].nothing.at.all }}", TALK)
    with pytest.raises(ChatTemplateError, match="syntax error"):
        render("{% generation %}never closed", TALK)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    messages = [dict(TALK[0])]
    with pytest.raises(ChatTemplateError):
        render(template, messages)
    assert messages == [TALK[0]]


def test_objects_don_t_reach_the_template() -> None:
    with pytest.raises(UsageError, match=r"messages\[0\]\['content'\] is of type PurePosixPath"):
        render(CHATML, [{"role": "user", "content": PurePosixPath("/")}])
    number = [{"role": "user", "content": "x", "mood": np.float32(2.5)}]
    assert render("{{ messages[0].mood | tojson }}", number) == json.dumps(2.5)


@pytest.mark.parametrize(
    "messages",
    [[], "hello", {"role": "user"}, ["hello"], [{"content": "x"}], [{"role": 3, "content": "x"}]],
)
def test_messages_that_are_none(messages: Any) -> None:
    with pytest.raises(UsageError, match="messages"):
        render(CHATML, messages)
