"""The pages of the desktop app, one file for each."""

from __future__ import annotations

from nicegui import ui

from pykvq.desktop.desk import Desk
from pykvq.desktop.pages.cache import CachePage
from pykvq.desktop.pages.chat import ChatPage
from pykvq.desktop.pages.fidelity import FidelityPage
from pykvq.desktop.pages.models import ModelsPage
from pykvq.desktop.pages.server import ServerPage


def add_pages(desk: Desk) -> None:
    """Makes the pages known; each visit builds one anew."""

    @ui.page("/")
    def new_chat() -> None:
        ChatPage(desk, None)

    @ui.page("/chat/{conversation}")
    def chat(conversation: int) -> None:
        ChatPage(desk, conversation)

    for path, page in (
        ("/models", ModelsPage),
        ("/cache", CachePage),
        ("/fidelity", FidelityPage),
        ("/server", ServerPage),
    ):
        _add(path, page, desk)


def _add(path: str, page: type[ModelsPage | CachePage | FidelityPage | ServerPage], desk: Desk) -> None:
    @ui.page(path)
    def build() -> None:
        page(desk)
