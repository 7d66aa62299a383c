"""The models of a server: loaded when they are asked for, unloaded when they are idle or memory is short."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from pykvq.async_llama import AsyncLlama
from pykvq.errors import PykvqError
from pykvq.predict import predict_kv
from pykvq.server.errors import ApiError
from pykvq.server.settings import LoadOptions, ModelSpec, ServerSettings

_logger = logging.getLogger("pykvq.server")


@dataclass
class ModelEntry:
    """A model and, while it is loaded, what answers for it.

    ``progress`` is what part of a load is done, from 0 to 1; ``is_unwanted`` ends it.
    """

    spec: ModelSpec
    options: LoadOptions = field(default_factory=LoadOptions)
    llm: AsyncLlama | None = None
    loading: asyncio.Task[AsyncLlama] | None = None
    error: str | None = None
    n_users: int = 0
    last_used: float = 0.0
    created: int = 0
    progress: float = 0.0
    is_unwanted: bool = False

    @property
    def state(self) -> str:
        """One of "loaded", "loading", "failed" and "not-loaded"."""
        if self.llm is not None:
            return "loaded"
        if self.loading is not None:
            return "loading"
        return "failed" if self.error else "not-loaded"

    @property
    def n_bytes(self) -> int:
        """Bytes of weights, KV cache and scratch; an estimate until the model is loaded."""
        if self.llm is None:
            return self.spec.path.stat().st_size
        info = self.llm.kv_info()
        return int(self.llm.n_bytes() + info["kv_bytes"] + info["compute_bytes"])


class ModelRegistry:
    """The models by name. Its methods must be called in one event loop."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.entries = {spec.name: _entry(spec, settings.load_options) for spec in settings.models}
        self.default_name = settings.models[0].name if settings.models else None
        self._load_lock = asyncio.Lock()  # one load at a time: each looks at the memory that is left
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to load the first model, and to unload idle ones."""
        if self.default_name is not None:
            self._begin_load(self.entries[self.default_name])
        if self.settings.idle_unload is not None:
            self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Unloads everything; running requests end with an error."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for name in list(self.entries):
            await self.remove(name)

    async def open(self, spec: ModelSpec, options: LoadOptions) -> AsyncLlama:
        """Loads a model in place of all that are loaded; requests that name none go to it from now on.

        Raises:
            PykvqError: it cannot be loaded. AbortedError: ``remove`` was called meanwhile.
        """
        for name in list(self.entries):
            await self.remove(name)
        self.entries[spec.name] = _entry(spec, options)
        self.default_name = spec.name
        return await self._begin_load(self.entries[spec.name])

    async def remove(self, name: str) -> None:
        """Forgets a model: its memory is freed, or its load ended, and requests that run end with an error."""
        entry = self.entries.pop(name)
        if entry.loading is not None:
            entry.is_unwanted = True
            await asyncio.wait([entry.loading])
        await self._unload(entry)

    async def kv_report(self) -> dict[str, Any]:
        """The KV caches of the loaded models as they are now: tiers, bytes, and the tokens that each slot holds."""
        report = {}
        for name, entry in list(self.entries.items()):
            llm = entry.llm
            if llm is not None:
                # the cache is read between two steps, which may take a moment to come
                info = await asyncio.to_thread(llm.kv_info)
                report[name] = {**info, "slot_tokens": llm.slot_tokens(), "stats": asdict(llm.stats())}
        return report

    def find(self, name: str | None) -> ModelEntry:
        """The entry of a model; None or "" is the default one.

        Raises:
            ApiError: 404, there is no such model.
        """
        entry = self.entries.get(name or self.default_name or "")
        if entry is None:
            listed = f"there are {', '.join(self.entries)}" if self.entries else "no model is loaded: load one first"
            raise ApiError(
                404,
                f"the model {name!r} does not exist; {listed}" if name else listed,
                code="model_not_found",
                param="model",
            )
        return entry

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[tuple[str, AsyncLlama]]:
        """A model's name and the loaded model, which stays loaded inside the block.

        Raises:
            ApiError: 404, no such model; 503, it is still being loaded or cannot be.
        """
        entry = self.find(name)
        entry.n_users += 1
        try:
            yield entry.spec.name, await self._loaded(entry)
        finally:
            entry.n_users -= 1
            entry.last_used = time.monotonic()

    async def _loaded(self, entry: ModelEntry) -> AsyncLlama:
        if entry.llm is not None:
            return entry.llm
        task = self._begin_load(entry)
        done, _ = await asyncio.wait([task], timeout=self.settings.load_wait)
        if not done:
            raise ApiError(
                503,
                f"the model {entry.spec.name!r} is being loaded: try again later",
                kind="service_unavailable_error",
                code="model_loading",
                retry_after=1,
            )
        try:
            return task.result()
        except PykvqError as error:
            raise ApiError(
                503,
                f"the model {entry.spec.name!r} cannot be loaded: {error}",
                kind="service_unavailable_error",
                code="model_load_failed",
            ) from error

    def _begin_load(self, entry: ModelEntry) -> asyncio.Task[AsyncLlama]:
        if entry.loading is None:
            entry.progress, entry.is_unwanted = 0.0, False
            entry.loading = asyncio.create_task(self._load(entry))
            entry.loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # read: no warning
        return entry.loading

    async def _load(self, entry: ModelEntry) -> AsyncLlama:
        started = time.monotonic()
        try:
            async with self._load_lock:
                await self._make_room(entry)
                entry.llm = await asyncio.to_thread(self._make_model, entry)
        except Exception as error:
            entry.error = str(error)
            _logger.error("cannot load %s: %s", entry.spec.name, error)
            raise
        finally:
            entry.loading = None
        entry.error = None
        entry.last_used = time.monotonic()
        _logger.info("loaded %s in %.1f s", entry.spec.name, time.monotonic() - started)
        return entry.llm

    def _make_model(self, entry: ModelEntry) -> AsyncLlama:
        def report(done: float) -> bool:
            entry.progress = done
            return not entry.is_unwanted

        return AsyncLlama(
            entry.spec.path,
            **asdict(entry.options),
            max_queue=self.settings.max_queue,
            timeout=self.settings.request_timeout,
            verbose=self.settings.verbose,
            progress=report,
            calibration_progress=report,
        )

    async def _make_room(self, entry: ModelEntry) -> None:
        """Unloads idle models, the least recently used first, until a new one fits the budget."""
        budget = self.settings.memory_budget
        if budget is None:
            return
        needed = entry.n_bytes + await asyncio.to_thread(self._predict_kv, entry)
        while True:
            loaded = [other for other in self.entries.values() if other.llm is not None]
            in_use = sum(other.n_bytes for other in loaded)
            if in_use + needed <= budget:
                return
            idle = sorted((other for other in loaded if not other.n_users), key=lambda other: other.last_used)
            if not idle:
                raise ApiError(
                    503,
                    f"the model {entry.spec.name!r} needs {needed >> 20} MiB, and {in_use >> 20} MiB of the budget of "
                    f"{budget >> 20} MiB are taken by models in use",
                    kind="service_unavailable_error",
                    code="out_of_memory",
                    retry_after=5,
                )
            await self._unload(idle[0])

    def _predict_kv(self, entry: ModelEntry) -> int:
        options = entry.options
        return options.n_slots * int(predict_kv(entry.spec.path, options.n_ctx, options.kv_quant)["kv_bytes"])

    async def _unload(self, entry: ModelEntry) -> None:
        llm, entry.llm = entry.llm, None
        if llm is not None:
            await asyncio.to_thread(llm.close)
            _logger.info("unloaded %s", entry.spec.name)

    async def _sweep(self) -> None:
        idle_unload = self.settings.idle_unload
        assert idle_unload is not None
        while True:
            await asyncio.sleep(min(1.0, idle_unload / 4))
            for entry in list(self.entries.values()):
                if entry.llm and not entry.n_users and time.monotonic() - entry.last_used >= idle_unload:
                    await self._unload(entry)


def _entry(spec: ModelSpec, options: LoadOptions) -> ModelEntry:
    return ModelEntry(spec, options, created=int(spec.path.stat().st_mtime))
