"""The settings of a chat: its system prompt, and how the next token is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui import events, ui

from pykvq.desktop import sampling
from pykvq.desktop.pages.layout import dialog, told
from pykvq.desktop.sampling import NO_PRESET, Presets


class SettingsDialog:
    """Asks for both.

    Args:
        save: called with the system prompt and the sampling arguments.
    """

    def __init__(
        self,
        presets: Presets,
        values: dict[str, Any],
        system_prompt: str,
        save: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._presets = presets
        self._save = save
        with dialog("Settings of this chat") as self._dialog, ui.card().style("width: 32rem; max-width: 95vw"):
            self._prompt = (
                ui.textarea("System prompt", value=system_prompt).props("autogrow outlined").classes("spread")
            )
            self._preset = ui.select([], label="Sampling preset", on_change=self._take_preset).classes("spread")
            self._numbers = {}
            with ui.row():
                for name, label, low, high, step in sampling.FIELDS:
                    number = ui.number(label, value=values.get(name), min=low, max=high, step=step)
                    self._numbers[name] = number.style("width: 8rem").props('placeholder="default" stack-label')
            with ui.row(wrap=False).classes("spread items-end"):
                self._name = ui.input("Save these values as").classes("grow").props("dense")
                self._name.on("keydown.enter", self._keep_preset)
                ui.button("Save preset", on_click=self._keep_preset).props("flat no-caps")
                self._delete = ui.button("Delete preset", on_click=self._delete_preset).props("flat no-caps")
            self._show_presets(presets.name_of(values))
            with ui.row():
                ui.button("Save", on_click=self._store).props("no-caps data-save")
                ui.button("Cancel", on_click=self._dialog.close).props("flat no-caps")

    def _show_presets(self, chosen: str) -> None:
        self._preset.set_options([*self._presets.all(), NO_PRESET], value=chosen)
        self._delete.set_visibility(self._presets.is_own(chosen))

    def _take_preset(self, event: events.ValueChangeEventArguments[Any]) -> None:
        with told():
            values = self._presets.all().get(event.value)
            if values is not None:
                for name, number in self._numbers.items():
                    number.set_value(values.get(name))
            self._delete.set_visibility(self._presets.is_own(event.value))

    def _values(self) -> dict[str, Any]:
        return sampling.cleaned({name: number.value for name, number in self._numbers.items()})

    def _keep_preset(self) -> None:
        with told():
            name = self._presets.save(self._name.value or "", self._values())
            self._name.set_value("")
            self._show_presets(name)
            ui.notify(f"The preset {name!r} is kept")

    def _delete_preset(self) -> None:
        with told():
            self._presets.delete(self._preset.value)
            self._show_presets(NO_PRESET)

    def _store(self) -> None:
        with told():
            self._save(self._prompt.value or "", self._values())
            self._dialog.close()
