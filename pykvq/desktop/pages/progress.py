"""Long work: how far it is, and how to end it or let it go on."""

from __future__ import annotations

from nicegui import ui

from pykvq.desktop.desk import Desk
from pykvq.desktop.jobs import DOWNLOAD, Job
from pykvq.desktop.pages.layout import icon_button

_REFRESH_SECONDS = 0.4


class JobList:
    """The jobs of a kind. Those that can go on where they were have a button for it."""

    def __init__(self, desk: Desk, title: str, kind: str) -> None:
        self._desk = desk
        self._title = title
        self._kind = kind
        self._bars: dict[int, ui.linear_progress] = {}
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
                ui.label(f"{job.title}: {job.state}")
                if job.error:
                    ui.label(job.error).classes("error").props('role="alert"')
                if job.state == "running":
                    bar = self._bars[job.number] = ui.linear_progress(job.progress, show_value=False)
                    bar.props["aria-label"] = job.title
            if job.state == "running":
                icon_button("pause" if self._kind == DOWNLOAD else "cancel", "End", job.cancel)
            elif job.state in ("cancelled", "failed"):
                icon_button("play_arrow", "Go on", lambda: self._desk.restart_job(job))
            if job.state != "running":
                icon_button("close", "Remove from the list", lambda: self._desk.drop_job(job))

    def _show_progress(self) -> None:
        for job in self._desk.jobs:
            if job.number in self._bars:
                self._bars[job.number].set_value(round(job.progress, 3))
