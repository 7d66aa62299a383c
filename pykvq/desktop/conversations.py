"""Conversations: trees of messages, of which one branch is shown."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from sqlite3 import Connection, Row
from typing import Any

from pykvq.desktop.database import Database
from pykvq.errors import StorageError

NEW_TITLE = "New chat"
_TITLE_CHARACTERS = 60
_MIN_INDEXED = 3  # characters that the index can look for
_FOUND = 200  # conversations that a search lists
_KEPT_SECONDS = 7 * 86400.0  # how long a deleted conversation can come back

_FIELDS = ("title", "folder", "system_prompt", "sampling", "head", "deleted")


@dataclass(frozen=True)
class Conversation:
    """A conversation without its messages. ``head`` is the last message of the branch that is shown."""

    id: int
    title: str
    folder: str
    system_prompt: str
    sampling: dict[str, Any]
    head: int | None
    created: float
    updated: float


@dataclass(frozen=True)
class Attachment:
    """A file whose text goes with a message."""

    name: str
    content: str


@dataclass(frozen=True)
class Message:
    """A message. ``siblings`` are all messages at this place of the conversation, the oldest first.

    ``state`` is "complete", "streaming", "stopped" or "failed"; ``details`` are counts of tokens, speeds or an error.
    """

    id: int
    conversation: int
    parent: int | None
    role: str
    content: str
    state: str
    details: dict[str, Any]
    created: float
    siblings: tuple[int, ...] = ()
    attachments: tuple[Attachment, ...] = field(default=())


class Conversations:
    """All conversations of a database.

    Raises:
        StorageError: a conversation or message is gone, or cannot be written.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    # --- conversations

    def create(self, title: str = NEW_TITLE, **fields: Any) -> Conversation:
        """A new conversation; ``fields`` as for ``update``."""
        now = time.time()
        with self._database.transaction() as connection:
            cursor = connection.execute(
                "INSERT INTO conversation (title, created, updated) VALUES (?, ?, ?)", (_storable(title), now, now)
            )
            return self.update(int(cursor.lastrowid or 0), **fields)

    def get(self, conversation: int) -> Conversation:
        """One conversation."""
        row = self._database.row("SELECT * FROM conversation WHERE id = ? AND deleted IS NULL", conversation)
        if row is None:
            raise StorageError(
                f"conversation {conversation} does not exist: it may have been deleted in another window"
            )
        return _conversation(row)

    def update(self, conversation: int, *, touch: bool = False, **fields: Any) -> Conversation:
        """Changes title, folder, system_prompt, sampling or head. ``touch`` makes it the newest one."""
        unknown = set(fields) - set(_FIELDS)
        if unknown:
            raise TypeError(f"no such fields: {', '.join(sorted(unknown))}")
        if touch:
            fields["updated"] = time.time()
        if "sampling" in fields:
            fields["sampling"] = json.dumps(fields["sampling"])
        fields = {name: _storable(value) if isinstance(value, str) else value for name, value in fields.items()}
        with self._database.transaction() as connection:
            if fields:
                columns = ", ".join(f"{name} = ?" for name in fields)
                connection.execute(f"UPDATE conversation SET {columns} WHERE id = ?", (*fields.values(), conversation))
            return self.get(conversation)

    def delete(self, conversation: int) -> None:
        """Deletes a conversation; ``restore`` brings it back."""
        self.get(conversation)
        with self._database.transaction() as connection:
            connection.execute("UPDATE conversation SET deleted = ? WHERE id = ?", (time.time(), conversation))

    def restore(self, conversation: int) -> Conversation:
        """Brings a deleted conversation back."""
        return self.update(conversation, deleted=None)

    def purge(self, older_than: float = _KEPT_SECONDS) -> None:
        """Removes for good what was deleted so many seconds ago."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM conversation WHERE deleted < ?", (time.time() - older_than,))

    def duplicate(self, conversation: int) -> Conversation:
        """A copy with all branches."""
        original = self.get(conversation)
        return self.create_tree(
            self.tree(conversation),
            original.head,
            title=f"{original.title} (copy)",
            folder=original.folder,
            system_prompt=original.system_prompt,
            sampling=original.sampling,
        )

    def create_tree(self, messages: Iterable[Message], head: int | None, **fields: Any) -> Conversation:
        """A new conversation with copies of messages, parents before children; ``head`` is the id of one of them."""
        ids: dict[int, int] = {}
        with self._database.transaction() as connection:
            created = self.create(**fields).id
            for each in messages:
                parent = None if each.parent is None else ids[each.parent]
                state = "stopped" if each.state == "streaming" else each.state
                ids[each.id] = _insert(
                    connection, created, parent, each.role, each.content, state, each.details, each.attachments
                )
            return self.update(created, head=None if head is None else ids[head])

    def listed(self, search: str = "", limit: int = _FOUND) -> list[Conversation]:
        """Conversations, the newest first; with ``search`` those whose title or messages contain it."""
        words = _storable(search).strip()
        if not words:
            rows = self._database.rows(
                "SELECT * FROM conversation WHERE deleted IS NULL ORDER BY updated DESC LIMIT ?", limit
            )
            return [_conversation(row) for row in rows]
        pattern = "%" + words.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        if len(words) >= _MIN_INDEXED:
            quoted = '"' + words.replace('"', '""') + '"'
            matching, value = "message_text MATCH ?", quoted
        else:
            matching, value = "message.content LIKE ? ESCAPE '\\'", pattern
        rows = self._database.rows(
            f"""SELECT * FROM conversation WHERE deleted IS NULL AND (title LIKE ? ESCAPE '\\' OR id IN (
                SELECT message.conversation FROM message_text JOIN message ON message.id = message_text.rowid
                WHERE {matching})) ORDER BY updated DESC LIMIT ?""",
            pattern,
            value,
            limit,
        )
        return [_conversation(row) for row in rows]

    def count(self) -> int:
        """Number of conversations."""
        row = self._database.row("SELECT count(*) FROM conversation WHERE deleted IS NULL")
        return 0 if row is None else int(row[0])

    # --- messages

    def branch(self, conversation: int, head: int | None = None) -> list[Message]:
        """The messages from the first to the head (or another message), with their siblings."""
        last = head if head is not None else self.get(conversation).head
        rows = self._database.rows(
            """WITH RECURSIVE path (id, parent, depth) AS (
                SELECT id, parent, 0 FROM message WHERE id = ? AND conversation = ?
                UNION ALL SELECT message.id, message.parent, depth + 1
                FROM message JOIN path ON message.id = path.parent)
            SELECT message.*, (SELECT group_concat(other.id) FROM message other
                WHERE other.conversation = message.conversation AND other.parent IS message.parent) AS siblings
            FROM path JOIN message ON message.id = path.id ORDER BY depth DESC""",
            last,
            conversation,
        )
        return self._with_attachments(rows)

    def tree(self, conversation: int) -> list[Message]:
        """All messages of all branches, parents before children."""
        rows = self._database.rows(
            "SELECT *, NULL AS siblings FROM message WHERE conversation = ? ORDER BY id", conversation
        )
        return self._with_attachments(rows)

    def message(self, message: int) -> Message:
        """One message."""
        rows = self._database.rows("SELECT *, NULL AS siblings FROM message WHERE id = ?", message)
        if not rows:
            raise StorageError(f"message {message} does not exist: it may have been deleted in another window")
        return self._with_attachments(rows)[0]

    def add(
        self,
        conversation: int,
        role: str,
        content: str,
        *,
        parent: int | None,
        state: str = "complete",
        details: Mapping[str, Any] | None = None,
        attachments: Iterable[Attachment] = (),
    ) -> Message:
        """Adds a message after ``parent`` (None: as a first one), and shows the branch that it ends."""
        with self._database.transaction() as connection:
            before = self.get(conversation)
            message = _insert(connection, conversation, parent, role, content, state, details or {}, attachments)
            title = {"title": title_of(content)} if before.title == NEW_TITLE and role == "user" else {}
            self.update(conversation, touch=True, head=message, **title)
            return self.message(message)

    def write(self, message: int, content: str, state: str, details: Mapping[str, Any] | None = None) -> None:
        """Replaces the text of an answer that streams; with another state than "streaming" it has come to its end."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE message SET content = ?, state = ?, details = ? WHERE id = ?",
                (_storable(content), state, json.dumps(details or {}), message),
            )

    def show(self, message: int) -> Conversation:
        """Shows the newest branch that goes through a message."""
        conversation = self.message(message).conversation
        row = self._database.row(
            """WITH RECURSIVE below (id) AS (
                SELECT ? UNION ALL SELECT message.id FROM message JOIN below ON message.parent = below.id)
            SELECT max(below.id) FROM below WHERE NOT EXISTS (SELECT 1 FROM message WHERE parent = below.id)""",
            message,
        )
        return self.update(conversation, head=message if row is None else row[0])

    def end_interrupted(self) -> int:
        """Marks answers that were streaming when the app ended as stopped; returns how many there were."""
        with self._database.transaction() as connection:
            cursor = connection.execute(
                "UPDATE message SET state = 'stopped', details = json_set(details, '$.interrupted', json('true')) "
                "WHERE state = 'streaming'"
            )
            return cursor.rowcount

    def _with_attachments(self, rows: list[Row]) -> list[Message]:
        if not rows:
            return []
        found: dict[int, list[Attachment]] = {}
        for row in self._database.rows(
            "SELECT attachment.* FROM attachment JOIN message ON message.id = attachment.message "
            "WHERE message.conversation = ? ORDER BY attachment.id",
            rows[0]["conversation"],
        ):
            found.setdefault(row["message"], []).append(Attachment(row["name"], row["content"]))
        return [_message(row, found.get(row["id"], [])) for row in rows]


