"""What the routes share: the models, the metrics, and answering a plan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pykvq.async_llama import AsyncLlama
from pykvq.batching.reply import Reply
from pykvq.responses import Plan
from pykvq.server.registry import ModelRegistry
from pykvq.server.settings import ServerSettings
from pykvq.server.sse import event, event_stream, json_answer


@dataclass(frozen=True)
class ServerContext:
    """Kept in ``app.state.context``."""

    settings: ServerSettings
    registry: ModelRegistry


def context_of(request: Request) -> ServerContext:
    """The server's context."""
    context: ServerContext = request.app.state.context
    return context


async def answer_plan(
    request: Request, model: str | None, make_plan: Callable[[str, AsyncLlama], Plan], include_usage: bool
) -> Response:
    """Carries a plan out on a model, and answers with JSON or with a stream.

    Args:
        make_plan: makes the plan from the model's name and the model.
        include_usage: end a stream with the usage.
    """
    async with AsyncExitStack() as stack:
        name, llm = await stack.enter_async_context(context_of(request).registry.use(model))
        # tokenizing a long prompt and compiling a grammar take a while, in which other requests go on
        plan = await asyncio.to_thread(make_plan, name, llm)
        plan = replace(plan, include_usage=include_usage, usage_details=True)
        reply = llm.reply(plan)
        if not plan.stream:
            return await json_answer(request, reply.response())
        return event_stream(_events(reply), stack.pop_all())


async def _events(reply: Reply) -> AsyncGenerator[str, None]:
    async for chunk in reply.chunks():
        yield event(chunk)


def without_none(**values: Any) -> dict[str, Any]:
    """The arguments that were given."""
    return {name: value for name, value in values.items() if value is not None}
