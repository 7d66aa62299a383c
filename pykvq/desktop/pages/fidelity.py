"""Fidelity and calibration: what a KV format costs on a model, measured here."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from nicegui import ui

from pykvq.calibration import calibrate
from pykvq.calibration.automatic import positions_for
from pykvq.desktop.desk import Desk
from pykvq.desktop.jobs import Job
from pykvq.desktop.pages.layout import COLORS, GREY, axis, frame, told
from pykvq.desktop.pages.progress import JobList
from pykvq.errors import InvalidArgumentError
from pykvq.kv_config import kv_presets
from pykvq.quality import DEFAULT_CHUNKS, DEFAULT_CTX, fidelity

_KIND = "measurement"
_FORMATS = ["f16", "q8_0", "q4_0", "ultra4"]
_COLUMNS = ("Format", "Bits / element", "Mean KLD", "Same top", "Perplexity")


class FidelityPage:
    """Built for each visit."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        frame(desk, "/fidelity", "Fidelity")
        ui.label("Fidelity and calibration").classes("text-h5").props('role="heading" aria-level="1"')
        ui.label(
            "KV formats are compared with an F16 cache on the same text: KLD (how far the predictions move: small is "
            "good) and same-top (how often the likeliest token stays the same). "
            "The row f16 is the noise of the model's own quantization: nothing can be below it."
        ).classes("muted")
        with ui.row().classes("spread items-end"):
            self._model = (
                ui.select({}, label="Model", on_change=self._refresh).style("min-width: 14rem").classes("grow")
            )
            self._formats = ui.select(list(kv_presets()), value=_FORMATS, multiple=True, label="KV formats")
            self._formats.style("min-width: 12rem")
            self._n_ctx = ui.number("Tokens", value=DEFAULT_CTX, min=128, max=65536).style("width: 6rem")
            self._n_chunks = ui.number("Texts", value=DEFAULT_CHUNKS, min=1, max=64).style("width: 5rem")
        self._is_exact = ui.switch("Without that noise: decode the weights to F32 first (a temporary copy)")
        with ui.row():
            ui.button("Measure", on_click=self._measure).props("no-caps data-measure")
            ui.button("Calibrate anew", on_click=self._calibrate).props("no-caps outline")
        JobList(desk, "Measurements", _KIND)
        self.results()
        desk.jobs_changed.subscribe(self.results.refresh)
        ui.timer(0, self._find_models, once=True)

    async def _find_models(self) -> None:
        with told():
            found = await asyncio.to_thread(self._desk.library.all)
            options = {str(model.local.path): model.local.name for model in found if model.facts is not None}
            entry = self._desk.model
            loaded = None if entry is None else str(entry.spec.path)
            self._model.set_options(options, value=loaded if loaded in options else next(iter(options), None))

    @ui.refreshable_method
    def results(self) -> None:
        """Builds the plot and the table of what was measured."""
        path = self._model.value
        rows = self._desk.records.fidelity_rows(Path(path)) if path else {}
        if not rows:
            ui.label("Nothing is measured for this model yet.").classes("muted")
            return
        shown = sorted(rows.values(), key=lambda row: -row["bits_per_element"])
        with ui.card().classes("spread"):
            ui.echart(_chart(shown)).style("height: 18rem").classes("spread").props(
                'role="img" aria-label="Mean KLD by bits"'
            )
            with ui.element("div").classes("scroll"):
                _table(shown)

    def _refresh(self) -> None:
        self.results.refresh()

    def _path(self) -> Path:
        if not self._model.value:
            raise InvalidArgumentError("choose a model first: the Models page brings one here")
        return Path(self._model.value)

    def _measure(self) -> None:
        with told():
            path, formats = self._path(), list(self._formats.value)
            n_ctx, n_chunks = int(self._n_ctx.value or DEFAULT_CTX), int(self._n_chunks.value or 1)
            is_exact = bool(self._is_exact.value)
            if not formats:
                raise InvalidArgumentError("choose one KV format at least")

            def work(job: Job) -> None:
                result = fidelity(
                    path,
                    formats,
                    n_ctx=n_ctx,
                    n_chunks=n_chunks,
                    float_weights=is_exact,
                    progress=job.require,
                    calibration_progress=job.report,
                )
                self._desk.records.add_fidelity(path, result)

            self._desk.start_job(_KIND, f"Fidelity of {path.stem}", work)

    def _calibrate(self) -> None:
        with told():
            path = self._path()
            entry = self._desk.model
            is_loaded = entry is not None and entry.spec.path == path
            n_ctx = entry.options.n_ctx if entry is not None and is_loaded else DEFAULT_CTX

            def work(job: Job) -> None:
                calibrate(os.fspath(path), n_positions=positions_for(n_ctx), progress=job.report)
                self._desk.in_loop(self._desk.library_changed.emit)

            self._desk.start_job(_KIND, f"Calibration of {path.stem}", work)


def _chart(rows: list[dict[str, Any]]) -> dict[str, Any]:
    data = [
        {
            "value": [row["bits_per_element"], max(row["kld_mean"], 1e-6)],
            "name": row["name"],
            "label": {"position": "top" if i % 2 else "bottom"},  # neighbours do not cover one another
        }
        for i, row in enumerate(rows)
    ]
    return {
        "animation": False,
        "grid": {"left": 65, "right": 70, "top": 25, "bottom": 45},
        "xAxis": {**axis("bits an element"), "nameLocation": "middle", "nameGap": 28},
        "yAxis": {**axis("mean KLD"), "type": "log"},
        "series": [
            {
                "type": "scatter",
                "symbolSize": 12,
                "data": data,
                "itemStyle": {"color": COLORS[1]},
                "label": {"show": True, "formatter": "{b}", "color": GREY},
            }
        ],
    }


def _table(rows: list[dict[str, Any]]) -> None:
    with ui.element("table").classes("numbers"):
        with ui.element("thead"), ui.element("tr"):
            for title in _COLUMNS:
                with ui.element("th"):
                    ui.label(title)
        with ui.element("tbody"):
            for row in rows:
                values = (
                    row["name"],
                    f"{row['bits_per_element']:.2f}",
                    f"{row['kld_mean']:.5f}",
                    f"{100 * row['same_top']:.1f} %",
                    f"{row['ppl']:.3f} ({100 * row['ppl_change']:+.2f} %)",
                )
                with ui.element("tr").props(f'data-fidelity="{row["name"]}"'):
                    for value in values:
                        with ui.element("td"):
                            ui.label(value)
