"""The settings of a chat: its system prompt, and how the next token is drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui import events, ui

from pykvq.desktop import sampling
from pykvq.desktop.pages.layout import told


class SettingsDialog:
    """Asks for both.

    Args:
        save: called with the system prompt and the sampling arguments.
    """

    def __init__(self, values: dict[str, Any], system_prompt: str, save: Callable[[str, dict[str, Any]], None]) -> None:
        self._save = save
        with ui.dialog(value=True) as self._dialog, ui.card().style("width: 32rem; max-width: 95vw"):
            self._prompt = (
                ui.textarea("System prompt", value=system_prompt).props("autogrow outlined").classes("spread")
            )
            options = [*sampling.PRESETS, "Own"]
            ui.select(options, value=sampling.preset_of(values), label="Sampling", on_change=self._take_preset).classes(
                "spread"
            )
            self._numbers = {}
            with ui.row():
                for name, label, low, high, step in sampling.FIELDS:
                    number = ui.number(label, value=values.get(name), min=low, max=high, step=step)
                    self._numbers[name] = number.style("width: 8rem").props('placeholder="default" stack-label')
            with ui.row():
                ui.button("Save", on_click=self._store).props("no-caps")
                ui.button("Cancel", on_click=self._dialog.close).props("flat no-caps")

    def _take_preset(self, event: events.ValueChangeEventArguments[Any]) -> None:
        for name, number in self._numbers.items():
            if event.value in sampling.PRESETS:
                number.set_value(sampling.PRESETS[event.value].get(name))

    def _store(self) -> None:
        with told():
            values = {name: number.value for name, number in self._numbers.items()}
            self._save(self._prompt.value or "", sampling.cleaned(values))
            self._dialog.close()
