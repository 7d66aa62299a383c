"""Builds the response dicts, in the shapes that llama-cpp-python and the OpenAI API use."""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pykvq.generation import Generation, TokenLogprob

Response = dict[str, Any]


@dataclass(frozen=True)
class ResponseHead:
    """What all chunks of one response share. ``prompt_text`` is the echo, "" for none."""

    model: str
    prompt_text: str = ""
    # characters before the first token in the legacy text_offset
    text_offset: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    response_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def fields(self, prefix: str, kind: str) -> Response:
        """The first fields of a response of that kind; ``prefix`` begins its id."""
        return {"id": prefix + self.response_id, "object": kind, "created": self.created, "model": self.model}


def completion(generation: Generation, head: ResponseHead) -> Response:
    """Runs a generation to its end and returns a text_completion."""
    text, entries = generation.run()
    choice = {
        "text": head.prompt_text + text,
        "index": 0,
        "logprobs": _legacy_logprobs(generation, entries, head),
        "finish_reason": generation.result.finish_reason,
    }
    return {**head.fields("cmpl-", "text_completion"), "choices": [choice], "usage": _usage(generation)}


def completion_chunks(generation: Generation, head: ResponseHead) -> Generator[Response, None, None]:
    """The chunks of a text_completion; the last one has the finish reason and no text."""

    def chunk(text: str, logprobs: Response | None, finish_reason: str | None) -> Response:
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**head.fields("cmpl-", "text_completion"), "choices": [choice]}

    with generation:
        # with prompt log probabilities the echo must wait for the first piece, which brings them
        echo = head.prompt_text
        for piece in generation:
            yield chunk(echo + piece.text, _legacy_logprobs(generation, piece.logprobs, head, bool(echo)), None)
            echo = ""
        if echo:
            yield chunk(echo, _legacy_logprobs(generation, (), head), None)
        yield chunk("", None, generation.result.finish_reason)


def chat_completion(generation: Generation, head: ResponseHead) -> Response:
    """Runs a generation to its end and returns a chat.completion."""
    text, entries = generation.run()
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": _chat_logprobs(generation, entries),
        "finish_reason": generation.result.finish_reason,
    }
    return {**head.fields("chatcmpl-", "chat.completion"), "choices": [choice], "usage": _usage(generation)}


def chat_completion_chunks(generation: Generation, head: ResponseHead) -> Generator[Response, None, None]:
    """The chunks of a chat.completion: first the role, then content, last the finish reason."""

    def chunk(delta: Response, logprobs: Response | None, finish_reason: str | None) -> Response:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**head.fields("chatcmpl-", "chat.completion.chunk"), "choices": [choice]}

    with generation:
        yield chunk({"role": "assistant"}, None, None)
        for piece in generation:
            yield chunk({"content": piece.text}, _chat_logprobs(generation, piece.logprobs), None)
        yield chunk({}, None, generation.result.finish_reason)


def embeddings(vectors: Sequence[Any], n_tokens: int, model: str) -> Response:
    """A list of embeddings, each a list of n_embd floats, or one such list a token where nothing is pooled."""
    data = [{"object": "embedding", "embedding": vector, "index": i} for i, vector in enumerate(vectors)]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _usage(generation: Generation) -> dict[str, int]:
    n_prompt, n_answer = len(generation.request.prompt), generation.result.gen_n
    return {"prompt_tokens": n_prompt, "completion_tokens": n_answer, "total_tokens": n_prompt + n_answer}


def _legacy_logprobs(
    generation: Generation, entries: Iterable[TokenLogprob], head: ResponseHead, with_prompt: bool = True
) -> Response | None:
    """The logprobs object of a text_completion, with those of the prompt first if they were asked for."""
    if generation.request.n_logprobs is None:
        return None
    prompt_entries = generation.result.prompt_logprobs if with_prompt else []
    rows = [(entry, entry.offset) for entry in prompt_entries]
    rows += [(entry, entry.offset + head.text_offset) for entry in entries]
    return {
        "tokens": [_token_text(entry.raw) for entry, _ in rows],
        "text_offset": [offset for _, offset in rows],
        "token_logprobs": [entry.logprob for entry, _ in rows],
        "top_logprobs": [_top_by_text(entry) for entry, _ in rows],
    }


def _top_by_text(entry: TokenLogprob) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    top = {_token_text(raw): logprob for raw, logprob in entry.top}
    top[_token_text(entry.raw)] = entry.logprob
    return top


def _chat_logprobs(generation: Generation, entries: Iterable[TokenLogprob]) -> Response | None:
    if generation.request.n_logprobs is None:
        return None
    content = [
        {
            **_chat_token(entry.raw, entry.logprob),
            "top_logprobs": [_chat_token(raw, logprob) for raw, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(raw: bytes, logprob: float | None) -> Response:
    return {"token": _token_text(raw), "logprob": logprob, "bytes": list(raw)}


def _token_text(raw: bytes) -> str:
    """A token's text; one that is a part of a code point is written as OpenAI does, "bytes:\\xe2\\x82"."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
