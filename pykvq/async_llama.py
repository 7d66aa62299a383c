"""``AsyncLlama``: many requests at once on one model, for asyncio."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from typing import Any

from pykvq import responses
from pykvq.batching.reply import Reply
from pykvq.batching.scheduler import DEFAULT_MAX_QUEUE, Scheduler, SchedulerStats
from pykvq.embedding import MAX_BATCH_TEXTS, Embedding, embed_texts
from pykvq.errors import InvalidArgumentError
from pykvq.kv_config import kv_presets
from pykvq.responses import Plan, Response
from pykvq.runtime import Context
from pykvq.text_model import TextModel

MAX_SLOTS = 64
# most tokens of a text to embed; a model made for text takes n_vocab floats of memory for each
_MAX_EMBEDDED_TOKENS, _MAX_EMBEDDED_TOKENS_OF_TEXT_MODEL = 2048, 512
_MEAN_POOLING = 1


class AsyncLlama(TextModel):
    """A model that answers several requests at once, in slots that share the weights and each batch.

    Args:
        model_path: the GGUF file.
        n_slots: requests that are answered at once; each has ``n_ctx`` tokens of its own.
        max_queue: requests that may wait for a slot; beyond that, QueueFullError.
        timeout: seconds that an answer may take, the wait for a slot included; None for no limit.
        values: as for ``Llama``; embedding=True is not needed.

    ``create_completion``, ``create_chat_completion``, ``create_embedding`` and ``embed`` take the arguments of
    ``Llama`` and are awaited; with stream=True the result is an async iterator. Cancelling the task, or leaving the
    iterator, frees the slot. What any slot holds of a prompt is not computed again.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_slots: int = 4,
        max_queue: int = DEFAULT_MAX_QUEUE,
        timeout: float | None = None,
        **values: Any,
    ) -> None:
        if not isinstance(n_slots, int) or not 1 <= n_slots <= MAX_SLOTS:
            raise InvalidArgumentError(f"n_slots must be between 1 and {MAX_SLOTS}, got {n_slots!r}")
        if max_queue < 0:
            raise InvalidArgumentError(f"max_queue must be 0 or more requests, got {max_queue!r}")
        if values.get("embedding"):
            raise InvalidArgumentError("AsyncLlama embeds texts without embedding=True: leave it out")
        if values.get("draft_model") is not None:
            raise InvalidArgumentError("draft_model is for one request at a time: use Llama, or leave it out")
        self._n_slots = n_slots
        self._max_queue = max_queue
        self._timeout = timeout
        self._scheduler: Scheduler | None = None
        self._embedder: Context | None = None
        self._embedder_lock = threading.Lock()
        super().__init__(model_path, **values)

    def _start(self, context: Context) -> None:
        self._scheduler = Scheduler(self._model, context, self._n_ctx, max_queue=self._max_queue)

    def reply(self, plan: Plan, timeout: float | None = None) -> Reply:
        """Begins to carry out a plan; see ``Reply``. Call it in a running event loop."""
        return Reply(self._running_scheduler, plan, self._timeout if timeout is None else timeout)

    async def _respond(self, plan: Plan) -> Any:
        reply = self.reply(plan)
        return reply.chunks() if plan.stream else await reply.response()

    @property
    def _running_scheduler(self) -> Scheduler:
        self._context  # noqa: B018 (raises if there is none)
        assert self._scheduler is not None
        return self._scheduler

    # --- embeddings

    async def create_embedding(self, input: str | Sequence[str], model: str | None = None) -> Response:
        """Embeddings of one text or several, in the shape of OpenAI's response; see ``embed``."""
        vectors, n_tokens = await self.embed([input] if isinstance(input, str) else input, return_count=True)
        return responses.embeddings(vectors, n_tokens, self.model_path if model is None else model)

    async def embed(
        self,
        input: str | Sequence[str] | Sequence[Sequence[int]],
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """The embedding of a text, or a list of them. A model that says nothing about pooling gives means.

        The first call makes a context for embeddings beside the one for text.

        Args:
            normalize: scale to length 1.
            truncate: cut texts to ``n_embed_tokens`` tokens instead of refusing them.
            return_count: return (embeddings, number of tokens).
        """
        tokens = self._embedding_tokens(input, truncate, self.n_embed_tokens)
        vectors = await asyncio.to_thread(self._embed, tokens, normalize)
        result: Any = vectors[0] if isinstance(input, str) else vectors
        return (result, sum(map(len, tokens))) if return_count else result

    @property
    def n_embed_tokens(self) -> int:
        """Tokens that a text to embed may have: 2048, or 512 if the model says nothing about pooling."""
        limit = _MAX_EMBEDDED_TOKENS if self._says_pooling else _MAX_EMBEDDED_TOKENS_OF_TEXT_MODEL
        return min(limit, self.n_ctx())

    @property
    def _says_pooling(self) -> bool:
        return any(key.endswith(".pooling_type") for key in self._model.metadata())

    def _embed(self, tokens: list[list[int]], normalize: bool) -> list[Embedding]:
        with self._embedder_lock:
            if self._embedder is None:
                self._context  # noqa: B018 (raises if there is none)
                self._embedder = self._make_embedder()
            return embed_texts(self._embedder, tokens, normalize=normalize)

    def _make_embedder(self) -> Context:
        n_tokens = self.n_embed_tokens
        return Context(
            self._model,
            kv_presets()["f16"],
            n_ctx=n_tokens,
            n_batch=n_tokens,
            n_ubatch=n_tokens,
            n_seq_max=MAX_BATCH_TEXTS,
            kv_unified=True,
            embeddings=True,
            pooling_type=self._pooling_type if self._says_pooling or self._pooling_type != -1 else _MEAN_POOLING,
        )

    # --- state

    def stats(self) -> SchedulerStats:
        """What was done so far, and what is to do."""
        return self._running_scheduler.stats()

    def slot_tokens(self) -> list[int]:
        """Tokens that each slot holds."""
        return self._running_scheduler.slot_tokens()

    def close(self) -> None:
        """Ends what is running with ClosedError and frees all native memory; again does nothing."""
        if getattr(self, "_scheduler", None) is not None:
            self._running_scheduler.close()
        with self._embedder_lock:
            if self._embedder is not None:
                self._embedder.close()
        super().close()

    async def __aenter__(self) -> AsyncLlama:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await asyncio.to_thread(self.close)

    def __del__(self) -> None:
        if getattr(self, "_scheduler", None) is not None:
            self.close()
