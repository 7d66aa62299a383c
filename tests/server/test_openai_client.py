"""The official client against the server, with SmolLM2."""

import json

import jsonschema
import openai
import pytest

USER = [{"role": "user", "content": "Name three colours."}]
GREEDY = {"model": "smol", "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_a_chat_and_its_stream_agree(openai_client):
    whole = openai_client.chat.completions.create(messages=USER, max_tokens=24, **GREEDY)
    assert whole.model == "smol"
    assert whole.usage.completion_tokens <= 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = openai_client.chat.completions.create(
        messages=USER, max_tokens=24, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_completions(openai_client):
    values = {"max_tokens": 6, **GREEDY}
    first = openai_client.completions.create(prompt="The capital of France is", **values)
    assert first.choices[0].text.startswith(" Paris")
    both = openai_client.completions.create(prompt=["The capital of France is", "One, two,"], **values)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == first.choices[0].text
    assert both.usage.prompt_tokens > first.usage.prompt_tokens
    echoed = openai_client.completions.create(prompt="One, two,", echo=True, logprobs=2, **values)
    assert echoed.choices[0].text.startswith("One, two,")
    assert len(echoed.choices[0].logprobs.tokens) == 4 + 6


def test_several_choices_differ_by_seed(openai_client):
    values = {"model": "smol", "temperature": 1.5, "max_tokens": 12, "n": 3, "seed": 7, "messages": USER}
    answers = [choice.message.content for choice in openai_client.chat.completions.create(**values).choices]
    assert len(set(answers)) == 3
    texts = ["", "", ""]
    for chunk in openai_client.chat.completions.create(stream=True, **values):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert all(texts)


def test_log_probabilities_of_a_chat(openai_client):
    values = {"messages": USER, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, **GREEDY}
    content = openai_client.chat.completions.create(**values).choices[0].logprobs.content
    assert len(content) == 3
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in content)


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_json(openai_client, kind):
    schema = {"json_schema": {"name": "person", "schema": SCHEMA, "strict": True}} if kind == "json_schema" else {}
    response = openai_client.chat.completions.create(
        messages=[{"role": "user", "content": "Describe Ann, who is 31, as JSON with name and age."}],
        response_format={"type": kind, **schema},
        max_tokens=120,
        **GREEDY,
    )
    choice = response.choices[0]
    if choice.finish_reason == "length":
        assert kind == "json_object"  # of any length, as the model likes
        return
    value = json.loads(choice.message.content)
    if kind == "json_schema":
        jsonschema.validate(value, SCHEMA)


def test_json_that_is_cut_is_reported(openai_client):
    response = openai_client.chat.completions.create(
        messages=USER,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        max_tokens=3,
        **GREEDY,
    )
    assert response.choices[0].finish_reason == "length"
    assert response.choices[0].message.content.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_required_tools(openai_client, choice):
    values = {
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 80,
        **GREEDY,
    }
    whole = openai_client.chat.completions.create(**values).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    calls = [
        call
        for chunk in openai_client.chat.completions.create(stream=True, **values)
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert [(each.index, each.function.arguments) for each in calls] == [(0, call.function.arguments)]


def test_the_result_of_a_call_goes_back_to_the_model(openai_client):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees and rain"},
    ]
    response = openai_client.chat.completions.create(messages=messages, tools=[WEATHER], max_tokens=20, **GREEDY)
    assert response.choices[0].message.content or response.choices[0].message.tool_calls


def test_embeddings(openai_client):
    texts = ["A cat sat on the mat.", "A kitten sat on the rug.", "Interest rates rose by two percent."]
    response = openai_client.embeddings.create(model="smol", input=texts)
    a, b, c = (entry.embedding for entry in response.data)

    def dot(x, y):
        return sum(p * q for p, q in zip(x, y, strict=True))

    assert dot(a, a) == pytest.approx(1, abs=1e-4)
    assert dot(a, b) > dot(a, c)
    assert response.usage.prompt_tokens > 15


def test_responses(openai_client):
    values = {"model": "smol", "input": "Name three colours.", "instructions": "Be brief.", "temperature": 0}
    whole = openai_client.responses.create(max_output_tokens=24, **values)
    assert whole.output_text
    assert whole.status == ("incomplete" if whole.usage.output_tokens == 24 else "completed")
    with openai_client.responses.stream(max_output_tokens=24, **values) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


def test_responses_with_a_function(openai_client):
    tool = {"type": "function", **WEATHER["function"]}
    values = {"model": "smol", "tools": [tool], "tool_choice": "required", "temperature": 0, "max_output_tokens": 80}
    whole = openai_client.responses.create(input="What is the weather in Paris?", parallel_tool_calls=False, **values)
    (item,) = whole.output
    assert (item.type, item.name) == ("function_call", "get_weather")
    conversation = [
        {"role": "user", "content": [{"type": "input_text", "text": "What is the weather in Paris?"}]},
        {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": item.arguments},
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"},
    ]
    answer = openai_client.responses.create(model="smol", input=conversation, max_output_tokens=8, temperature=0)
    assert answer.output_text


def test_models(openai_client):
    (model,) = openai_client.models.list().data
    assert model.id == "smol"
    assert model.meta["n_ctx"] == 1024
    assert openai_client.models.retrieve("smol").owned_by == "pykvq"


def test_errors_are_the_clients_own_classes(openai_client):
    with pytest.raises(openai.NotFoundError) as missing:
        openai_client.chat.completions.create(model="gpt-9", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        openai_client.completions.create(model="smol", prompt="word " * 2000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        openai_client.chat.completions.create(model="smol", messages=USER, temperature=-1)
    assert wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.AuthenticationError):
        openai_client.with_options(api_key="wrong").models.list()
