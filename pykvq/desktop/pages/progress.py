"""Long work: how far it is, and how to end it or let it go on."""

from __future__ import annotations

from nicegui import ui

from pykvq.desktop.desk import Desk
from pykvq.desktop.jobs import DOWNLOAD, Job
from pykvq.desktop.pages.layout import icon_button
from pykvq.server.registry import ModelEntry

_REFRESH_SECONDS = 0.4
_DOWNLOAD_STATES = {"running": "being fetched", "cancelled": "paused", "done": "fetched"}


def load_progress(entry: ModelEntry) -> None:
    """A bar for a model that is being loaded, which also counts its calibration at the first load."""
    bar = ui.linear_progress(entry.progress, show_value=False).props('aria-label="Loading"')
    ui.timer(_REFRESH_SECONDS, lambda: bar.set_value(round(entry.progress, 3)))


class JobList:
    """The jobs of a kind. Those that can go on where they were have a button for it."""

    def __init__(self, desk: Desk, title: str, kind: str) -> None:
        self._desk = desk
        self._title = title
        self._kind = kind
        self._bars: dict[int, tuple[ui.label, ui.linear_progress]] = {}
        self._timer = ui.timer(_REFRESH_SECONDS, self._show_progress, active=False)
        self.show()
        desk.jobs_changed.subscribe(self.show.refresh)

    @ui.refreshable_method
    def show(self) -> None:
        """Builds the list."""
        jobs = [job for job in self._desk.jobs if job.kind == self._kind]
        self._bars = {}
        self._timer.active = any(job.state == "running" for job in jobs)
        if not jobs:
            return
        with ui.card().classes("spread").props(f'aria-label="{self._title}"'):
            for job in jobs:
                self._row(job)

    def _row(self, job: Job) -> None:
        with ui.row(wrap=False).classes("spread items-center").props(f'data-job="{job.state}"'):
            with ui.column().classes("grow").style("gap: .2rem"):
                title = ui.label(self._title_of(job))
                if job.error:
                    ui.label(job.error).classes("error").props('role="alert"')
                if job.state == "running":
                    bar = ui.linear_progress(job.progress, show_value=False)
                    bar.props["aria-label"] = job.title
                    self._bars[job.number] = title, bar
            if job.state == "running" and not job.is_cancelled:
                icon_button("pause" if self._kind == DOWNLOAD else "cancel", "End", job.cancel)
            elif job.state in ("cancelled", "failed"):
                icon_button("play_arrow", "Go on", lambda: self._desk.restart_job(job))
            if job.state != "running":
                icon_button("close", "Remove from the list", lambda: self._desk.drop_job(job))

    def _title_of(self, job: Job) -> str:
        if job.state == "running" and job.is_cancelled:
            return f"{job.title}: is being ended…"
        state = _DOWNLOAD_STATES.get(job.state, job.state) if self._kind == DOWNLOAD else job.state
        return f"{job.title}: {state}" + (f", {100 * job.progress:.0f} %" if job.state == "running" else "")

    def _show_progress(self) -> None:
        for job in self._desk.jobs:
            if job.number in self._bars:
                title, bar = self._bars[job.number]
                title.set_text(self._title_of(job))
                bar.set_value(round(job.progress, 3))
