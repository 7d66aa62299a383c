"""The ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware

from pykvq import __version__
from pykvq.server.context import ServerContext
from pykvq.server.errors import add_error_handlers
from pykvq.server.metrics import CountingMiddleware, ModelCollector
from pykvq.server.middleware import ApiKeyMiddleware, BodyLimitMiddleware
from pykvq.server.registry import ModelRegistry
from pykvq.server.routes import embeddings, generation, models, responses, service
from pykvq.server.settings import ServerSettings


def create_app(settings: ServerSettings) -> FastAPI:
    """The application for some models; the first one begins to load when the application starts."""
    app = FastAPI(title="pykvq", version=__version__, lifespan=_lifespan, docs_url=None, redoc_url=None)
    app.state.settings = settings
    app.state.metrics = CollectorRegistry()
    for router in (generation.router, responses.router, embeddings.router, models.router, service.router):
        app.include_router(router)
    add_error_handlers(app)
    # the last one added is the first that a request passes
    app.add_middleware(CountingMiddleware, registry=app.state.metrics)
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body)
    if settings.api_keys:
        app.add_middleware(ApiKeyMiddleware, api_keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    registry = ModelRegistry(app.state.settings)
    app.state.context = ServerContext(app.state.settings, registry)
    collector = ModelCollector(registry)
    app.state.metrics.register(collector)
    registry.start()
    try:
        yield
    finally:
        await registry.close()
        app.state.metrics.unregister(collector)
