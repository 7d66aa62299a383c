"""The server as any HTTP client sees it: errors, limits, streams, and the endpoints that are not OpenAI's."""

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from pykvq.errors import ChatTemplateError
from pykvq.server.errors import api_error
from server.conftest import API_KEY, running_server, wait_until

USER = [{"role": "user", "content": "Hello"}]
# never the tokens that end a text
ENDLESS = {"prompt": "Once", "max_tokens": None, "logit_bias": {"2": -100, "0": -100}}


def error_of(response):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": []}, "at least one"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "no 'content'"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "needs a 'role'"),
        ("/v1/chat/completions", {"messages": USER, "temperature": "hot"}, "temperature"),
        ("/v1/chat/completions", {"messages": USER, "temperature": 1e999}, "temperature must be"),
        ("/v1/chat/completions", {"messages": USER, "top_p": 2}, "top_p"),
        ("/v1/chat/completions", {"messages": USER, "n": 0}, "n must be"),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": "many"}, "max_tokens"),
        ("/v1/chat/completions", {"messages": USER, "stop": [""]}, "stop"),
        ("/v1/chat/completions", {"messages": USER, "logit_bias": {"999999": 1}}, "vocabulary"),
        ("/v1/chat/completions", {"messages": USER, "tool_choice": "required"}, "needs tools"),
        ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ("/v1/chat/completions", {"messages": USER, "response_format": {"type": "xml"}}, "response_format"),
        (
            "/v1/chat/completions",
            {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}},
            "JSON schema",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/x"}}]}]},
            "only text parts",
        ),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt is empty"),
        ("/v1/completions", {"prompt": [99999999]}, "vocabulary"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "fill-in-the-middle"),
        ("/v1/completions", {"prompt": "x", "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "no tokens are no answer"),
        ("/v1/completions", {"prompt": ["x"] * 1000}, "answers at once are more than"),
        (
            "/v1/chat/completions",
            {"messages": USER, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs has",
        ),
        ("/v1/completions", {"prompt": "x", "grammar": "root ::= ("}, "grammar"),
        ("/v1/completions", {"prompt": "x", "logprobs": 1000}, "logprobs"),
        ("/v1/embeddings", {"input": []}, "input is empty"),
        ("/v1/embeddings", {"input": ""}, "1 to"),
        ("/v1/embeddings", {"input": "word " * 800}, "1 to 512"),
        ("/v1/embeddings", {"input": "x", "dimensions": 7}, "dimensions"),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "not stored"),
        ("/v1/responses", {"input": [{"type": "image_generation_call"}]}, "only messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_wrong_requests_are_400_and_say_what_is_wrong(http, path, body, text):
    response = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert re.search(text, error["message"] + str(error["param"])), error


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[1]", b'{"messages": [' * 500, b'"text"'])
def test_bad_json_is_400(http, content):
    response = http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("headers", "found"),
    [({}, "missing"), ({"Content-Type": "text/plain"}, "text/plain")],
)
def test_json_without_its_content_type_names_the_header(http, headers, found):
    response = http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 400
    assert error_of(response)["message"] == f"the header Content-Type is {found}: send JSON with application/json"


def test_health_answers_head_too(server):
    for path in ("/health", "/v1/health"):
        response = httpx.head(server[0] + path)
        assert (response.status_code, response.content) == (200, b"")


def test_errors_tell_no_path_of_the_server(http):
    error = error_of(http.post("/v1/completions", json={"prompt": "x", "suffix": "y"}))
    assert "/" not in error["message"]


def test_the_first_embedding_logs_nothing(http, caplog):
    assert http.post("/v1/embeddings", json={"input": "Hello"}).status_code == 200
    assert not [record for record in caplog.records if record.name == "pykvq"]


def test_a_template_that_refuses_is_400_with_its_text():
    error = api_error(ChatTemplateError("the chat template refuses these messages: roles must alternate"))
    assert error.status == 400
    assert error.message.endswith("roles must alternate")


def test_unknown_paths_and_methods(http):
    assert error_of(http.get("/v1/nothing"))["message"] == "Not Found"
    assert http.get("/v1/chat/completions").status_code == 405
    assert http.get("/v1/models/other").status_code == 404
    for path in ("/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2fetc%2fpasswd", "/v1/models//etc/passwd"):
        assert http.get(path).status_code == 404
    assert http.post("/v1/completions", json={"prompt": "x", "model": "/etc/passwd"}).status_code == 404


def test_a_key_is_needed_but_for_health(server):
    url, _ = server
    assert httpx.get(f"{url}/health").json()["status"] == "ok"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": API_KEY}, {"Authorization": "Basic x"}):
        response = httpx.get(f"{url}/v1/models", headers=headers)
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
        assert API_KEY not in response.text


def test_scripts_of_other_origins_are_not_allowed(http):
    headers = {"Origin": "https://example.com", "Access-Control-Request-Method": "POST"}
    response = http.options("/v1/chat/completions", headers=headers)
    assert "access-control-allow-origin" not in response.headers


def test_events_of_a_stream(http):
    body = {"messages": USER, "stream": True, "max_tokens": 4, "temperature": 0}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_tokens(http):
    text = "Hello 你好<|im_end|>"
    tokens = http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
    pieces = http.post("/tokenize", json={"content": "你", "with_pieces": True}).json()["tokens"]
    raw = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert raw.decode() == "你"


def test_kv_and_metrics(http):
    http.post("/v1/completions", json={"prompt": "One, two,", "max_tokens": 2})
    kv = http.get("/kv").json()["models"]["smol"]
    assert kv["tiers"][0]["type_k"] == "f16"
    assert max(kv["slot_tokens"]) > 3
    assert kv["kv_bytes"] > 2**20
    text = http.get("/metrics").text
    assert 'pykvq_generated_tokens_total{model="smol"}' in text
    assert 'pykvq_http_requests_total{path="/v1/completions",status="200"}' in text
    assert 'pykvq_slots{model="smol"} 2.0' in text


def test_a_client_that_goes_away_frees_its_slot(http, stats):
    """Both while the answer streams and while the prompt is computed."""
    before = stats().cancelled
    with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        assert stats().n_busy == 1
    wait_until(lambda: stats().n_busy == 0, 5)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={"prompt": "word " * 900, "max_tokens": 100}, timeout=0.2)
    wait_until(lambda: stats().n_busy == 0 and stats().cancelled == before + 2, 5)
    assert (
        http.post("/v1/completions", json={"prompt": "The capital of France is", "temperature": 0})
        .json()["choices"][0]["text"]
        .startswith(" Paris")
    )


def test_a_full_queue_is_429_and_the_waiting_request_is_served(smollm2_path):
    with running_server({"smol": smollm2_path}, n_slots=1, max_queue=1) as (url, app):
        body = {"prompt": "x", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        llm = app.state.context.registry.entries["smol"].llm
        with ThreadPoolExecutor() as pool:
            with httpx.stream("POST", f"{url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=60) as running:
                lines = running.iter_lines()
                next(lines)
                waiting = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
                wait_until(lambda: llm.stats().n_queued == 1)
                refused = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
                assert refused.status_code == 429
                assert error_of(refused)["code"] == "queue_full"
                assert refused.headers["retry-after"] == "1"
            assert waiting.result().status_code == 200
        assert (llm.stats().n_busy, llm.stats().n_queued) == (0, 0)


def test_an_answer_that_takes_too_long_is_504(smollm2_path):
    with running_server({"smol": smollm2_path}, n_slots=1, request_timeout=0.5) as (url, app):
        response = httpx.post(f"{url}/v1/completions", json=ENDLESS, timeout=60)
        assert response.status_code == 504
        assert error_of(response)["code"] == "deadline_exceeded"
        with httpx.stream("POST", f"{url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=60) as stream:
            lines = [line for line in stream.iter_lines() if line]
        # the status was sent before, so the error is the last event but one
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert app.state.context.registry.entries["smol"].llm.stats().n_busy == 0


def test_large_requests_are_413(smollm2_path):
    with running_server({"smol": smollm2_path}, max_body=1000) as (url, _):
        body = json.dumps({"prompt": "x" * 2000}).encode()
        assert httpx.post(f"{url}/v1/completions", content=body, timeout=60).status_code == 413
        chunked = httpx.post(f"{url}/v1/completions", content=iter([body[:900], body[900:]]), timeout=60)
        assert chunked.status_code == 413
        assert chunked.json()["error"]["code"] == "request_too_large"


def test_curl(server):
    """What shell scripts do."""
    url, _ = server
    command = ["curl", "-sS", f"{url}/v1/chat/completions", "-H", f"Authorization: Bearer {API_KEY}"]
    command += ["-H", "Content-Type: application/json", "-d"]
    body = '{"messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 5%s}'
    answer = json.loads(subprocess.run([*command, body % ""], capture_output=True, check=True, timeout=60).stdout)
    assert answer["choices"][0]["message"]["content"]
    streamed = subprocess.run([*command, body % ', "stream": true'], capture_output=True, check=True, timeout=60).stdout
    assert streamed.endswith(b"data: [DONE]\n\n")
