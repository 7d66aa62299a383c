"""Answers over HTTP: whole, or as server-sent events, until the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pykvq.server.errors import api_error

# a comment is sent when nothing else was for so many seconds, so that no proxy gives the connection up
_KEEP_ALIVE_SECONDS = 15.0
# nginx would collect the events otherwise
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_T = TypeVar("_T")


def event(data: dict[str, Any], name: str | None = None) -> str:
    """One server-sent event."""
    lines = f"event: {name}\n" if name else ""
    return f"{lines}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def event_stream(events: AsyncIterator[str], resources: AsyncExitStack, end: str = "data: [DONE]\n\n") -> Response:
    """A stream of events; an error becomes the last one. ``resources`` are given back when it ends, however it does."""
    return _EventResponse(events, resources, end)


class _EventResponse(StreamingResponse):
    def __init__(self, events: AsyncIterator[str], resources: AsyncExitStack, end: str) -> None:
        self._body = _guarded(events, end)
        self._events = events
        super().__init__(self._body, media_type="text/event-stream", headers=_HEADERS)
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events. A client may go away before the first of them is asked for."""
        async with self._resources:
            try:
                await super().__call__(scope, receive, send)
            finally:
                # from the outside in: the inner one may be at work for the outer
                for each in (self._body, self._events):
                    if isinstance(each, AsyncGenerator):
                        await each.aclose()
                del self._body, self._events, self.body_iterator


async def _guarded(events: AsyncIterator[str], end: str) -> AsyncGenerator[str, None]:
    async with aclosing(_kept_alive(events)) as kept_alive:
        try:
            async for text in kept_alive:
                yield text
        except Exception as error:
            yield event(api_error(error).body())
    yield end


async def _kept_alive(events: AsyncIterator[str]) -> AsyncGenerator[str, None]:
    """The events, and a comment whenever none has come for a while."""
    iterator = aiter(events)
    pending: asyncio.Task[str] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(_next(iterator))
            done, _ = await asyncio.wait([pending], timeout=_KEEP_ALIVE_SECONDS)
            if not done:
                yield ": keep-alive\n\n"
                continue
            task, pending = pending, None
            try:
                text = task.result()
            except StopAsyncIteration:
                return
            yield text
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.wait([pending])


async def _next(iterator: AsyncIterator[str]) -> str:
    return await anext(iterator)


async def json_answer(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """The JSON that ``work`` gives; it is cancelled if the client goes away."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=499)  # as nginx calls it; nobody reads it
        return JSONResponse(task.result())
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.wait([task, gone])


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
