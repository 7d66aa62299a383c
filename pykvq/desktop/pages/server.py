"""The server: whether other programs may use the model, how, and what they asked."""

from __future__ import annotations

import time
from dataclasses import asdict

from nicegui import ui

from pykvq.desktop.desk import Desk
from pykvq.desktop.pages.layout import frame, icon_button, told
from pykvq.server.serve import is_loopback

_REFRESH_SECONDS = 1.0
_SHOWN = 50
_STATS = {
    "n_slots": "slots",
    "n_busy": "at work",
    "n_queued": "waiting",
    "finished": "answers",
    "generated_tokens": "tokens generated",
    "prompt_tokens": "prompt tokens computed",
    "reused_tokens": "taken over from the cache",
}


class ServerPage:
    """Built for each visit."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._seen: tuple[object, ...] = ()
        frame(desk, "/server", "Server")
        ui.label("Server").classes("text-h5").props('role="heading" aria-level="1"')
        with ui.card().classes("spread"):
            ui.switch("Other programs may use the model", value=desk.switch.is_on, on_change=self._switch)
            with ui.row(wrap=False).classes("items-center"):
                address = f"{desk.url}/v1"
                ui.label(address).props("data-address").style("font-family: monospace")
                icon_button("content_copy", "Copy the address", lambda: ui.clipboard.write(address))
            ui.label("For any OpenAI client; any API key will do, unless one is set here.").classes("muted")
            if not is_loopback(desk.host):
                ui.label("Other machines can reach this address: set a key.").classes("error")
            with ui.row().classes("spread items-end"):
                self._key = ui.input("API key", value=next(iter(desk.switch.api_keys), ""), password=True)
                self._key.props('autocomplete="off"').classes("grow")
                ui.button("Set", on_click=self._set_key).props("no-caps")
        self.status()
        ui.timer(_REFRESH_SECONDS, self._refresh)

    @ui.refreshable_method
    def status(self) -> None:
        """Builds the counters and the log."""
        entry = self._desk.model
        if entry is not None and entry.llm is not None:
            with ui.card().classes("spread"):
                stats = asdict(entry.llm.stats())
                parts = [f"{stats[name]:,} {title}" for name, title in _STATS.items() if name in stats]
                ui.label(f"{entry.spec.name}: {' · '.join(parts)}")
        with ui.card().classes("spread"):
            ui.label("Requests").classes("text-subtitle1")
            ui.label("What they contain is neither shown nor kept.").classes("muted")
            requests = list(self._desk.switch.requests)[-_SHOWN:]
            with ui.column().style("gap: .1rem; font-family: monospace").props("data-requests"):
                for each in reversed(requests):
                    when = time.strftime("%H:%M:%S", time.localtime(each.time))
                    ui.label(f"{when} {each.status} {each.method} {each.path[:80]} {1000 * each.seconds:.0f} ms")
            if not requests:
                ui.label("None yet")

    def _refresh(self) -> None:
        entry = self._desk.model
        stats = entry.llm.stats() if entry is not None and entry.llm is not None else None
        requests = self._desk.switch.requests
        seen = (stats, len(requests), requests[-1] if requests else None)
        if seen != self._seen:
            self._seen = seen
            self.status.refresh()

    def _switch(self, event: object) -> None:
        with told():
            self._desk.change_server(is_on=bool(getattr(event, "value", True)))

    def _set_key(self) -> None:
        with told():
            key = (self._key.value or "").strip()
            self._desk.change_server(api_keys=(key,) if key else ())
            ui.notify("The key is set" if key else "No key is needed now")
