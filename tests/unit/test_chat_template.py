import json

import pytest

from pykvq import ChatTemplateError, InvalidArgumentError
from pykvq.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]


def render(source, messages=USER, **variables):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **variables)


def test_special_tokens_and_generation_prompt():
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{% if add_generation_prompt %}A:{% endif %}"
    assert render(source) == "<s>Hi</s>A:"
    assert render(source, add_generation_prompt=False) == "<s>Hi</s>"


def test_blocks_are_trimmed_as_in_transformers():
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}"
    assert render(source) == "user\n"


def test_loop_controls_and_generation_blocks():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source, USER * 2) == "Hi"


def test_tojson_does_not_escape_for_html():
    tools = [{"name": "f", "text": "a < b & 'c' 你"}]
    text = render("{{ tools | tojson }}", tools=tools)
    assert "< b & 'c' 你" in text
    assert json.loads(text) == tools
    assert render("{{ tools | tojson(indent=2) }}", tools=tools).startswith("[\n  {")


def test_tools_documents_and_other_variables():
    source = "{{ tools is none }} {{ documents is none }} {{ enable_thinking }}"
    assert render(source, enable_thinking=False) == "True True False"


def test_strftime_now():
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


def test_a_template_that_raises():
    with pytest.raises(ChatTemplateError, match="refuses these messages: roles must alternate") as caught:
        render("{{ raise_exception('roles must\nalternate') }}")
    assert "\n" not in str(caught.value)


def test_a_template_that_fails():
    with pytest.raises(ChatTemplateError, match="TypeError"):
        render("{{ messages[0].content + 3 }}")


def test_a_template_that_cannot_be_parsed():
    with pytest.raises(ChatTemplateError, match="cannot be parsed"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% for i in range(10**9) %}x{% endfor %}"],
)
def test_the_sandbox_holds(source):
    with pytest.raises(ChatTemplateError):
        render(source)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "at least one dict"),
        ("hello", "at least one dict"),
        ({"role": "user"}, "at least one dict"),
        (["hello"], r"messages\[0\] must be a dict"),
        ([*USER, {"content": "x"}], r"messages\[1\] needs a 'role'"),
        ([{"role": "user"}], "has no 'content'"),
        ([{"role": "user", "content": 3}], "must be text, got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text parts are supported, got 'image_url'"),
    ],
)
def test_wrong_messages(messages, text):
    with pytest.raises(InvalidArgumentError, match=text):
        render("x", messages)


def test_an_assistant_message_with_tool_calls_needs_no_content():
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert render("{{ messages[0].tool_calls[0].name }}", [message]) == "f"
