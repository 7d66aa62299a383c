"""An answer while it is made: streamed from the engine, saved as it grows, and told to every window."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from pykvq.async_llama import AsyncLlama
from pykvq.desktop.attachments import with_attachments
from pykvq.desktop.conversations import Conversation, Conversations, Message
from pykvq.desktop.markdown import without_reasoning
from pykvq.errors import StorageError
from pykvq.responses import Plan
from pykvq.server.errors import api_error
from pykvq.server.registry import ModelRegistry

_SHOW_SECONDS = 0.04
_SAVE_SECONDS = 0.5


class Answer:
    """The answer to a conversation's last message. Make it in a running event loop.

    Args:
        message: the empty message that it fills.
        prompt: what ``chat_messages`` made of the conversation.
        sampling: arguments of ``create_chat_completion``.
        on_progress: called when there is more to show, and at the end.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        store: Conversations,
        message: Message,
        prompt: Sequence[dict[str, Any]],
        sampling: dict[str, Any],
        on_progress: Callable[[Answer], None],
    ) -> None:
        self.message = message
        self.text = ""
        self.state = "streaming"
        self.model: str | None = None
        self.n_tokens = 0
        self.n_prompt_tokens = 0
        self.error: str | None = None
        self.save_error: str | None = None
        self._finish_reason: str | None = None
        self._registry = registry
        self._store = store
        self._prompt = list(prompt)
        self._sampling = sampling
        self._on_progress = on_progress
        self._started = time.monotonic()
        self._first: float | None = None
        self._last = self._started
        self._save_lock = threading.Lock()
        self._has_more = asyncio.Event()
        self._publisher = asyncio.create_task(self._publish())
        self.task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Ends the answer where it is; it is saved when this returns."""
        self.task.cancel()
        await asyncio.wait([self.task])

    @property
    def seconds(self) -> float:
        """Seconds from the first token to the last one."""
        return 0.0 if self._first is None else self._last - self._first

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token."""
        return (self.n_tokens - 1) / self.seconds if self.seconds > 0 else 0.0

    @property
    def n_context(self) -> int:
        """Tokens of the conversation with this answer."""
        return self.n_prompt_tokens + self.n_tokens

    def details(self) -> dict[str, Any]:
        """What is kept about the answer."""
        values = {
            "model": self.model,
            "n_tokens": self.n_tokens,
            "n_prompt_tokens": self.n_prompt_tokens,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "first_token_seconds": None if self._first is None else round(self._first - self._started, 3),
            "finish_reason": self._finish_reason,
            "error": self.error,
        }
        return {name: value for name, value in values.items() if value is not None}

    def save(self) -> None:
        """Stores the answer as far as it has come; ``save_error`` tells if that fails."""
        with self._save_lock:  # what is saved last must be the newest
            try:
                self._store.write(self.message.id, self.text, self.state, self.details())
                self.save_error = None
            except StorageError as error:  # the answer goes on, and the window tells
                self.save_error = str(error)

    async def _run(self) -> None:
        state = "complete"
        try:
            await self._generate()
        except asyncio.CancelledError:
            state = "stopped"
        except Exception as error:
            state, self.error = "failed", api_error(error).message
        self._publisher.cancel()
        with suppress(asyncio.CancelledError):
            await self._publisher
        self.state = state
        self.save()
        self._on_progress(self)

    async def _generate(self) -> None:
        async with self._registry.use(None) as (name, llm):
            self.model = name
            plan = await asyncio.to_thread(self._plan, name, llm)
            self.n_prompt_tokens = len(plan.requests[0].prompt)
            async with aclosing(llm.reply(plan).chunks()) as chunks:
                async for chunk in chunks:
                    self._take(chunk)

    def _plan(self, name: str, llm: AsyncLlama) -> Plan:
        plan = llm.plan_chat_completion(self._prompt, model=name, stream=True, **self._sampling)
        return replace(plan, include_usage=True)

    def _take(self, chunk: dict[str, Any]) -> None:
        if "usage" in chunk:
            self.n_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            self._finish_reason = choice["finish_reason"] or self._finish_reason
            text = choice["delta"].get("content")
            if text:
                self._last = time.monotonic()
                self._first = self._first or self._last
                self.text += text
                self.n_tokens += 1
                self._has_more.set()

    async def _publish(self) -> None:
        saved = time.monotonic()
        while True:
            await self._has_more.wait()
            self._has_more.clear()
            self._on_progress(self)
            if time.monotonic() - saved > _SAVE_SECONDS:
                await asyncio.to_thread(self.save)
                saved = time.monotonic()
            await asyncio.sleep(_SHOW_SECONDS)


def chat_messages(conversation: Conversation, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages for the chat template: roles alternate, and earlier reasoning is left away."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "assistant":
            content = without_reasoning(message.content)
        else:
            content = with_attachments(message.content, message.attachments)
        if not content:
            continue  # an answer that failed before its first word
        if turns and turns[-1]["role"] == message.role:
            turns[-1]["content"] += f"\n\n{content}"
        else:
            turns.append({"role": message.role, "content": content})
    system = conversation.system_prompt.strip()
    return [{"role": "system", "content": system}, *turns] if system else turns
