"""Conversations as files: Markdown to read, JSON to take back in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pykvq.desktop import sampling
from pykvq.desktop.conversations import Attachment, Conversation, Conversations, Message
from pykvq.errors import ChatFileError

_FORMAT = "pykvq conversation"
_VERSION = 1
_ROLES = {"user": "You", "assistant": "Model"}
_STATES = ("complete", "streaming", "stopped", "failed")
# what is known about an answer, and of which type
_DETAILS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "n_tokens": (int,),
    "n_prompt_tokens": (int,),
    "tokens_per_second": (int, float),
    "first_token_seconds": (int, float),
    "finish_reason": (str,),
    "error": (str,),
    "interrupted": (bool,),
}
_MAX_NUMBER = 2**53
MAX_BYTES = 64 << 20


def to_markdown(conversation: Conversation, messages: Sequence[Message]) -> str:
    """The branch that is shown."""
    parts = [f"# {conversation.title}"]
    if conversation.system_prompt:
        parts += ["## System", conversation.system_prompt]
    for message in messages:
        parts += [f"## {_ROLES[message.role]}", message.content]
        parts += [f"*Attached: {attachment.name}*" for attachment in message.attachments]
    return "\n\n".join(parts) + "\n"


def to_json(conversation: Conversation, messages: Sequence[Message]) -> str:
    """All branches, as ``Conversations.tree`` lists them."""
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        **{name: getattr(conversation, name) for name in ("title", "folder", "system_prompt", "sampling", "head")},
        "messages": [asdict(message) for message in messages],
    }
    return json.dumps(data, ensure_ascii=False, indent=1)


def from_json(store: Conversations, text: str | bytes) -> Conversation:
    """Takes a conversation in that ``to_json`` wrote; the file may be anything. Call it in a thread.

    Raises:
        ChatFileError: it is not such a file; nothing is stored then. StorageError.
    """
    try:
        data = json.loads(text, parse_constant=_no_number)
        if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("version") != _VERSION:
            raise ValueError("it is not a conversation that this version of pykvq exported")
        messages = [_message(item) for item in data["messages"]]
        known = set()
        for message in messages:
            if message.id in known or (message.parent is not None and message.parent not in known):
                raise ValueError(f"message {message.id} has no place in the conversation")
            known.add(message.id)
        if data["head"] is not None and data["head"] not in known:
            raise ValueError(f"its last message {data['head']!r} is not there")
        if not isinstance(data["sampling"], dict):
            raise ValueError("its sampling is no object")
        values = sampling.cleaned(data["sampling"])
        fields = {name: _text(data, name) for name in ("title", "folder", "system_prompt")}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ChatFileError(f"cannot import the file ({what}): choose a .json file exported from pykvq") from error
    return store.create_tree(messages, data["head"], **fields, sampling=values)


def _message(item: Any) -> Message:
    if item["role"] not in _ROLES or item["state"] not in _STATES:
        raise ValueError(f"a message has the role {item['role']!r} and the state {item['state']!r}")
    if not isinstance(item["details"], dict) or not isinstance(item["id"], int):
        raise ValueError("a message's id or details are of a wrong type")
    return Message(
        id=item["id"],
        conversation=0,
        parent=item["parent"],
        role=item["role"],
        content=_text(item, "content"),
        state=item["state"],
        details=_details(item["details"]),
        created=0.0,
        attachments=tuple(Attachment(_text(each, "name"), _text(each, "content")) for each in item["attachments"]),
    )


def _text(item: Any, name: str) -> str:
    value = item[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return value


def _details(found: dict[str, Any]) -> dict[str, Any]:
    """What of it can be shown."""
    details = {name: found[name] for name, kinds in _DETAILS.items() if isinstance(found.get(name), kinds)}
    if any(not isinstance(value, str) and abs(value) > _MAX_NUMBER for value in details.values()):
        raise ValueError("a message's details have a number that is too large")
    return details


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")
