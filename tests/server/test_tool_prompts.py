"""How often Qwen2.5-Coder-0.5B makes the right call, by KV format."""

import json

import jsonschema
import pytest
from langchain_openai import ChatOpenAI

from pykvq import Llama
from server.conftest import running_server
from server.tool_prompts import PROMPTS, TOOLS, is_right

SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@pytest.fixture(scope="module")
def passed(qwen_path):
    """Right calls by KV format."""
    return {kv: count_right(qwen_path, kv) for kv in ("f16", "q8_0", "ultra4")}


def count_right(path, kv):
    n_right = 0
    with Llama(path, kv_quant=kv, n_ctx=2048, calibrate="auto") as llm:
        for prompt, name, check in PROMPTS:
            messages = [{"role": "user", "content": prompt}]
            answer = llm.create_chat_completion(messages, tools=TOOLS, temperature=0, max_tokens=128)
            message = answer["choices"][0]["message"]
            n_right += is_right(message, name, check)
            for call in message.get("tool_calls") or []:
                function = call["function"]
                jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
    return n_right


@pytest.mark.slow
def test_most_requests_are_answered_by_the_right_call(passed):
    print("\n" + " | ".join(f"{kv} {n}/{len(PROMPTS)}" for kv, n in passed.items()))
    assert passed["f16"] >= 0.75 * len(PROMPTS)


@pytest.mark.slow
def test_ultra4_is_at_most_one_behind_f16(passed):
    assert passed["ultra4"] >= passed["f16"] - 1


@pytest.fixture(scope="module")
def chat(qwen_path):
    with running_server({"qwen": qwen_path}, kv_quant="ultra4", n_ctx=2048) as (url, _):
        yield ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="qwen", temperature=0, max_tokens=128)


def test_the_model_calls_a_tool_by_itself_and_uses_the_result(chat):
    bound = chat.bind_tools(TOOLS)
    question = ("user", "What is the weather in Paris?")
    answer = bound.invoke([question])
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    final = bound.invoke(
        [question, answer, {"role": "tool", "tool_call_id": call["id"], "content": "18 degrees, rain"}]
    )
    assert "18" in final.text


def test_streamed_calls_are_the_same(chat):
    bound = chat.bind_tools(TOOLS)
    whole = None
    for chunk in bound.stream("Multiply 6 by 7."):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("multiply", {"a": 6, "b": 7})]
