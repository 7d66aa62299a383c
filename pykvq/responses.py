"""Builds the response dicts, in the shapes that llama-cpp-python and the OpenAI API use."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pykvq.request import Piece, Request, Result, TokenLogprob
from pykvq.tool_calls import ToolCall, ToolCallParser

Response = dict[str, Any]


@dataclass(frozen=True)
class ResponseHead:
    """What all chunks of one response share: ``id_prefix`` begins its id, ``kind`` is the "object" of the whole."""

    id_prefix: str
    kind: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    response_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def fields(self, kind: str | None = None) -> Response:
        """The first fields of the response, or of a chunk of that kind."""
        return {
            "id": self.id_prefix + self.response_id,
            "object": kind or self.kind,
            "created": self.created,
            "model": self.model,
        }


class ChoiceWriter(ABC):
    """Turns the pieces of one answer into chunks, and into the choice of the whole response."""

    def __init__(self, head: ResponseHead, request: Request, result: Result, index: int) -> None:
        self.head = head
        self.request = request
        self.result = result
        self.index = index
        self._texts: list[str] = []
        self._entries: list[TokenLogprob] = []

    def start(self) -> list[Response]:
        """Chunks before the first piece."""
        return []

    def push(self, piece: Piece) -> list[Response]:
        """Chunks for a piece."""
        self._texts.append(piece.text)
        self._entries += piece.logprobs
        return self._piece_chunks(piece)

    def finish(self) -> list[Response]:
        """Chunks after the last piece; the last of them has the finish reason."""
        return [self._chunk(self._empty_part(), None, self.result.finish_reason)]

    @abstractmethod
    def choice(self) -> Response:
        """The whole choice."""

    @abstractmethod
    def _piece_chunks(self, piece: Piece) -> list[Response]: ...

    @abstractmethod
    def _empty_part(self) -> Response: ...

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _chunk(self, part: Response, logprobs: Response | None, finish_reason: str | None, kind: str = "") -> Response:
        choice = {"index": self.index, **part, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self.head.fields(kind), "choices": [choice]}


class CompletionWriter(ChoiceWriter):
    """The choice of a text_completion.

    Args:
        echo: the prompt's text, to come first; "" for none.
        text_offset: characters before the first token in the legacy text_offset.
    """

    def __init__(
        self, head: ResponseHead, request: Request, result: Result, index: int, *, echo: str, text_offset: int
    ) -> None:
        super().__init__(head, request, result, index)
        self._echo = echo
        self._pending_echo = echo
        self._text_offset = text_offset

    def finish(self) -> list[Response]:
        """The echo if nothing else has brought it, and the finish reason."""
        chunks = [self._text_chunk("", ())] if self._pending_echo else []
        return chunks + super().finish()

    def choice(self) -> Response:
        """The whole choice."""
        return {
            "text": self._echo + self._text,
            "index": self.index,
            "logprobs": self._logprobs(self._entries, with_prompt=True),
            "finish_reason": self.result.finish_reason,
        }

    def _piece_chunks(self, piece: Piece) -> list[Response]:
        return [self._text_chunk(piece.text, piece.logprobs)]

    def _text_chunk(self, text: str, entries: Iterable[TokenLogprob]) -> Response:
        # with prompt log probabilities the echo must wait for the first piece, which brings them
        echo, self._pending_echo = self._pending_echo, ""
        return self._chunk({"text": echo + text}, self._logprobs(entries, with_prompt=bool(echo)), None)

    def _empty_part(self) -> Response:
        return {"text": ""}

    def _logprobs(self, entries: Iterable[TokenLogprob], *, with_prompt: bool) -> Response | None:
        """The logprobs object, with those of the prompt first if they were asked for."""
        if self.request.n_logprobs is None:
            return None
        prompt_entries = self.result.prompt_logprobs if with_prompt else []
        rows = [(entry, entry.offset) for entry in prompt_entries]
        rows += [(entry, entry.offset + self._text_offset) for entry in entries]
        return {
            "tokens": [_token_text(entry.raw) for entry, _ in rows],
            "text_offset": [offset for _, offset in rows],
            "token_logprobs": [entry.logprob for entry, _ in rows],
            "top_logprobs": [_top_by_text(entry) for entry, _ in rows],
        }


class ChatWriter(ChoiceWriter):
    """The choice of a chat.completion.

    Args:
        parser: finds the tool calls in the answer; None if there are no tools.
        legacy_functions: report a call as "function_call", as the older API did.
    """

    def __init__(
        self,
        head: ResponseHead,
        request: Request,
        result: Result,
        index: int,
        *,
        parser: ToolCallParser | None = None,
        legacy_functions: bool = False,
    ) -> None:
        super().__init__(head, request, result, index)
        self._parser = parser
        self._legacy = legacy_functions
        self._contents: list[str] = []
        self._calls: list[ToolCall] = []

    def start(self) -> list[Response]:
        """The role."""
        return [self._chat_chunk({"role": "assistant"}, ())]

    def finish(self) -> list[Response]:
        """What the parser held back, and the finish reason."""
        chunks: list[Response] = []
        if self._parser is not None:
            chunks = self._part_chunks(*self._parser.finish(), ())
        if self._calls and self.result.finish_reason == "stop":
            self.result.finish_reason = "function_call" if self._legacy else "tool_calls"
        return chunks + super().finish()

    def choice(self) -> Response:
        """The whole choice."""
        content = "".join(self._contents)
        message: Response = {"role": "assistant", "content": content or None if self._calls else content}
        if self._calls:
            message |= self._call_fields(self._calls, 0)
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(self._entries),
            "finish_reason": self.result.finish_reason,
        }

    def _piece_chunks(self, piece: Piece) -> list[Response]:
        if self._parser is None:
            return self._part_chunks(piece.text, [], piece.logprobs)
        return self._part_chunks(*self._parser.push(piece.text), piece.logprobs)

    def _part_chunks(self, content: str, calls: list[ToolCall], entries: Iterable[TokenLogprob]) -> list[Response]:
        chunks = []
        if content or (entries and not calls):
            self._contents.append(content)
            chunks.append(self._chat_chunk({"content": content}, entries))
            entries = ()
        if calls:
            fields = self._call_fields(calls, len(self._calls), with_index=True)
            self._calls += calls
            chunks.append(self._chat_chunk(fields, entries))
        return chunks

    def _call_fields(self, calls: Sequence[ToolCall], first: int, *, with_index: bool = False) -> Response:
        if self._legacy:
            return {"function_call": calls[0].function_fields()}
        items = [call.fields() for call in calls]
        if with_index:
            items = [{"index": first + i, **item} for i, item in enumerate(items)]
        return {"tool_calls": items}

    def _chat_chunk(self, delta: Response, entries: Iterable[TokenLogprob], reason: str | None = None) -> Response:
        logprobs = None if "role" in delta else self._logprobs(entries)
        return self._chunk({"delta": delta}, logprobs, reason)

    def _chunk(self, part: Response, logprobs: Response | None, finish_reason: str | None, kind: str = "") -> Response:
        return super()._chunk(part, logprobs, finish_reason, "chat.completion.chunk")

    def _empty_part(self) -> Response:
        return {"delta": {}}

    def _logprobs(self, entries: Iterable[TokenLogprob]) -> Response | None:
        if self.request.n_logprobs is None:
            return None
        content = [
            {
                **_chat_token(entry.raw, entry.logprob),
                "top_logprobs": [_chat_token(raw, logprob) for raw, logprob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}


@dataclass(frozen=True)
class Plan:
    """A checked call: what to generate, and how to write it down.

    Args:
        requests: one a choice.
        make_writer: makes the writer of a choice from its request, its result and its index.
    """

    head: ResponseHead
    requests: tuple[Request, ...]
    make_writer: Callable[[Request, Result, int], ChoiceWriter]
    stream: bool = False
    include_usage: bool = False
    usage_details: bool = False
    # of several prompts together; None: of the one that all requests have
    n_prompt_tokens: int | None = None

    def response(self, writers: Sequence[ChoiceWriter]) -> Response:
        """The whole response of finished writers."""
        choices = [writer.choice() for writer in writers]
        return {**self.head.fields(), "choices": choices, "usage": usage([writer.result for writer in writers], self)}

    def last_chunks(self, writers: Sequence[ChoiceWriter]) -> list[Response]:
        """The chunk with the usage, if it was asked for."""
        if not self.include_usage:
            return []
        kind = "chat.completion.chunk" if self.head.kind == "chat.completion" else self.head.kind
        return [{**self.head.fields(kind), "choices": [], "usage": usage([w.result for w in writers], self)}]


def merge_plans(plans: Sequence[Plan]) -> Plan:
    """One plan with the choices of several, which are alike but for their prompts."""
    if len(plans) == 1:
        return plans[0]
    makers = [plan.make_writer for plan in plans for _ in plan.requests]
    return replace(
        plans[0],
        requests=tuple(request for plan in plans for request in plan.requests),
        make_writer=lambda request, result, index: makers[index](request, result, index),
        n_prompt_tokens=sum(len(plan.requests[0].prompt) for plan in plans),
    )


def usage(results: Iterable[Result], plan: Plan) -> Response:
    """The tokens of a response; in the details, ``cached_tokens`` of the prompt were taken over from the KV cache."""
    done = list(results)
    n_prompt = len(plan.requests[0].prompt) if plan.n_prompt_tokens is None else plan.n_prompt_tokens
    n_answer = sum(result.gen_n for result in done)
    counts = {"prompt_tokens": n_prompt, "completion_tokens": n_answer, "total_tokens": n_prompt + n_answer}
    if not plan.usage_details:
        return counts
    return {**counts, "prompt_tokens_details": {"cached_tokens": done[0].n_reused if done else 0}}


def embeddings(vectors: Sequence[Any], n_tokens: int, model: str) -> Response:
    """A list of embeddings, each a list of n_embd floats, or one such list a token where nothing is pooled."""
    data = [{"object": "embedding", "embedding": vector, "index": i} for i, vector in enumerate(vectors)]
    return {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }


def _top_by_text(entry: TokenLogprob) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    top = {_token_text(raw): logprob for raw, logprob in entry.top}
    top[_token_text(entry.raw)] = entry.logprob
    return top


def _chat_token(raw: bytes, logprob: float | None) -> Response:
    return {"token": _token_text(raw), "logprob": logprob, "bytes": list(raw)}


def _token_text(raw: bytes) -> str:
    """A token's text; one that is a part of a code point is written as OpenAI does, "bytes:\\xe2\\x82"."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
