"""Counters for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pykvq.server.registry import ModelRegistry

# name of a field of SchedulerStats -> what it counts
_COUNTERS = {
    "prompt_tokens": "Prompt tokens computed",
    "reused_tokens": "Prompt tokens taken over from the KV cache",
    "generated_tokens": "Tokens generated",
    "finished": "Answers that were completed",
    "cancelled": "Requests that were cancelled",
    "failed": "Requests that failed",
    "decode_calls": "Batches computed",
    "decode_seconds": "Seconds spent computing batches",
}
_GAUGES = {
    "n_slots": "Slots",
    "n_busy": "Slots at work",
    "n_queued": "Requests that wait for a slot",
}


class ModelCollector(Collector):
    """Reads the counters of the loaded models when they are asked for."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        loaded = [(name, entry.llm) for name, entry in self._models.entries.items() if entry.llm is not None]
        for field, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"pykvq_{field}", text, labels=["model"])
            for name, llm in loaded:
                counter.add_metric([name], getattr(llm.stats(), field))
            yield counter
        for field, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"pykvq_{field.removeprefix('n_')}", text, labels=["model"])
            for name, llm in loaded:
                gauge.add_metric([name], getattr(llm.stats(), field))
            yield gauge
        kv_bytes = GaugeMetricFamily("pykvq_model_bytes", "Bytes of weights, KV cache and scratch", labels=["model"])
        for name, _ in loaded:
            kv_bytes.add_metric([name], self._models.entries[name].n_bytes)
        yield kv_bytes


class CountingMiddleware:
    """Counts requests by route and status, and the seconds until a response begins."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter("pykvq_http_requests", "HTTP requests", ["path", "status"], registry=registry)
        self._seconds = Histogram("pykvq_http_seconds", "Seconds until the response began", ["path"], registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        started = time.perf_counter()

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                # the pattern of the route, not the path, of which there may be any number
                path = getattr(scope.get("route"), "path", "other")
                self._requests.labels(path, str(message["status"])).inc()
                self._seconds.labels(path).observe(time.perf_counter() - started)
            await send(message)

        await self._app(scope, receive, counting)
