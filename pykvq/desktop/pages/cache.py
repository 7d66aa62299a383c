"""The cache: what its tiers hold and take, while a chat runs."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from pykvq.desktop.desk import Desk
from pykvq.desktop.forecast import tier_name
from pykvq.desktop.pages.layout import COLORS, axis, frame
from pykvq.desktop.pages.load_dialog import memory_bar
from pykvq.kv_config import DEFAULT_SINKS, parse_kv_config
from pykvq.units import size_text

_REFRESH_SECONDS = 1.0
_COLUMNS = ("Tier", "Tokens", "Room", "Bytes", "Bits / element", "Requantized into it")


class CachePage:
    """Built for each visit; reads what GET /kv tells."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._shown: dict[str, Any] | None = None
        self._n_points = -1
        frame(desk, "/cache", "Cache")
        ui.label("KV cache").classes("text-h5").props('role="heading" aria-level="1"')
        self.tiers()
        with ui.card().classes("spread"):
            ui.label("Speed against length of the context").classes("text-subtitle1")
            self._chart = ui.echart(_chart([])).style("height: 16rem").classes("spread")
            self._chart.props('role="img" aria-label="Tokens a second against tokens of context"')
        ui.timer(_REFRESH_SECONDS, self._refresh)

    async def _refresh(self) -> None:
        report = await self._desk.registry.kv_report()
        if report != self._shown:
            self._shown = report
            self.tiers.refresh()
        points = list(self._desk.speeds)
        if len(points) != self._n_points:
            self._n_points = len(points)
            self._chart.options["series"][0]["data"] = points
            self._chart.update()

    @ui.refreshable_method
    def tiers(self) -> None:
        """Builds the cards of the loaded models."""
        if not self._shown:
            ui.label("No model is loaded: load one, and write in a chat.")
        for name, info in (self._shown or {}).items():
            with ui.card().classes("spread") as card:
                card.props["aria-label"] = f"Cache of {name}"
                self._card(name, info)

    def _card(self, name: str, info: dict[str, Any]) -> None:
        tiers = info["tiers"]
        ui.label(f"{name} · {info['kv_quant']}").classes("text-subtitle1")
        parts = [(_tier_title(tier), tier["n_bytes"], COLORS[i]) for i, tier in enumerate(tiers)]
        ui.label("Memory, against the same cache in F16").classes("muted")
        memory_bar(parts, max(info["kv_bytes_f16"], info["kv_bytes"]))
        ui.label(
            f"{size_text(info['kv_bytes'])} instead of {size_text(info['kv_bytes_f16'])} in F16 ({info['ratio']:.3f}), "
            f"{info['bits_per_element']:.2f} bits an element, all included"
        ).props("data-kv-total")
        ui.label("Tokens, the oldest on the left").classes("muted")
        _tokens_bar(info)
        with ui.element("div").classes("scroll"):
            _table(tiers)
        ui.label(_aside(info)).classes("muted")


def _tokens_bar(info: dict[str, Any]) -> None:
    """The tokens as they lie in the conversation: sinks, then tiers from old to young, and the room that is left."""
    tiers = info["tiers"]
    n_sinks = min(DEFAULT_SINKS, tiers[0]["n_used"]) if len(tiers) > 1 else 0
    room = max(info["n_ctx"] * len(info["slot_tokens"]), 1)
    parts = [("sinks", n_sinks, "#c0392b")]
    for i in reversed(range(len(tiers))):
        n_used = tiers[i]["n_used"] - (n_sinks if i == 0 else 0)
        parts.append((f"{'window ' if i == 0 and len(tiers) > 1 else ''}{_tier_title(tiers[i])}", n_used, COLORS[i]))
    text = ", ".join(f"{name} {count:,}" for name, count, _ in parts if count)
    with ui.element("div").classes("bar").props(f'role="img" aria-label="{text or "empty"}"'):
        for _, count, color in parts:
            if count:
                ui.element("div").style(f"width: {100 * count / room:.3f}%; min-width: 6px; background: {color}")
    ui.label(f"{info['n_tokens']:,} of {room:,} tokens: {text or 'empty'}").classes("muted").props("data-kv-tokens")


def _table(tiers: list[dict[str, Any]]) -> None:
    with ui.element("table").classes("numbers"):
        with ui.element("thead"), ui.element("tr"):
            for title in _COLUMNS:
                _cell("th", title)
        with ui.element("tbody"):
            for i, tier in enumerate(tiers):
                with ui.element("tr").props(f'data-tier="{i}"'):
                    _cell("td", _tier_title(tier))
                    for name in ("n_used", "n_capacity", "n_bytes"):
                        _cell("td", f"{tier[name]:,}").props(f'data-field="{name}" data-value="{tier[name]}"')
                    _cell("td", f"{tier['bits_per_element']:.2f}")
                    _cell("td", f"{tier['n_requantized']:,}").props(
                        f'data-field="n_requantized" data-value="{tier["n_requantized"]}"'
                    )


def _cell(tag: str, text: str) -> ui.element:
    with ui.element(tag) as cell:
        ui.label(text)
    return cell


def _tier_title(tier: dict[str, Any]) -> str:
    return tier_name(tier["type_k"], tier["type_v"])


def _aside(info: dict[str, Any]) -> str:
    kv = parse_kv_config(info["tiers_spec"])
    parts = []
    if kv.is_tiered:
        window = kv.tiers[0].n_tokens
        parts.append(
            f"the first {kv.n_sink} tokens (sinks) and the newest {window} (window) stay in {kv.tiers[0].type_k}"
        )
    calibration = info["calibration"]
    parts.append(
        "no calibration: a plain rotation is used"
        if calibration is None
        else f"calibrated on {calibration['n_tokens']:,} tokens of {calibration['text']}"
    )
    parts.append(f"attention: {info['attention_route']}")
    return " · ".join(parts)


def _chart(points: list[tuple[int, float]]) -> dict[str, Any]:
    return {
        "animation": False,
        "grid": {"left": 55, "right": 20, "top": 20, "bottom": 45},
        "xAxis": {**axis("tokens of context"), "nameLocation": "middle", "nameGap": 28, "min": 0},
        "yAxis": {**axis("tokens/s"), "min": 0},
        "series": [{"type": "scatter", "symbolSize": 4, "data": points, "itemStyle": {"color": COLORS[2]}}],
    }
