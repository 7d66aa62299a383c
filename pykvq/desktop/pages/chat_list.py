"""The list of conversations beside a chat."""

from __future__ import annotations

import asyncio
from itertools import groupby

from nicegui import events, ui
from nicegui.elements.mixins.text_element import TextElement

from pykvq.desktop.conversations import Conversation
from pykvq.desktop.desk import Desk
from pykvq.desktop.pages.layout import dialog, file_button, told
from pykvq.desktop.transfer import MAX_BYTES, from_json, to_json, to_markdown

_SHOWN = 40
_TYPES = {"md": "text/markdown", "json": "application/json"}


class ChatList:
    """Search, folders, and what can be done with a conversation as a whole."""

    def __init__(self, desk: Desk, current: int | None) -> None:
        self._desk = desk
        self._current = current
        self._n_shown = _SHOWN
        with ui.row(wrap=False).classes("spread items-center"):
            new = ui.button("New chat", icon="add", on_click=lambda: ui.navigate.to("/")).classes("grow")
            new.props('no-caps unelevated data-key="new"')
            file_button("upload_file", "Import a chat", self._import, MAX_BYTES, 'accept=".json" data-import')
        self._search = (
            ui.input(placeholder="Search", on_change=self._searched)
            .props('dense outlined clearable debounce=100 aria-label="Search chats"')
            .classes("spread")
        )
        self.show()
        desk.list_changed.subscribe(self.show.refresh)

    @ui.refreshable_method
    def show(self) -> None:
        """Builds the list."""
        with told():
            found = self._desk.chats.listed(self._search.value or "", self._n_shown)
            self._deleted_row()
            with ui.column().classes("chats").props('role="list" data-chats'):
                # folders by name, what is in none first; within them the newest first
                for folder, chats in groupby(sorted(found, key=lambda chat: chat.folder), lambda chat: chat.folder):
                    self._folder(folder, list(chats))
            if not found:
                ui.label("Nothing found" if self._search.value else "No chats yet").classes("muted")
            if len(found) == self._n_shown:
                ui.button("Show more", on_click=self._show_more).props("flat no-caps dense")

    def _folder(self, folder: str, chats: list[Conversation]) -> None:
        if not folder:
            for chat in chats:
                self._row(chat)
            return
        with ui.expansion(folder, icon="folder", value=True).classes("spread").props("dense"):
            for chat in chats:
                self._row(chat)

    def _row(self, chat: Conversation) -> None:
        is_current = chat.id == self._current
        with (
            ui.row(wrap=False)
            .classes(f"spread items-center {'current' if is_current else ''}")
            .props('role="listitem"')
        ):
            link = ui.link(chat.title, f"/chat/{chat.id}").classes("grow").props(f'data-chat-link="{chat.id}"')
            if is_current:
                link.props('aria-current="true"')
            more = TextElement(tag="button", text="⋮").classes("more")
            more.props('type="button" aria-label="More" title="More" aria-haspopup="menu"')
            more.on("click", lambda: self._open_menu(more, chat))

    def _open_menu(self, button: ui.element, chat: Conversation) -> None:
        button.clear()  # of the one that was opened before; one for each chat from the start would make lists slow
        with button, ui.menu(value=True).props("no-parent-event"):
            ui.menu_item("Rename", lambda: self._rename(chat))
            ui.menu_item("Duplicate", lambda: self._duplicate(chat.id))
            ui.menu_item("Export as Markdown", lambda: self._export(chat.id, "md"))
            ui.menu_item("Export as JSON", lambda: self._export(chat.id, "json"))
            ui.menu_item("Delete", lambda: self._delete(chat.id))

    def _deleted_row(self) -> None:
        deleted = self._desk.deleted
        if deleted is None:
            return
        with ui.row(wrap=False).classes("spread items-center").props('role="status"'):
            ui.label(f"Deleted: {deleted.title}").classes("grow ellipsis muted")
            ui.button("Undo", on_click=self._undo).props("flat dense no-caps")

    def _searched(self) -> None:
        self._n_shown = _SHOWN
        self.show.refresh()

    def _show_more(self) -> None:
        self._n_shown *= 2
        self.show.refresh()

    def _rename(self, chat: Conversation) -> None:
        def save() -> None:
            with told():
                title = (name.value or "").strip() or chat.title
                self._desk.change(chat.id, title=title, folder=(folder.value or "").strip())
                box.close()

        with dialog("Title and folder") as box, ui.card():
            name = ui.input("Title", value=chat.title).props("autofocus").on("keydown.enter", save)
            folder = ui.input("Folder", value=chat.folder).on("keydown.enter", save)
            with ui.row():
                ui.button("Save", on_click=save)
                ui.button("Cancel", on_click=box.close).props("flat")

    def _duplicate(self, chat: int) -> None:
        with told():
            copy = self._desk.chats.duplicate(chat)
            self._desk.list_changed.emit()
            ui.navigate.to(f"/chat/{copy.id}")

    async def _delete(self, chat: int) -> None:
        with told():
            await self._desk.delete(chat)
            if chat == self._current:
                ui.navigate.to("/")

    def _undo(self) -> None:
        with told():
            self._desk.undo_delete()

    def _export(self, chat: int, kind: str) -> None:
        with told():
            store = self._desk.chats
            conversation = store.get(chat)
            text = (
                to_markdown(conversation, store.branch(chat))
                if kind == "md"
                else to_json(conversation, store.tree(chat))
            )
            name = "".join(c if c.isalnum() or c in " -_" else "_" for c in conversation.title).strip() or "chat"
            ui.download.content(text.encode("utf-8", "replace"), f"{name}.{kind}", _TYPES[kind])

    async def _import(self, upload: events.UploadEventArguments) -> None:
        chat = await asyncio.to_thread(from_json, self._desk.chats, await upload.file.read())
        self._desk.list_changed.emit()
        ui.navigate.to(f"/chat/{chat.id}")