def title_of(text: str) -> str:
    """A title from the first words of a message."""
    words = " ".join(text.split())
    return words if len(words) <= _TITLE_CHARACTERS else words[: _TITLE_CHARACTERS - 1].rstrip() + "…"


def _storable(text: str) -> str:
    """A text without halves of characters, which browsers may send and SQLite does not take."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _insert(
    connection: Connection,
    conversation: int,
    parent: int | None,
    role: str,
    content: str,
    state: str,
    details: Mapping[str, Any],
    attachments: Iterable[Attachment],
) -> int:
    cursor = connection.execute(
        "INSERT INTO message (conversation, parent, role, content, state, details, created) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (conversation, parent, role, _storable(content), state, json.dumps(dict(details)), time.time()),
    )
    message = int(cursor.lastrowid or 0)
    connection.executemany(
        "INSERT INTO attachment (message, name, content) VALUES (?, ?, ?)",
        [(message, _storable(each.name), _storable(each.content)) for each in attachments],
    )
    return message


def _conversation(row: Row) -> Conversation:
    return Conversation(
        id=row["id"],
        title=row["title"],
        folder=row["folder"],
        system_prompt=row["system_prompt"],
        sampling=json.loads(row["sampling"]),
        head=row["head"],
        created=row["created"],
        updated=row["updated"],
    )


def _message(row: Row, attachments: list[Attachment]) -> Message:
    siblings = sorted(map(int, row["siblings"].split(","))) if row["siblings"] else [row["id"]]
    return Message(
        id=row["id"],
        conversation=row["conversation"],
        parent=row["parent"],
        role=row["role"],
        content=row["content"],
        state=row["state"],
        details=json.loads(row["details"]),
        created=row["created"],
        siblings=tuple(siblings),
        attachments=tuple(attachments),
    )
