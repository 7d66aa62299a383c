"""Chat templates render as transformers renders them."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pykvq.chat_template import ChatTemplate

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TOOLS_AND_LOOPS = """{%- if tools %}
    {{- '# Tools\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- "\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "skip" %}
        {%- continue %}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' + call.function.name + (call.function.arguments | tojson(indent=2)) + '</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {% generation %}{{ message.role }}: {{ message.content | trim }}{% endgeneration %}
    {%- endif %}
    {% if loop.last %}
        {% break %}
    {% endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{{ strftime_now("%Y") }}
"""
TOOLS = [{"type": "function", "function": {"name": "grüße", "parameters": {"type": "object", "x": "<&'>"}}}]
CHATS = [
    [{"role": "user", "content": "Hi <b>'there'</b> & you"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello 你好 "},
        {"role": "assistant", "content": "Hi\n"},
        {"role": "user", "content": "Bye"},
    ],
]
CALLS = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, "é"]}}}]},
    {"role": "tool", "content": "ok"},
]


def by_transformers(template, chat, **values):
    rendered, _ = render_jinja_template([chat], chat_template=template, bos_token="<s>", eos_token="</s>", **values)
    return rendered[0]


@pytest.mark.parametrize("template", [CHATML, LLAMA_2, TOOLS_AND_LOOPS])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats(template, chat, add_generation_prompt):
    own = ChatTemplate(template, bos_token="<s>", eos_token="</s>")
    assert own.render(chat, add_generation_prompt=add_generation_prompt) == by_transformers(
        template, chat, add_generation_prompt=add_generation_prompt
    )


def test_tools_calls_and_variables():
    own = ChatTemplate(TOOLS_AND_LOOPS, bos_token="<s>", eos_token="</s>")
    values = {"tools": TOOLS, "add_generation_prompt": True, "enable_thinking": False}
    assert own.render(CALLS, **values) == by_transformers(TOOLS_AND_LOOPS, CALLS, **values)
