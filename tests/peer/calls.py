"""The calls that pykvq.Llama and llama_cpp.Llama must answer alike: method and arguments, temperature 0, F16 cache."""

from __future__ import annotations

from typing import Any

LOAD: dict[str, Any] = {
    "n_ctx": 1024,
    "n_batch": 512,
    "n_threads": 1,
    "flash_attn": True,
    "logits_all": True,
    "seed": 1,
}

_FRANCE = "The capital of France is"
_CODE = "def fibonacci(n):"
_STORY = "Once upon a time"
_LIST = "Three colours: red, green,"
_USER = [{"role": "user", "content": "Name three colours."}]
_SYSTEM = [{"role": "system", "content": "You answer in one word."}, *_USER]
_TURNS = [
    *_USER,
    {"role": "assistant", "content": "Red, green and blue."},
    {"role": "user", "content": "And a fourth one?"},
]


def _completion(prompt: Any, **values: Any) -> tuple[str, dict[str, Any]]:
    return "create_completion", {"prompt": prompt, "temperature": 0.0, "max_tokens": 12, **values}


def _chat(messages: Any, **values: Any) -> tuple[str, dict[str, Any]]:
    return "create_chat_completion", {"messages": messages, "temperature": 0.0, "max_tokens": 12, **values}


CALLS: list[tuple[str, dict[str, Any]]] = [
    _completion(_FRANCE),
    _completion(_CODE),
    _completion(_STORY),
    _completion(_LIST),
    _completion("Repeat: 你好 🎉 🎉"),
    _completion([504, 3575, 282, 4649, 314]),
    _completion(_FRANCE, stream=True),
    _completion("Repeat: 你好 🎉 🎉", stream=True),
    _completion(_FRANCE, echo=True),
    _completion(_FRANCE, stop=["\n"]),
    _completion(_FRANCE, stop=".", stream=True),
    _completion("Count: one, two, three,", stop=[" six", "eight"]),
    _completion("Count: one, two, three,", stop=[" never"]),
    _completion(_FRANCE, logprobs=3, max_tokens=4),
    _completion("la la la la la la", repeat_penalty=1.3),
    _completion("la la la la la la", frequency_penalty=1.0),
    _completion("la la la la la la", presence_penalty=1.0),
    _completion(_STORY, logit_bias={28: -100.0}),
    _completion(_FRANCE, logit_bias={7042: -100.0}, max_tokens=4),
    _completion(_STORY, top_k=1, temperature=0.7),
    _completion(_FRANCE, max_tokens=1),
    _completion("The answer is 42. " * 20, max_tokens=6),
    _completion("1, 2, 3, 4,"),
    _completion("Monday, Tuesday,"),
    _completion("import numpy as", max_tokens=2),
    _completion("A B C D E F", max_tokens=8),
    _chat(_USER, max_tokens=4),
    _chat(_USER, max_tokens=4, stream=True),
    _chat(_SYSTEM, max_tokens=2),
    _chat(_TURNS, max_tokens=1),
    _chat(_USER, stop=["\n"]),
    _chat(_USER, stop=["1"], stream=True),
    _chat(_USER, repeat_penalty=1.2, max_tokens=4),
    _chat(_USER, logprobs=True, top_logprobs=2, max_tokens=3),
    _chat(_USER, logit_bias={33: -100.0}, max_tokens=3),
    _chat([{"role": "user", "content": "What is the capital of France?"}]),
    _chat([{"role": "user", "content": "What is the capital of France?"}], stream=True),
    _chat([{"role": "user", "content": "Grüße 你好"}], max_tokens=2),
    _chat([{"role": "user", "content": "What is 2+2?"}], max_tokens=40),
]


def outcome(answer: Any) -> dict[str, Any]:
    """What is compared of an answer, whole or in chunks: text, reason to end, usage, token texts and probabilities."""
    whole = isinstance(answer, dict)
    chunks = [answer] if whole else list(answer)
    text, reason, tokens, logprobs = "", None, [], []
    for chunk in chunks:
        choice = chunk["choices"][0]
        part = choice.get("message") or choice.get("delta") or {}
        text += choice.get("text") or part.get("content") or ""
        reason = choice["finish_reason"] or reason
        found = choice.get("logprobs") or {}
        tokens += found.get("tokens") or [entry["token"] for entry in found.get("content") or []]
        logprobs += found.get("token_logprobs") or [entry["logprob"] for entry in found.get("content") or []]
    result = {"text": text, "finish_reason": reason, "usage": answer["usage"] if whole else None}
    if tokens:
        result |= {"tokens": tokens, "logprobs": [round(float(value), 3) for value in logprobs]}
    return result
