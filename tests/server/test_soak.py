"""Many clients for a long time: nothing crashes, leaks, mixes or is left over.

PYKVQ_SOAK_SECONDS sets how long (600).
"""

import contextlib
import json
import os
import random
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest
from greedy import TIE_LOGITS, worst_gap

from pykvq import Llama
from server.conftest import running_server, wait_until

SECONDS = float(os.environ.get("PYKVQ_SOAK_SECONDS", "600"))
N_CLIENTS, N_SLOTS = 8, 4
QUESTIONS = [
    "Name three colours.",
    "What is 2+2?",
    "Say hello.",
    "Who wrote Hamlet?",
    "Count to five.",
    "Why is the sky blue?",
]


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Client(threading.Thread):
    """Chats, and does what clients should not do, until it is told to stop."""

    def __init__(self, url, seed, end):
        super().__init__()
        self.url = url
        self.random = random.Random(seed)
        self.end = end
        self.answers = []  # (messages, tokens as bytes)
        self.counts = dict.fromkeys(("chat", "leave_stream", "leave_prompt", "too_long", "bad_json", "hang_up"), 0)
        self.error = None

    def run(self):
        try:
            with httpx.Client(base_url=self.url, timeout=120) as http:
                while time.monotonic() < self.end:
                    kinds = ["chat"] * 5 + list(self.counts)
                    kind = self.random.choice(kinds)
                    getattr(self, kind)(http)
                    self.counts[kind] += 1
        except Exception as error:
            self.error = error

    def body(self, **values):
        messages = [{"role": "user", "content": self.random.choice(QUESTIONS)}]
        return {"messages": messages, "temperature": 0, "max_tokens": 24, **values}

    def chat(self, http):
        body = self.body(logprobs=True)
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        content = response.json()["choices"][0]["logprobs"]["content"]
        self.answers.append((body["messages"], [bytes(entry["bytes"]) for entry in content]))

    def leave_stream(self, http):
        with http.stream("POST", "/v1/chat/completions", json=self.body(stream=True, max_tokens=200)) as response:
            lines = response.iter_lines()
            for _ in range(self.random.randrange(1, 12)):
                next(lines, None)

    def leave_prompt(self, http):
        messages = [{"role": "user", "content": "word " * self.random.randrange(300, 900)}]
        with contextlib.suppress(httpx.TimeoutException):
            http.post("/v1/chat/completions", json=self.body(messages=messages), timeout=self.random.uniform(0.05, 0.5))

    def too_long(self, http):
        response = http.post(
            "/v1/chat/completions", json=self.body(messages=[{"role": "user", "content": "x " * 3000}])
        )
        assert response.json()["error"]["code"] == "context_length_exceeded"

    def bad_json(self, http):
        response = http.post(
            "/v1/chat/completions", content=json.dumps(self.body()).encode()[: self.random.randrange(90)]
        )
        assert response.status_code == 400

    def hang_up(self, _http):
        """Ends the connection in the middle of a request."""
        parts = urlsplit(self.url)
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")


def run_clients(url, seconds):
    clients = [Client(url, seed, time.monotonic() + seconds) for seed in range(N_CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(seconds + 180)
        assert not client.is_alive()
        assert client.error is None, repr(client.error)
    return clients


def distinct_answers(clients):
    return {(messages[0]["content"], tuple(raw)): messages for client in clients for messages, raw in client.answers}


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
def test_eight_clients_on_four_slots(smollm2_path):
    with running_server({"smol": smollm2_path}, n_slots=N_SLOTS, n_ctx=1024) as (url, app):
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
        run_clients(url, SECONDS / 10)  # until caches and pools have their size
        before = resident_bytes()
        clients = run_clients(url, SECONDS)
        stats = app.state.context.registry.entries["smol"].llm.stats
        wait_until(lambda: stats().n_busy == 0 and stats().n_queued == 0, 10)
        growth = resident_bytes() - before
    counts = {kind: sum(client.counts[kind] for client in clients) for kind in clients[0].counts}
    print(f"\n{counts}, memory grew by {growth / 1e6:.1f} MB, {stats()}")
    assert growth < 20e6
    assert min(counts.values()) > 0
    check_answers(smollm2_path, distinct_answers(clients))


def check_answers(path, answers):
    """Each answer is one that the model gives alone, up to how sums round."""
    assert answers
    with Llama(path, kv_quant="f16", n_ctx=1024) as alone:
        ids = {alone.detokenize([token], [0], special=True): token for token in range(alone.n_vocab())}
        gaps = []
        for (_, raw), messages in answers.items():
            prompt = alone.tokenize(alone.chat_prompt(messages), special=True)
            gaps.append(worst_gap(alone, prompt, [ids[each] for each in raw]))
    print(f"{len(answers)} different answers, at most {max(gaps):.2f} logits from the best token")
    assert max(gaps) < TIE_LOGITS


def test_a_few_seconds_of_it(smollm2_path):
    with running_server({"smol": smollm2_path}, n_slots=N_SLOTS, n_ctx=1024) as (url, app):
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200)
        clients = run_clients(url, 5)
        stats = app.state.context.registry.entries["smol"].llm.stats
        wait_until(lambda: stats().n_busy == 0 and stats().n_queued == 0, 10)
    check_answers(smollm2_path, distinct_answers(clients))


@pytest.mark.slow
def test_loading_and_closing_leaves_nothing_behind(smollm2_path):
    def use():
        with Llama(smollm2_path, kv_quant="ultra4", n_ctx=1024) as llm:
            llm("Once upon a time", max_tokens=4)

    for _ in range(4):
        use()
    before = resident_bytes()
    for _ in range(20):
        use()
    growth = resident_bytes() - before
    print(f"\nmemory grew by {growth / 1e6:.1f} MB in 20 loads")
    assert growth < 20e6
