"""Grammars and tool calls with SmolLM2: the answer always follows."""

import json
import re

import jsonschema
import pytest

from pykvq import InvalidArgumentError
from pykvq.constraint import lark_constraint, regex_constraint

USER = [{"role": "user", "content": "Tell me about Ann, who is 31 years old and lives in Ulm."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "ü", "c"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_age",
            "parameters": {
                "type": "object",
                "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
                "required": ["age"],
                "additionalProperties": False,
            },
        },
    },
]


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_follows_its_schema_at_any_temperature(llm, seed):
    response = llm.create_chat_completion(
        USER, response_format={"type": "json_object", "schema": SCHEMA}, temperature=1.5, top_p=1, seed=seed
    )
    choice = response["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_a_cut_answer_is_reported_as_length(llm):
    values = {"response_format": {"type": "json_object", "schema": SCHEMA}, "temperature": 0}
    whole = llm.create_chat_completion(USER, **values)["choices"][0]["message"]["content"]
    cut = llm.create_chat_completion(USER, max_tokens=5, **values)["choices"][0]
    assert cut["finish_reason"] == "length"
    assert whole.startswith(cut["message"]["content"])


def test_a_stream_of_json_is_the_same(llm):
    values = {"response_format": {"type": "json_object", "schema": SCHEMA}, "temperature": 0}
    whole = llm.create_chat_completion(USER, **values)["choices"][0]["message"]["content"]
    chunks = llm.create_chat_completion(USER, stream=True, **values)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "yes" | "no"', "yes|no"),
        ('root ::= [a-c] [a-c]? "-" digit digit\ndigit ::= [0-9]', "[a-c]{1,2}-[0-9]{2}"),
        (regex_constraint(r"[A-Z]{3}-\d{4}"), r"[A-Z]{3}-\d{4}"),
        (lark_constraint('start: "<" WORD ">"\nWORD: /[a-zäöü]{2,9}/'), "<[a-zäöü]{2,9}>"),
    ],
)
def test_other_grammars(llm, grammar, pattern):
    for seed in range(3):
        text = llm("Answer:", grammar=grammar, temperature=1.5, seed=seed, max_tokens=60)["choices"][0]["text"]
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"grammar": "root ::= missing"}, "grammar is not valid"),
        ({"grammar": "start: )("}, "grammar is not valid"),
        ({"response_format": {"type": "json_object", "schema": {"type": "nonsense"}}}, "JSON schema is not valid"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "has no schema"),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS}, "cannot be combined with tools"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "cannot be combined"),
    ],
)
def test_wrong_grammars_are_refused_before_anything_is_computed(llm, values, text):
    with pytest.raises(InvalidArgumentError, match=text):
        llm.create_chat_completion(USER, **values)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_age"}}])
def test_required_calls_are_calls(llm, choice):
    values = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(3):
        answer = llm.create_chat_completion(USER, temperature=1.5, seed=seed, **values)["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["content"] is None
        (call,) = answer["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), TOOLS[0]["function"]["parameters"])


def test_parallel_calls_may_be_several(llm):
    answer = llm.create_chat_completion(USER, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=100)
    assert len(answer["choices"][0]["message"]["tool_calls"]) >= 1


def test_the_older_function_call(llm):
    functions = [TOOLS[0]["function"]]
    choice = llm.create_chat_completion(USER, functions=functions, function_call={"name": "set_age"})["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "set_age"


def test_tool_choice_none_is_text(llm):
    plain = llm.create_chat_completion(USER, temperature=0, max_tokens=16)
    none = llm.create_chat_completion(USER, temperature=0, max_tokens=16, tools=TOOLS, tool_choice="none")
    assert none["choices"] == plain["choices"]


def test_a_schema_that_is_nested_too_deeply_is_refused(llm):
    schema = {"type": "integer"}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidArgumentError, match="nested too deeply"):
        llm.create_chat_completion(USER, response_format={"type": "json_object", "schema": schema}, max_tokens=4)
