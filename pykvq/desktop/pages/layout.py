"""What all pages have: the frame with the navigation, and how errors are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nicegui import events, ui

from pykvq.desktop.desk import Desk
from pykvq.desktop.markdown import code_css
from pykvq.errors import PykvqError
from pykvq.server.errors import ApiError

_PAGES = (
    ("/", "Chat", "chat"),
    ("/models", "Models", "inventory_2"),
    ("/cache", "Cache", "layers"),
    ("/fidelity", "Fidelity", "insights"),
    ("/server", "Server", "dns"),
)
_HERE = Path(__file__).parent
_STYLE = (_HERE / "style.css").read_text("utf-8")
_SCRIPT = (_HERE / "page.js").read_text("utf-8")
# light or dark by the system's choice, or the user's own
_NEXT_MODE = {None: True, True: False, False: None}
_MODE_NAMES = {None: "as the system", True: "dark", False: "light"}
_PRIMARY = "#1d5f86"
# readable on light and dark
GREY = "#808b92"
COLORS = ("#e08e2b", "#3f9c82", "#5b8fd0", "#9a6fc0")


def frame(desk: Desk, path: str, title: str) -> None:
    """The header of a page, with its navigation."""
    ui.page_title(f"{title} · pykvq")
    ui.add_css(_STYLE + code_css())
    ui.add_body_html(f"<script>{_SCRIPT}</script>")
    ui.colors(primary=_PRIMARY)
    ui.query("html").props('lang="en"')
    ui.html('<a class="skip" href="#main">To the content</a>', sanitize=False)
    with ui.header().props("elevated"), ui.row(wrap=False).classes("spread items-center"):
        with ui.element("nav").classes("nav row items-center grow").props('aria-label="Pages"'):
            for target, name, icon in _PAGES:
                link = ui.link(target=target).props(f'aria-label="{name}"')
                with link:
                    ui.icon(icon).props('aria-hidden="true"')
                    ui.html(name, tag="span", sanitize=False)
                if target == path:
                    link.props('aria-current="page"')
        ModelStatus(desk)
        _mode_button(desk)
    ui.context.client.content.props('id="main" role="main"')


class ModelStatus:
    """Which model is loaded, in the header."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.show()
        desk.model_changed.subscribe(self.show.refresh)

    @ui.refreshable_method
    def show(self) -> None:
        """Builds the text."""
        entry = self._desk.model
        if entry is None or entry.state == "not-loaded":
            text = "no model"
        else:
            text = entry.spec.name if entry.state == "loaded" else f"{entry.spec.name}: {entry.state}"
        ui.label(text).classes("ellipsis gt-xs").props('role="status" data-model-status').style("max-width: 18rem")


def _mode_button(desk: Desk) -> None:
    mode = ui.dark_mode(desk.records.setting("dark"))

    def change() -> None:
        mode.value = _NEXT_MODE[mode.value]
        with told():
            desk.records.set("dark", mode.value)
        ui.notify(f"Colours: {_MODE_NAMES[mode.value]}")

    icon_button("contrast", "Light or dark", change).props("color=white")


def icon_button(icon: str, name: str, action: object = None) -> ui.button:
    """A button with an icon, and a name for those who do not see it."""
    assert action is None or callable(action)
    return ui.button(icon=icon, on_click=action).props(f'flat round dense aria-label="{name}" title="{name}"')


def file_button(
    icon: str,
    name: str,
    take: Callable[[events.UploadEventArguments], Any],
    max_bytes: int,
    props: str = "",
) -> ui.button:
    """A button that asks for files, each of which ``take`` gets. ``props`` are those of Quasar's QUploader."""

    async def taken(upload: events.UploadEventArguments) -> None:
        with told():
            await take(upload)
        box.reset()  # the same file may be chosen again

    def refused() -> None:
        ui.notify(f"{name}: files must have at most {max_bytes >> 20} MiB", type="negative")

    box = ui.upload(on_upload=taken, on_rejected=refused, auto_upload=True, max_file_size=max_bytes)
    box.props(props).classes("hidden")  # the system's own dialog is asked for without it
    button = icon_button(icon, name)
    # browsers open that dialog only during a click
    return button.on("click", js_handler=f"() => runMethod({box.id}, 'pickFiles', [])")


def dialog(name: str) -> ui.dialog:
    """An open dialog, named for those who do not see it."""
    opened = ui.dialog(value=True)
    opened.props["aria-label"] = name
    return opened


def axis(name: str) -> dict[str, Any]:
    """An axis of a plot."""
    line = {"lineStyle": {"color": "rgba(128, 139, 146, 0.35)"}}
    return {
        "type": "value",
        "name": name,
        "splitLine": line,
        "axisLine": line,
        "axisLabel": {"color": GREY},
        "nameTextStyle": {"color": GREY},
    }


@contextmanager
def told() -> Iterator[None]:
    """Tells the user of pykvq's errors instead of raising them."""
    try:
        yield
    except (PykvqError, ApiError) as error:
        tell(error)


def tell(error: Exception) -> None:
    """Shows an error until it is closed."""
    with suppress(RuntimeError):  # the window was closed meanwhile
        ui.notify(str(error), type="negative", multi_line=True, close_button="Close", timeout=0, position="top")
