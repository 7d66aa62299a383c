"""Reading tool calls out of answers, and telling models about tools."""

import json
import time

import pytest

from pykvq import InvalidArgumentError
from pykvq.tool_calls import HERMES, LLAMA_3, MISTRAL, ToolCallParser, tool_format
from pykvq.tool_choice import tool_use, with_parsed_arguments, with_tool_prompt

NAMES = ("add", "get_weather")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]


def read(format, text, size=None, required=False):
    """Content and calls of an answer that comes in pieces of ``size`` characters."""
    parser = ToolCallParser(format, NAMES, required=required)
    size = size or len(text) or 1
    parts = [parser.push(text[i : i + size]) for i in range(0, len(text), size)] + [parser.finish()]
    calls = [(call.name, json.loads(call.arguments)) for _, found in parts for call in found]
    return "".join(content for content, _ in parts), calls


CASES = [
    (HERMES, "Just text.", ("Just text.", [])),
    (HERMES, "", ("", [])),
    (
        HERMES,
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        ("", [("add", {"a": 1})]),
    ),
    (
        HERMES,
        'Let me see. <tool_call>{"name": "add", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Ulm"}}</tool_call>\n',
        ("Let me see. ", [("add", {}), ("get_weather", {"city": "Ulm"})]),
    ),
    (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}', ("", [("add", {"a": 1})])),
    (HERMES, "<tool_call>\n{broken}\n</tool_call>", ("<tool_call>\n{broken}\n</tool_call>", [])),
    (HERMES, "a < b and <tool_box>", ("a < b and <tool_box>", [])),
    (HERMES, '<tool_call>[{"name": "add", "arguments": {}}]</tool_call>', ("", [("add", {})])),
    (HERMES, '{"name": "add", "arguments": {"a": 2}}', ("", [("add", {"a": 2})])),
    (HERMES, '```json\n{"name": "add", "arguments": {"a": 2}}\n```', ("", [("add", {"a": 2})])),
    (HERMES, '{"name": "other", "arguments": {}}', ('{"name": "other", "arguments": {}}', [])),
    (HERMES, '{"colour": "red"}', ('{"colour": "red"}', [])),
    (HERMES, "```python\nprint(1)\n```", ("```python\nprint(1)\n```", [])),
    (
        HERMES,
        "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\nfour\n</parameter>\n"
        "</function>\n</tool_call>",
        ("", [("add", {"a": 3, "b": "four"})]),
    ),
    (LLAMA_3, '{"name": "add", "parameters": {"a": 1}}', ("", [("add", {"a": 1})])),
    (
        LLAMA_3,
        '{"name": "add", "parameters": {}}; {"name": "get_weather", "parameters": {}}',
        ("", [("add", {}), ("get_weather", {})]),
    ),
    (MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', ("", [("add", {"a": 1})])),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}', ("", [("add", {"a": 1})])),
]


@pytest.mark.parametrize("size", [None, 1, 3, 7])
@pytest.mark.parametrize(("format", "text", "expected"), CASES)
def test_calls_are_told_from_text(format, text, expected, size):
    assert read(format, text, size) == expected


HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1}}; '
MISTRAL_CALLS = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, '


@pytest.mark.parametrize("size", [None, 1, 5])
@pytest.mark.parametrize("cut", ["", "<tool", '{"na', '{"name": "add", "arguments": {"a'])
@pytest.mark.parametrize(("format", "first"), [(HERMES, HERMES_CALL), (LLAMA_3, LLAMA_CALL), (MISTRAL, MISTRAL_CALLS)])
def test_a_required_call_that_was_cut_is_no_text(format, first, cut, size):
    second = "<tool_call>\n" + cut if format is HERMES and cut != "<tool" else cut
    assert read(format, first + second, size, required=True) == ("", [("add", {"a": 1})])


def test_a_required_call_of_many_brackets_is_text():
    text = '[{"a":' * 100_000
    assert read(LLAMA_3, text, required=True) == (text, [])


def test_a_first_call_that_was_cut_is_shown():
    assert read(HERMES, '<tool_call>\n{"na', required=True) == ('<tool_call>\n{"na', [])


@pytest.mark.parametrize("text", ["[" * 200_000, '[{"a":' * 100_000, "[] " * 200_000])
def test_many_brackets_are_text_and_take_little_time(text):
    started = time.process_time()
    assert read(LLAMA_3, text) == (text, [])
    assert time.process_time() - started < 30  # what is quadratic in these takes minutes


def test_text_is_not_held_back_longer_than_needed():
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push("Hello") == ("Hello", [])
    assert parser.push(" <to") == (" ", [])
    assert parser.push("ne>") == ("<tone>", [])
    assert ToolCallParser(HERMES, NAMES).push("```py") == ("```py", [])


def test_the_template_tells_the_format():
    assert tool_format("... [TOOL_CALLS] ...") is MISTRAL
    assert tool_format("{{ Environment: ipython }} <|python_tag|>") is LLAMA_3
    assert tool_format("<tool_call>") is HERMES
    assert tool_format(None) is HERMES


@pytest.mark.parametrize(
    ("tools", "choice", "text"),
    [
        ([{"type": "web_search"}], None, r"tools\[0\] must be"),
        ([{"type": "function", "function": {}}], None, "no function name"),
        ([{"function": {"name": "x", "parameters": 3}}], None, "must be a JSON schema"),
        (TOOLS, "always", "tool_choice must be"),
        (TOOLS, {"type": "function", "function": {"name": "nothing"}}, "names 'nothing'"),
        (None, "required", "needs tools"),
    ],
)
def test_wrong_tools_are_refused(tools, choice, text):
    with pytest.raises(InvalidArgumentError, match=text):
        tool_use(tools, choice)


def test_the_choice():
    assert tool_use(TOOLS, "none") is None
    assert tool_use(None, "auto") is None
    assert not tool_use(TOOLS, None).required
    assert tool_use(TOOLS, "required").names == NAMES
    chosen = tool_use(TOOLS, {"type": "function", "function": {"name": "add"}})
    assert (chosen.names, chosen.required, chosen.parallel) == (("add",), True, False)


def test_messages_for_a_template_without_tools():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = with_parsed_arguments(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "1"},
        ]
    )
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    system, assistant, result = with_tool_prompt(messages, tool_use(TOOLS, None))
    assert system["content"].startswith("Be brief.\n\n")
    assert '"name": "get_weather"' in system["content"]
    assert assistant["content"] == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert result == {"role": "user", "content": "<tool_response>\n2\n</tool_response>"}
    with pytest.raises(InvalidArgumentError, match=r"messages\[0\]: the arguments of 'add' are not JSON"):
        with_parsed_arguments([{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}])
