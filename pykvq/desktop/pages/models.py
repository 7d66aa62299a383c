"""The models: what is here, what can be fetched, and which one is loaded."""

from __future__ import annotations

import asyncio

from nicegui import ui

from pykvq import catalog
from pykvq.desktop.desk import Desk
from pykvq.desktop.jobs import DOWNLOAD
from pykvq.desktop.library import PICKED, LibraryModel
from pykvq.desktop.pages.layout import dialog, frame, icon_button, tell, told
from pykvq.desktop.pages.load_dialog import LoadDialog
from pykvq.desktop.pages.progress import JobList, load_progress
from pykvq.errors import PykvqError
from pykvq.units import size_text


class ModelsPage:
    """Built for each visit."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        frame(desk, "/models", "Models")
        ui.label("Models").classes("text-h5").props('role="heading" aria-level="1"')
        self.loaded()
        self._add_row()
        JobList(desk, "Downloads", DOWNLOAD)
        self._cards = ui.column().classes("spread").props('role="list" aria-label="Models on this machine"')
        desk.model_changed.subscribe(self.loaded.refresh)
        desk.library_changed.subscribe(self._show_models)
        ui.timer(0, self._show_models, once=True)

    @ui.refreshable_method
    def loaded(self) -> None:
        """Builds the card of the loaded model."""
        entry = self._desk.model
        is_loading = entry is not None and entry.state == "loading"
        if entry is None or entry.state == "not-loaded":
            return
        with ui.card().classes("spread").props('aria-label="Loaded model" data-loaded'):
            with ui.row(wrap=False).classes("spread items-center"):
                ui.label(f"{entry.spec.name}: {entry.state}").classes("text-subtitle1 grow")
                name = "Cancel" if is_loading else "Unload"
                if entry.state != "failed":
                    ui.button(name, on_click=self._desk.unload).props("flat no-caps")
            if is_loading:
                load_progress(entry)
            elif entry.error:
                ui.label(entry.error).classes("error").props('role="alert" data-load-error')
            else:
                options = entry.options
                ui.label(f"{options.n_slots} of {options.n_ctx:,} tokens, {options.kv_quant}").classes("muted")

    def _add_row(self) -> None:
        with ui.row().classes("spread items-end"):
            self._name = ui.input("Path of a GGUF file, or hf:ORG/REPO:FILE").classes("grow").style("min-width: 14rem")
            self._name.on("keydown.enter", self._add)
            ui.button("Add", on_click=self._add).props("no-caps data-add")

    async def _add(self) -> None:
        text = (self._name.value or "").strip()
        if text.startswith("hf:"):
            self._desk.start_download(text)
            return
        with told():
            await asyncio.to_thread(self._desk.library.pick, text)
            self._name.set_value("")
            self._desk.library_changed.emit()

    async def _show_models(self) -> None:
        try:
            found = await asyncio.to_thread(self._desk.library.all)
        except PykvqError as error:
            tell(error)
            return
        self._cards.clear()
        with self._cards:
            if not found:
                demo = catalog.default_model()
                ui.label("There is no model on this machine yet.")
                ui.button(f"Fetch {demo.file}", on_click=lambda: self._desk.start_download("")).props("no-caps")
            for model in found:
                self._card(model)

    def _card(self, model: LibraryModel) -> None:
        with ui.card().classes("spread").props("role=listitem") as card:
            card.props["data-model"] = model.local.name  # which may have any characters
            with ui.row(wrap=False).classes("spread items-center"):
                ui.label(model.local.name).classes("text-subtitle1 grow").style("overflow-wrap: anywhere")
                ui.button("Load…", on_click=lambda: LoadDialog(self._desk, model)).props("no-caps data-open-load")
                icon_button("delete", "Remove", lambda: self._remove(model))
            if model.facts is None:
                ui.label(str(model.problem)).classes("error")
            else:
                ui.label(_facts(model)).classes("muted")

    def _remove(self, model: LibraryModel) -> None:
        async def remove() -> None:
            box.close()
            with told():
                await asyncio.to_thread(self._desk.library.remove, model.local)
                self._desk.library_changed.emit()

        is_picked = model.local.source == PICKED
        with dialog("Remove a model") as box, ui.card():
            what = "Leave this file out of the list? It is not deleted." if is_picked else "Delete this file?"
            ui.label(what).classes("text-subtitle1")
            ui.label(str(model.local.path)).style("overflow-wrap: anywhere")
            with ui.row():
                ui.button("Leave out" if is_picked else "Delete", on_click=remove, color="negative").props("no-caps")
                ui.button("Cancel", on_click=box.close).props("flat no-caps")


def _facts(model: LibraryModel) -> str:
    facts = model.facts
    assert facts is not None
    types = [name for name in facts.weight_types if name not in ("f32", "F32")]
    parts = [
        facts.architecture,
        f"{facts.n_params / 1e6:,.0f} million parameters",
        f"{types[0] if types else 'f32'}, {facts.bits_per_weight:.2f} bits each",
        size_text(facts.file_bytes),
        f"context {facts.context_length:,}" if facts.context_length else "context not told",
        "with chat template" if facts.has_chat_template else "no chat template",
        f"calibration {model.calibration}",
        model.local.source,
    ]
    return " · ".join(parts)
