"""The chat: messages, what one writes, and how full the context is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from nicegui import events, ui

from pykvq import catalog
from pykvq.desktop import sampling
from pykvq.desktop.answer import Answer
from pykvq.desktop.attachments import MAX_BYTES, read_attachment
from pykvq.desktop.conversations import Attachment, Conversation, Message
from pykvq.desktop.desk import Desk
from pykvq.desktop.jobs import DOWNLOAD
from pykvq.desktop.pages.chat_list import ChatList
from pykvq.desktop.pages.chat_settings import SettingsDialog
from pykvq.desktop.pages.layout import dialog, file_button, frame, icon_button, tell, told
from pykvq.desktop.pages.load_dialog import load_model
from pykvq.desktop.pages.messages import MessageView
from pykvq.desktop.pages.progress import JobList, load_progress
from pykvq.errors import PykvqError, StorageError

_SHOWN = 40
_ENTER = "(e) => { if (e.key === 'Enter' && !e.shiftKey && !e.isComposing) { e.preventDefault(); emit(); } }"

_Shape: TypeAlias = list[tuple[int, tuple[int, ...]]]


class ChatPage:
    """A conversation, or with None the place to begin one."""

    def __init__(self, desk: Desk, conversation: int | None) -> None:
        self._desk = desk
        self._id = conversation
        self._is_new = conversation is None
        self._attachments: list[Attachment] = []
        self._views: dict[int, MessageView] = {}
        self._shape: _Shape | None = None  # of the branch that is shown
        self._n_shown = _SHOWN
        # of a conversation that does not exist yet
        self._draft: dict[str, Any] = {"sampling": sampling.PRESETS[sampling.DEFAULT_PRESET]}
        frame(desk, "/", self._title())
        with ui.left_drawer(value=False, bordered=True, bottom_corner=True).props(
            'show-if-above breakpoint=900 aria-label="Chats"'
        ) as drawer:
            ChatList(desk, conversation)
        with ui.row(wrap=False).classes("spread items-center"):
            icon_button("menu", "Chats", drawer.toggle)
            self._heading = (
                ui.label(self._title()).classes("text-h6 grow ellipsis").props('role="heading" aria-level="1"')
            )
            icon_button("tune", "Settings of this chat", self._edit_settings)
        with ui.column().classes("spread").props('role="log" aria-live="polite" aria-label="Messages" data-chat'):
            self.messages()
        with ui.footer().props("bordered"), ui.column().classes("spread composer"):
            self._composer()
        desk.chat_changed.subscribe(self._changed)
        desk.answer_grew.subscribe(self._grew)
        desk.model_changed.subscribe(self._model_changed)

    # --- messages

    @ui.refreshable_method
    def messages(self) -> None:
        """Builds the branch that is shown."""
        self._views, self._shape = {}, None
        try:
            branch = self._branch()
            self._shape = _shape(branch)
        except StorageError as error:
            ui.label(str(error)).classes("error")
            return
        if len(branch) > self._n_shown:
            ui.button("Show earlier messages", on_click=self._show_earlier).props("flat no-caps")
        actions: dict[str, Callable[[Any], Any]] = {
            "edit": self._edit,
            "regenerate": self._regenerate,
            "show": self._show,
        }
        for message in branch[-self._n_shown :]:
            view = self._views[message.id] = MessageView(message, actions)
            answer = self._desk.unsaved.get(message.id, self._answer)
            if answer is not None and answer.message.id == message.id:
                view.grow(answer)
        self._model_state(is_new=not branch)

    def _model_state(self, *, is_new: bool) -> None:
        """What there is to say about the model, at the end of the messages; buttons to load one if there is none."""
        entry = self._desk.model
        if entry is not None and entry.state == "loaded":
            if is_new:
                ui.label(f"{entry.spec.name} is ready: write something below.")
            return
        if entry is not None and entry.state == "loading":
            ui.label(f"{entry.spec.name} is being loaded… The first time it is calibrated too, which takes longer.")
            load_progress(entry)
            return
        if entry is not None and entry.error:
            ui.label(entry.error).classes("error").props('role="alert"')
        ui.label("No model is loaded yet.")
        last = self._desk.library.last_load()
        with ui.row():
            if last is not None:
                button = ui.button(f"Load {last[0].stem} again", icon="replay")
                button.on_click(lambda: self._load(button, load_model(self._desk, *last)))
            else:
                megabytes = catalog.default_model().download_bytes / 1e6
                button = ui.button(f"Try the demo model ({megabytes:.0f} MB)", icon="bolt").props("data-demo")
                button.on_click(lambda: self._load(button, self._desk.start_demo()))
            button.props("no-caps")
            choose = ui.button("Choose a model", icon="inventory_2", on_click=lambda: ui.navigate.to("/models"))
            choose.props("outline no-caps")
        JobList(self._desk, "Downloads", DOWNLOAD)

    async def _load(self, button: ui.button, load: Awaitable[None]) -> None:
        button.disable()
        with told():
            await load
        if not button.is_deleted:  # it did not come to a load
            button.enable()
        self._input.run_method("focus")

    def _model_changed(self) -> None:
        self.messages.refresh()
        self._show_state()

    def _branch(self) -> list[Message]:
        return [] if self._id is None else self._desk.chats.branch(self._id)

    @property
    def _answer(self) -> Answer | None:
        return None if self._id is None else self._desk.answers.get(self._id)

    def _title(self) -> str:
        if self._id is None:
            return "New chat"
        try:
            return self._desk.chats.get(self._id).title
        except StorageError:
            return "No such chat"

    def _changed(self, conversation: int) -> None:
        if conversation != self._id:
            return
        self._heading.set_text(self._title())
        try:
            is_shown = _shape(self._branch()) == self._shape
        except StorageError:
            is_shown = False
        if not is_shown:  # else only an answer has ended, which its view knows
            self.messages.refresh()
        self._show_state()

    def _grew(self, answer: Answer) -> None:
        view = self._views.get(answer.message.id)
        if view is not None:
            view.grow(answer)
            self._show_meter(answer.n_context)

    def _show_earlier(self) -> None:
        self._n_shown += 2 * _SHOWN
        self.messages.refresh()

    def _edit(self, message: Message) -> None:
        def save() -> None:
            with told():
                self._desk.edit(message.id, text.value or "")
                box.close()

        with dialog("Edit the message") as box, ui.card().style("width: 40rem; max-width: 95vw"):
            ui.label("The conversation goes on from here; what there was stays on another branch.").classes("muted")
            text = ui.textarea(value=message.content).props('autogrow autofocus outlined aria-label="Edited message"')
            text.classes("spread")
            with ui.row():
                title = "Save and answer" if message.role == "user" else "Save"
                ui.button(title, on_click=save).props("no-caps data-save-edit")
                ui.button("Cancel", on_click=box.close).props("flat no-caps")

    def _regenerate(self, message: int) -> None:
        with told():
            self._desk.regenerate(message)

    def _show(self, message: int) -> None:
        with told():
            self._desk.show(message)

    # --- what one writes

    def _composer(self) -> None:
        self._files = ui.row()
        with ui.row(wrap=False).classes("spread items-end"):
            file_button("attach_file", "Attach texts or PDFs", self._attach, MAX_BYTES, "multiple data-attach")
            self._input = (
                ui.textarea(placeholder="Message")
                .props('autogrow outlined dense autofocus aria-label="Message" input-style="max-height: 12rem"')
                .classes("grow")
                .on("keydown", self._send, js_handler=_ENTER)
            )
            self._send_button = icon_button("send", "Send", self._send)
            self._stop_button = icon_button("stop_circle", "Stop", self._stop).props('data-key="stop"')
        with ui.row(wrap=False).classes("spread items-center"):
            self._bar = ui.linear_progress(0, show_value=False, size="4px").classes("grow")
            self._bar.props('aria-label="Context in use"')
            self._meter = ui.label().classes("muted").props("data-meter")
        self._show_state()

    def _show_state(self) -> None:
        self._send_button.set_visibility(self._answer is None)
        self._stop_button.set_visibility(self._answer is not None)
        with told():
            counts = [message.details for message in self._branch() if "n_prompt_tokens" in message.details]
            self._show_meter(counts[-1]["n_prompt_tokens"] + counts[-1].get("n_tokens", 0) if counts else 0)

    def _show_meter(self, n_tokens: int) -> None:
        entry = self._desk.model
        n_ctx = entry.llm.n_ctx() if entry is not None and entry.llm is not None else 0
        self._bar.set_value(min(1.0, n_tokens / n_ctx) if n_ctx else 0)
        self._meter.set_text(f"{n_tokens:,} of {n_ctx:,} tokens" if n_ctx else f"{n_tokens:,} tokens")

    def _send(self) -> None:
        text = self._input.value or ""
        if not text.strip():  # a second click, or nothing yet
            if self._attachments:
                ui.notify("Write something to go with the files")
            return
        if self._desk.model is None:
            ui.notify("No model is loaded yet: load one first")
            return
        if self._answer is not None:
            ui.notify("This chat is being answered: wait for the answer, or stop it first")
            return
        try:
            if self._id is None:
                self._id = self._desk.chats.create(**self._draft).id
            self._desk.send(self._id, text, self._attachments)
        except PykvqError as error:
            tell(error)
            return
        self._input.set_value("")
        self._attachments = []
        self._files.clear()
        if self._is_new:
            ui.navigate.to(f"/chat/{self._id}")

    async def _stop(self) -> None:
        if self._id is not None:
            await self._desk.stop(self._id)

    async def _attach(self, upload: events.UploadEventArguments) -> None:
        name = upload.file.name
        with self._files:
            waiting = ui.chip(f"{name} is being read…", icon="hourglass_empty").props("dense outline")
        try:
            attachment = await asyncio.to_thread(read_attachment, name, await upload.file.read())
        finally:
            waiting.delete()
        self._attachments.append(attachment)
        with self._files:
            self._chip(attachment)

    def _chip(self, attachment: Attachment) -> None:
        chip = ui.chip(attachment.name, icon="attach_file", removable=True)
        chip.props('dense color=primary text-color=white remove-aria-label="Do not attach it"')
        chip.on("remove", lambda: self._attachments.remove(attachment))

    # --- settings

    def _edit_settings(self) -> None:
        with told():
            if self._id is None:
                before, prompt = self._draft["sampling"], self._draft.get("system_prompt", "")
            else:
                chat: Conversation = self._desk.chats.get(self._id)
                before, prompt = chat.sampling, chat.system_prompt
            SettingsDialog(self._desk.presets, before, prompt, self._save_settings)

    def _save_settings(self, system_prompt: str, values: dict[str, Any]) -> None:
        if self._id is None:
            self._draft = {"sampling": values, "system_prompt": system_prompt}
        else:
            self._desk.change(self._id, sampling=values, system_prompt=system_prompt)


def _shape(branch: list[Message]) -> _Shape:
    """What a change of which needs new views: which messages there are, and on which branches."""
    return [(message.id, message.siblings) for message in branch]
