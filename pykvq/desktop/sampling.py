"""Sampling of chats: the values, their limits, and the presets that come with the app or that the user saved."""

from __future__ import annotations

from typing import Any

from pykvq.desktop.records import Records
from pykvq.errors import InvalidArgumentError

# arguments of create_chat_completion: name, label, smallest and largest value, step
FIELDS: tuple[tuple[str, str, float, float, float], ...] = (
    ("temperature", "Temperature", 0.0, 2.0, 0.05),
    ("top_p", "Top p", 0.01, 1.0, 0.01),
    ("top_k", "Top k", 0, 1000, 1),
    ("min_p", "Min p", 0.0, 1.0, 0.01),
    ("repeat_penalty", "Repeat penalty", 1.0, 2.0, 0.05),
    ("max_tokens", "Most tokens", 1, 1 << 20, 1),
    ("seed", "Seed", 0, 2**31 - 1, 1),
)
_WHOLE = ("top_k", "max_tokens", "seed")
PRESETS: dict[str, dict[str, Any]] = {
    "Balanced": {"temperature": 0.7},
    "Precise": {"temperature": 0.0},
    "Creative": {"temperature": 1.1, "min_p": 0.05, "top_p": 1.0},
}
DEFAULT_PRESET = "Balanced"
NO_PRESET = "Own values"
_SETTING = "sampling_presets"
_NAME_CHARACTERS = 60


def cleaned(values: dict[str, Any]) -> dict[str, Any]:
    """The values that were given, within their limits and of their types."""
    result: dict[str, Any] = {}
    for name, _, low, high, _ in FIELDS:
        value = values.get(name)
        if value is not None:
            value = min(max(value, low), high)
            result[name] = int(value) if name in _WHOLE else float(value)
    return result


class Presets:
    """Sampling values by name. A chat keeps values, so that it stays as it was when a preset changes or goes."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def all(self) -> dict[str, dict[str, Any]]:
        """Those of the app, then the user's by name."""
        return {**PRESETS, **dict(sorted(self._saved().items()))}

    def is_own(self, name: str) -> bool:
        """Whether the user saved it."""
        return name in self._saved()

    def name_of(self, values: dict[str, Any]) -> str:
        """The name of the preset that has these values, or ``NO_PRESET``."""
        return next((name for name, preset in self.all().items() if cleaned(preset) == cleaned(values)), NO_PRESET)

    def save(self, name: str, values: dict[str, Any]) -> str:
        """Keeps values by a name, in place of those that had it; returns the name without spaces around it.

        Raises:
            InvalidArgumentError: the name is empty, too long, or one of the app's. StorageError.
        """
        name = " ".join(name.split())
        if not name or len(name) > _NAME_CHARACTERS:
            raise InvalidArgumentError(f"a preset needs a name of 1 to {_NAME_CHARACTERS} characters")
        if name in PRESETS or name == NO_PRESET:
            raise InvalidArgumentError(f"{name!r} is a name of the app's own: give the preset another one")
        self._records.set(_SETTING, {**self._saved(), name: cleaned(values)})
        return name

    def delete(self, name: str) -> None:
        """Forgets a preset of the user's.

        Raises:
            StorageError: it cannot be written.
        """
        self._records.set(_SETTING, {key: values for key, values in self._saved().items() if key != name})

    def _saved(self) -> dict[str, dict[str, Any]]:
        return dict(self._records.setting(_SETTING, {}))
