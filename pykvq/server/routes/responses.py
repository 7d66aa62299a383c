"""POST /v1/responses: text and function calls. Nothing is stored, so there is no previous_response_id."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pykvq.async_llama import AsyncLlama
from pykvq.responses import Plan
from pykvq.server.context import context_of, without_none
from pykvq.server.errors import ApiError, api_error
from pykvq.server.schemas import ResponsesBody
from pykvq.server.sse import event, event_stream, json_answer

router = APIRouter()

Json = dict[str, Any]


@router.post("/v1/responses")
async def create_response(body: ResponsesBody, request: Request) -> Response:
    """Answers an input."""
    if body.previous_response_id is not None:
        raise ApiError(
            400, "responses are not stored: send the whole conversation as input", param="previous_response_id"
        )
    async with AsyncExitStack() as stack:
        name, llm = await stack.enter_async_context(context_of(request).registry.use(body.model))
        plan = await asyncio.to_thread(_plan, body, name, llm)
        plan = replace(plan, include_usage=True, usage_details=True)
        reply = llm.reply(plan)
        writer = _ResponseWriter(body, name)
        if not body.stream:

            async def whole() -> Json:
                return writer.whole(await reply.response())

            return await json_answer(request, whole())
        return event_stream(writer.events(reply.chunks()), stack.pop_all(), end="")


def _plan(body: ResponsesBody, name: str, llm: AsyncLlama) -> Plan:
    return llm.plan_chat_completion(
        _messages(body),
        model=name,
        stream=body.stream,
        max_tokens=body.max_output_tokens,
        temperature=0.8 if body.temperature is None else body.temperature,
        parallel_tool_calls=body.parallel_tool_calls,
        **without_none(
            top_p=body.top_p,
            tools=[_chat_tool(tool) for tool in body.tools] if body.tools else None,
            tool_choice=body.tool_choice,
            response_format=_response_format(body.text),
        ),
    )


def _messages(body: ResponsesBody) -> list[Json]:
    """The input as chat messages."""
    start = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*start, {"role": "user", "content": body.input}]
    messages: list[Json] = start
    for i, item in enumerate(body.input):
        messages.append(_message(i, item))
    return messages


def _message(i: int, item: Mapping[str, Any]) -> Json:
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": str(item.get("output", ""))}
    if kind != "message":
        raise ApiError(400, f"input[{i}] has type {kind!r}: only messages and function calls are supported")
    role = "system" if item.get("role") == "developer" else item.get("role")
    content = item.get("content")
    if isinstance(content, list):
        content = "\n".join(_part_text(i, part) for part in content)
    return {"role": role, "content": content}


def _part_text(i: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
        raise ApiError(400, f"input[{i}]: only text parts are supported, got {kind!r}", param="input")
    return str(part["text"])


def _chat_tool(tool: Mapping[str, Any]) -> Json:
    if tool.get("type") != "function":
        raise ApiError(400, f"only tools of type 'function' are supported, got {tool.get('type')!r}", param="tools")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in names if key in tool}}


def _response_format(text: Mapping[str, Any] | None) -> Json | None:
    wanted = (text or {}).get("format")
    if not isinstance(wanted, Mapping) or wanted.get("type") == "text":
        return None
    if wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}
    return dict(wanted)


class _ResponseWriter:
    """Turns a chat completion, whole or in chunks, into a response."""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self._body = body
        self._model = model
        self._created = int(time.time())
        self._id = f"resp_{uuid.uuid4().hex}"
        self._n_events = 0

    def whole(self, completion: Json) -> Json:
        """The response of a chat.completion."""
        choice = completion["choices"][0]
        message = choice["message"]
        output = [_text_item(_new_id("msg"), message["content"])] if message["content"] else []
        output += [_call_item(_new_id("fc"), call) for call in message.get("tool_calls", [])]
        return self._response(output, choice["finish_reason"], completion["usage"])

    async def events(self, chunks: AsyncIterator[Json]) -> AsyncGenerator[str, None]:
        """The events of a stream."""
        yield self._event("response.created", response=self._response([], None, None))
        yield self._event("response.in_progress", response=self._response([], None, None))
        output: list[Json] = []
        text_id, text = _new_id("msg"), ""
        reason, usage = None, None
        try:
            async for chunk in chunks:
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    reason = choice["finish_reason"] or reason
                    content = choice["delta"].get("content")
                    if content:
                        if not text:
                            for opening in self._open_text(text_id):
                                yield opening
                        text += content
                        yield self._event("response.output_text.delta", **_text_place(text_id), delta=content)
                    for call in choice["delta"].get("tool_calls", []):
                        item = _call_item(_new_id("fc"), call)
                        output.append(item)
                        for call_event in self._call_events(item, len(output) - 1 + bool(text)):
                            yield call_event
        except Exception as error:
            failure = api_error(error)
            details = {"code": failure.code or failure.kind, "message": failure.message}
            failed = {**self._response([], None, None), "status": "failed", "error": details}
            yield self._event("response.failed", response=failed)
            return
        if text:
            output.insert(0, _text_item(text_id, text))
            for closing in self._close_text(text_id, text):
                yield closing
        response = self._response(output, reason, usage)
        yield self._event(f"response.{response['status']}", response=response)

    def _open_text(self, item_id: str) -> list[str]:
        item = {**_text_item(item_id, ""), "status": "in_progress", "content": []}
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **_text_place(item_id), part=_text_part("")),
        ]

    def _close_text(self, item_id: str, text: str) -> list[str]:
        return [
            self._event("response.output_text.done", **_text_place(item_id), text=text, logprobs=[]),
            self._event("response.content_part.done", **_text_place(item_id), part=_text_part(text)),
            self._event("response.output_item.done", output_index=0, item=_text_item(item_id, text)),
        ]

    def _call_events(self, item: Json, index: int) -> list[str]:
        place = {"item_id": item["id"], "output_index": index}
        opened = {**item, "arguments": "", "status": "in_progress"}
        done = {"name": item["name"], "arguments": item["arguments"]}
        return [
            self._event("response.output_item.added", output_index=index, item=opened),
            self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]),
            self._event("response.function_call_arguments.done", **place, **done),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _event(self, kind: str, **fields: Any) -> str:
        self._n_events += 1
        if kind == "response.output_text.delta":
            fields["logprobs"] = []
        return event({"type": kind, "sequence_number": self._n_events - 1, **fields}, kind)

    def _response(self, output: list[Json], reason: str | None, usage: Json | None) -> Json:
        body = self._body
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _text_place(item_id: str) -> Json:
    return {"item_id": item_id, "output_index": 0, "content_index": 0}


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _text_item(item_id: str, text: str) -> Json:
    return {
        "type": "message",
        "id": item_id,
        "status": "completed",
        "role": "assistant",
        "content": [_text_part(text)],
    }


def _call_item(item_id: str, call: Json) -> Json:
    function = call["function"]
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
        "status": "completed",
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
