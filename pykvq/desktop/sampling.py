"""Sampling presets of chats."""

from __future__ import annotations

from typing import Any

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


def cleaned(values: dict[str, Any]) -> dict[str, Any]:
    """The values that were given, within their limits and of their types."""
    result: dict[str, Any] = {}
    for name, _, low, high, _ in FIELDS:
        value = values.get(name)
        if value is not None:
            value = min(max(value, low), high)
            result[name] = int(value) if name in _WHOLE else float(value)
    return result


def preset_of(values: dict[str, Any]) -> str:
    """The name of the preset that has these values, or "Own"."""
    return next((name for name, preset in PRESETS.items() if preset == values), "Own")
