"""The load dialog: how a model is loaded, and beside it what that takes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from nicegui import ui

from pykvq.desktop.desk import Desk
from pykvq.desktop.forecast import Forecast, Forecaster
from pykvq.desktop.library import LibraryModel
from pykvq.desktop.pages.layout import COLORS, dialog, told
from pykvq.errors import PykvqError
from pykvq.kv_config import DEFAULT_PRESET, kv_presets
from pykvq.measured import warning
from pykvq.predict import available_device_memory
from pykvq.server.settings import LoadOptions
from pykvq.units import size_text

_STEP = 256
_DEFAULT_CTX = 4096
_TIERS = "own tiers"
_GREY, _LIGHT_GREY = "#6b7780", "#aab4bb"


class LoadDialog:
    """Asks for options, and loads."""

    def __init__(self, desk: Desk, model: LibraryModel) -> None:
        self._desk = desk
        self._model = model
        self._forecaster: Forecaster | None = None
        self._task: asyncio.Task[None] | None = None
        limit = (model.facts.context_length if model.facts else None) or _DEFAULT_CTX
        with dialog(f"Load {model.local.name}") as self._dialog, ui.card().style("width: 44rem; max-width: 96vw"):
            ui.label(f"Load {model.local.name}").classes("text-h6")
            self._inputs(max(limit, _STEP))
            ui.separator()
            self._memory = ui.column().classes("spread").props('role="status" aria-label="Memory" data-memory')
            self._force = ui.switch("Load it even if it does not fit", on_change=self._changed)
            self._force.set_visibility(False)
            with ui.row():
                self._button = ui.button("Load", on_click=self._load).props("no-caps data-load")
                ui.button("Cancel", on_click=self._dialog.close).props("flat no-caps")
        self._dialog.on("hide", self._close)
        self._changed()

    def _inputs(self, limit: int) -> None:
        last = self._desk.library.last_load()
        before = last[1] if last is not None and last[0] == self._model.local.path else LoadOptions(n_slots=1)
        start = min(before.n_ctx or limit, limit)
        ui.label("Context (tokens of a conversation)")
        with ui.row(wrap=False).classes("spread items-center"):
            slider = ui.slider(min=min(_STEP, limit), max=limit, step=_STEP, value=start).classes("grow")
            slider.props('aria-label="Context slider"')
            self._ctx = ui.number(value=start, min=1, max=limit, precision=0, on_change=self._changed)
            self._ctx.props('aria-label="Context" dense').style("width: 6.5rem").bind_value(slider)
        with ui.row().classes("items-end"):
            presets = list(kv_presets())
            known = before.kv_quant in presets
            self._kv = ui.select(
                [*presets, _TIERS],
                value=before.kv_quant if known else _TIERS,
                label="KV cache",
                on_change=self._changed,
            ).style("width: 8rem")
            self._tiers = ui.input(
                "Tiers", value="f16:128+q4_ve" if known else before.kv_quant, on_change=self._changed
            ).props("debounce=300")
            self._slots = ui.number("Parallel chats", value=before.n_slots, min=1, max=16, on_change=self._changed)
            self._threads = ui.number("Threads", value=before.n_threads, min=1, max=512, placeholder="cores")
            self._layers = ui.number("GPU layers", value=before.n_gpu_layers, min=-1, max=999, on_change=self._changed)
            for number in (self._slots, self._threads, self._layers):
                number.style("width: 7rem").props("stack-label")
            self._layers.set_visibility(available_device_memory() > 0)

    def _options(self) -> LoadOptions:
        kv = self._tiers.value if self._kv.value == _TIERS else self._kv.value
        return LoadOptions(
            kv_quant=(kv or DEFAULT_PRESET).strip().lower(),
            n_slots=int(self._slots.value or 1),
            n_ctx=int(self._ctx.value or _STEP),
            n_threads=int(self._threads.value) if self._threads.value else None,
            n_gpu_layers=int(self._layers.value or 0),
            force=bool(self._force.value),
        )

    def _changed(self) -> None:
        self._tiers.set_visibility(self._kv.value == _TIERS)
        self._button.disable()  # until it is known whether this fits
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._forecast())

    async def _forecast(self) -> None:
        await asyncio.sleep(0.1)
        options = self._options()
        try:
            forecast = await asyncio.shield(asyncio.to_thread(self._computed, options))
        except PykvqError as error:
            self._show_problem(str(error))
            return
        with self._memory:
            self._show(forecast, options)

    def _computed(self, options: LoadOptions) -> Forecast:
        if self._forecaster is None:
            self._forecaster = Forecaster(self._model.local.path)
        return self._forecaster.forecast(options)

    def _show_problem(self, text: str) -> None:
        self._memory.clear()
        with self._memory:
            ui.label(text).classes("error")

    def _show(self, forecast: Forecast, options: LoadOptions) -> None:
        parts = [("weights", forecast.weights, _GREY)]
        parts += [(f"KV {name}", size, color) for (name, size), color in zip(forecast.tiers, COLORS, strict=False)]
        parts.append(("buffers", forecast.buffers, _LIGHT_GREY))
        scale = max(forecast.total, forecast.total_f16, 1)
        self._memory.clear()
        with self._memory:
            memory_bar(parts, scale)
            ui.label(
                f"needs {size_text(forecast.total)}; the same in F16 {size_text(forecast.total_f16)}; "
                f"{size_text(forecast.available)} are free"
            ).props("data-needs")
            if forecast.device:
                ui.label(f"{size_text(forecast.device)} on the GPU, {size_text(forecast.available_device)} free there")
            ui.label(_cost(forecast, options)).classes("muted")
            if not forecast.fits:
                ui.label("This does not fit: take a shorter context or a smaller KV format.").classes("error")
        self._force.set_visibility(not forecast.fits)
        self._button.set_enabled(forecast.fits or options.force)

    async def _load(self) -> None:
        options = self._options()
        self._dialog.close()
        await load_model(self._desk, self._model.local.path, options)

    def _close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        forecaster, self._forecaster = self._forecaster, None
        if forecaster is not None:
            forecaster.close()


async def load_model(desk: Desk, path: Path, options: LoadOptions) -> None:
    """Loads a model, and tells what is wrong if that fails."""
    with told():
        await desk.load(path, options)


def _cost(forecast: Forecast, options: LoadOptions) -> str:
    measured = forecast.measured
    if measured is None:
        return f"What {options.kv_quant} costs on this model is not measured yet: see the Fidelity page."
    problem = warning(options.kv_quant, measured)
    if measured["kld_mean"] is None:
        return f"Measured on this model: {problem}."
    text = f"Measured on this model: KLD {measured['kld_mean']:.4f}, same-top {100 * measured['same_top']:.1f} %"
    return f"{text}. Note: {problem}." if problem else text


def memory_bar(parts: list[tuple[str, int, str]], scale: int) -> None:
    """A stacked bar of (name, bytes, color), and what its parts are."""
    text = ", ".join(f"{name} {size_text(size)}" for name, size, _ in parts)
    with ui.element("div").classes("bar").props(f'role="img" aria-label="{text}"'):
        for _, size, color in parts:
            ui.element("div").style(f"width: {100 * size / scale:.2f}%; background: {color}")
    with ui.row().style("gap: .2rem 1rem"):
        for name, size, color in parts:
            with ui.row(wrap=False).classes("items-center").style("gap: 0"):
                ui.element("span").classes("key").style(f"background: {color}")
                ui.label(f"{name} {size_text(size)}").classes("muted")
