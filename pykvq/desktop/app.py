"""The ASGI application: the server's API and the app's pages on one engine."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from nicegui import ui

from pykvq.desktop.desk import Desk
from pykvq.desktop.guard import Guard
from pykvq.desktop.pages import add_pages
from pykvq.desktop.pages.icon import ICON
from pykvq.server.app import create_app
from pykvq.server.settings import ServerSettings


def create_desktop_app(desk: Desk, settings: ServerSettings, host: str) -> Guard:
    """The application; ``desk.port`` must be set before the first request. Make it once in a process."""
    app = create_app(settings)
    guard = Guard(app, host, lambda: desk.port, list(app.routes), desk.switch)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with inner(app):
            desk.start(app.state.context.registry)
            gc.freeze()  # else Python looks for garbage among all modules now and then, which takes 0.2 s
            try:
                yield
            finally:
                await desk.close()

    app.router.lifespan_context = lifespan
    add_pages(desk)
    ui.run_with(
        app,
        title="pykvq",
        favicon=ICON,
        dark=None,
        tailwind=False,
        binding_refresh_interval=None,
        reconnect_timeout=30.0,
        show_welcome_message=False,
    )
    return guard
