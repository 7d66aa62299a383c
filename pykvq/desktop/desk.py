"""What all windows of the desktop app share: the engine, the conversations, and what changes in them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nicegui import Event

from pykvq import catalog
from pykvq.desktop.answer import Answer, chat_messages
from pykvq.desktop.conversations import Attachment, Conversation, Conversations
from pykvq.desktop.database import Database
from pykvq.desktop.guard import ServerSwitch
from pykvq.desktop.jobs import DOWNLOAD, Job
from pykvq.desktop.library import Library, fetch
from pykvq.desktop.records import Records
from pykvq.desktop.sampling import Presets
from pykvq.errors import BusyError, InvalidArgumentError
from pykvq.server.registry import ModelEntry, ModelRegistry
from pykvq.server.settings import LoadOptions, ModelSpec

# context length and tokens/s, a point for each progress of an answer
_SPEEDS = 2000


class Desk:
    """The state of the app. Its methods must be called in the server's event loop.

    Args:
        folder: where the database lies.

    Raises:
        StorageError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = Database(folder)
        self.chats = Conversations(self.database)
        self.records = Records(self.database)
        self.library = Library(self.records)
        self.presets = Presets(self.records)
        self.chats.end_interrupted()
        self.chats.purge()
        keys = self.records.setting("api_keys", [])
        self.switch = ServerSwitch(is_on=self.records.setting("server_on", True), api_keys=tuple(keys))
        self.url, self.host, self.port = "", "", 0
        self.answers: dict[int, Answer] = {}
        self.unsaved: dict[int, Answer] = {}  # by message: answers that have ended, which the disk did not take
        self.deleted: Conversation | None = None
        self.jobs: list[Job] = []
        self.speeds: deque[tuple[int, float]] = deque(maxlen=_SPEEDS)
        self.list_changed = Event[[]]()
        self.chat_changed = Event[[int]]()
        self.answer_grew = Event[[Answer]]()
        self.model_changed = Event[[]]()
        self.jobs_changed = Event[[]]()
        self.library_changed = Event[[]]()
        self._wanted: tuple[Path, LoadOptions] | None = None  # what is being loaded
        self._registry: ModelRegistry | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, registry: ModelRegistry) -> None:
        """Begins to use the models of the running server."""
        self._registry = registry
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Ends what is running, and closes the database."""
        for job in self.jobs:
            job.cancel()
        for answer in list(self.answers.values()):
            await answer.stop()
        self._save_again()
        self.database.close()

    # --- models

    @property
    def registry(self) -> ModelRegistry:
        """The models of the server."""
        assert self._registry is not None
        return self._registry

    @property
    def model(self) -> ModelEntry | None:
        """The model that answers, also while it is being loaded or after that has failed; None if there is none."""
        return self.registry.entries.get(self.registry.default_name or "")

    async def load(self, path: Path, options: LoadOptions) -> None:
        """Loads a model in place of the one that is loaded.

        Raises:
            PykvqError: it cannot be loaded.
        """
        if not path.is_file():
            raise InvalidArgumentError(f"model file not found: {str(path)!r}")
        wanted = path, options
        if self._wanted == wanted:  # a second click
            return
        self._wanted = wanted
        try:
            await self.unload()
            opening = asyncio.create_task(self.registry.open(ModelSpec(path.stem, path), options))
            await asyncio.sleep(0)  # its state is "loading" from here on
            self.model_changed.emit()
            await opening
            self.library.keep_load(path, options)
        finally:
            if self._wanted is wanted:
                self._wanted = None
            self.speeds.clear()
            self.model_changed.emit()

    async def unload(self) -> None:
        """Frees the model's memory, or ends its load."""
        for name in list(self.registry.entries):
            await self.registry.remove(name)
        self.model_changed.emit()

    # --- chats

    def send(self, conversation: int, text: str, attachments: Iterable[Attachment] = ()) -> Answer:
        """Adds a message of the user to a conversation, and begins to answer it.

        Raises:
            BusyError: an answer is on its way. InvalidArgumentError: there is nothing to send. StorageError.
        """
        head = self.chats.get(conversation).head
        return self._ask(conversation, text, head, tuple(attachments))

    def edit(self, message: int, text: str) -> Answer | None:
        """Puts another text in a message's place, on a new branch; a message of the user is answered anew.

        Raises:
            BusyError, InvalidArgumentError, StorageError.
        """
        old = self.chats.message(message)
        if old.role == "user":
            return self._ask(old.conversation, text, old.parent, old.attachments)
        self._require_idle(old.conversation)
        self.chats.add(old.conversation, old.role, text, parent=old.parent)
        self._changed(old.conversation)
        return None

    def regenerate(self, message: int) -> Answer:
        """Another answer to the same question.

        Raises:
            BusyError, StorageError.
        """
        old = self.chats.message(message)
        self._require_idle(old.conversation)
        return self._begin(old.conversation, old.parent if old.role == "assistant" else old.id)

    def show(self, message: int) -> None:
        """Shows the branch of a message.

        Raises:
            BusyError, StorageError.
        """
        conversation = self.chats.message(message).conversation
        self._require_idle(conversation)
        self.chats.show(message)
        self._changed(conversation)

    async def stop(self, conversation: int) -> None:
        """Ends a conversation's answer where it is."""
        answer = self.answers.get(conversation)
        if answer is not None:
            await answer.stop()

    async def delete(self, conversation: int) -> None:
        """Deletes a conversation, which ``undo_delete`` brings back."""
        await self.stop(conversation)
        deleted = self.chats.get(conversation)
        self.chats.delete(conversation)
        self.deleted = deleted
        self._changed(conversation)

    def undo_delete(self) -> None:
        """Brings the conversation back that was deleted last.

        Raises:
            StorageError: it cannot be written.
        """
        if self.deleted is not None:
            conversation = self.chats.restore(self.deleted.id)
            self.deleted = None
            self._changed(conversation.id)

    def change(self, conversation: int, **fields: Any) -> None:
        """Changes a conversation as ``Conversations.update`` does, and tells the windows."""
        self.chats.update(conversation, **fields)
        self._changed(conversation)

    def _ask(self, conversation: int, text: str, parent: int | None, attachments: tuple[Attachment, ...]) -> Answer:
        if not text.strip():
            raise InvalidArgumentError("the message is empty: write something first")
        self._require_idle(conversation)
        self._save_again()
        question = self.chats.add(conversation, "user", text, parent=parent, attachments=attachments)
        return self._begin(conversation, question.id)

    def _begin(self, conversation: int, question: int | None) -> Answer:
        """Begins an answer to the branch that ends with ``question``."""
        chat = self.chats.get(conversation)
        prompt = chat_messages(chat, self.chats.branch(conversation, question)) if question is not None else []
        message = self.chats.add(conversation, "assistant", "", parent=question, state="streaming")
        answer = Answer(self.registry, self.chats, message, prompt, chat.sampling, self._progressed)
        self.answers[conversation] = answer
        self._changed(conversation)
        return answer

    def _save_again(self) -> None:
        for message, answer in list(self.unsaved.items()):
            answer.save()
            if answer.save_error is None:
                del self.unsaved[message]

    def _require_idle(self, conversation: int) -> None:
        if conversation in self.answers:
            raise BusyError("this conversation is being answered: wait for the answer, or stop it first")

    def _progressed(self, answer: Answer) -> None:
        if answer.n_tokens > 1:
            self.speeds.append((answer.n_context, answer.tokens_per_second))
        self.answer_grew.emit(answer)
        if answer.state != "streaming":
            self.answers.pop(answer.message.conversation, None)
            if answer.save_error is not None:
                self.unsaved[answer.message.id] = answer
            self._changed(answer.message.conversation)

    def _changed(self, conversation: int) -> None:
        self.chat_changed.emit(conversation)
        self.list_changed.emit()

    # --- jobs

    def start_job(self, kind: str, title: str, work: Callable[[Job], Any]) -> Job:
        """Begins long work beside the chats."""
        job = Job(kind, title, work, self.jobs_changed.emit)
        self.jobs.append(job)
        self.jobs_changed.emit()
        return job

    def start_download(self, reference: str) -> Job:
        """Begins to fetch hf:ORG/REPO:FILE, or the demo model for "", unless that is under way."""
        title = reference or catalog.default_model().file
        for job in self.jobs:
            if (job.kind, job.title, job.state) == (DOWNLOAD, title, "running"):
                return job

        def work(job: Job) -> Path:
            path = fetch(reference, job)
            self.in_loop(self.library_changed.emit)
            return path

        return self.start_job(DOWNLOAD, title, work)

    async def start_demo(self) -> None:
        """Fetches the demo model unless it is here, and loads it.

        Raises:
            PykvqError: it cannot be loaded; a download that fails is told by its job.
        """
        job = self.start_download("")
        await asyncio.wait([job.task])
        if job.state == "done" and job in self.jobs:  # another click may have come here first
            self.drop_job(job)
            await self.load(job.result, LoadOptions(n_slots=1))

    def restart_job(self, job: Job) -> None:
        """Begins work again that had ended too early."""
        if job in self.jobs:
            self.jobs.remove(job)
            self.start_job(job.kind, job.title, job.work)

    def drop_job(self, job: Job) -> None:
        """Forgets work that has ended."""
        if job in self.jobs:
            self.jobs.remove(job)
            self.jobs_changed.emit()

    def in_loop(self, action: Callable[[], None]) -> None:
        """Calls something in the event loop, from another thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(action)

    def change_server(self, *, is_on: bool | None = None, api_keys: tuple[str, ...] | None = None) -> None:
        """Switches the API on or off, or changes its keys; both are kept.

        Raises:
            StorageError: it cannot be kept.
        """
        if is_on is not None:
            self.records.set("server_on", is_on)
            self.switch.is_on = is_on
        if api_keys is not None:
            self.records.set("api_keys", list(api_keys))
            self.switch.api_keys = api_keys
