"""A saved chat: one file with the messages and the state of the KV cache.

The file is a zip archive without compression: ``chat.json`` ({"format": "pykvq-chat", "version": 1, "messages": [...]})
and ``state.bin`` (what ``Llama.save_state()`` returns). zip's own checksums show damage.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from pykvq.chat_template import check_messages
from pykvq.errors import ChatFileError, InvalidArgumentError

_FORMAT = {"format": "pykvq-chat", "version": 1}
_MESSAGES, _STATE = "chat.json", "state.bin"


def save_chat(path: Path, messages: list[dict[str, Any]], state: bytes) -> None:
    """Writes a chat; an older one at the same path is replaced in one step.

    Raises:
        ChatFileError: the folder cannot be written to, or another kind of file is in the way.
    """
    if path.exists() and not _is_chat(path):
        raise ChatFileError(f"{path} exists and is not a saved chat: choose another name")
    header = json.dumps({**_FORMAT, "messages": messages}, ensure_ascii=False)
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".pykvq-chat-", dir=path.parent)
    except OSError as error:
        raise ChatFileError(f"cannot write to {path.parent} ({error.strerror}): choose another folder") from error
    try:
        with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(_MESSAGES, header)
            archive.writestr(_STATE, state)
        os.replace(temporary, path)
    except OSError as error:
        raise ChatFileError(f"cannot write {path} ({error.strerror or error}): choose another place") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def load_chat(path: Path) -> tuple[list[dict[str, Any]], bytes]:
    """The messages and the state in a file.

    Raises:
        ChatFileError: it is missing, unreadable, damaged, or not a chat that pykvq saved.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_entries(path, archive)
            header = json.loads(archive.read(_MESSAGES).decode("utf-8"))
            state = archive.read(_STATE)
    except OSError as error:
        raise ChatFileError(f"cannot read {path} ({error.strerror or error}): check the path") from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise ChatFileError(f"{path} is damaged or not a saved chat ({error})") from error
    except ValueError as error:
        raise ChatFileError(f"{path} is not a saved chat: {_MESSAGES} cannot be read ({error})") from error
    if not isinstance(header, dict) or {key: header.get(key) for key in _FORMAT} != _FORMAT:
        raise ChatFileError(f"{path} is not a saved chat of version {_FORMAT['version']}")
    try:
        messages = header.get("messages")
        return (check_messages(messages) if messages else []), state
    except InvalidArgumentError as error:
        raise ChatFileError(f"{path} is not a saved chat: {error}") from error


def _check_entries(path: Path, archive: zipfile.ZipFile) -> None:
    entries = {entry.filename: entry for entry in archive.infolist()}
    if set(entries) != {_MESSAGES, _STATE}:
        raise ChatFileError(f"{path} is not a saved chat: it holds other files than {_MESSAGES} and {_STATE}")
    # without compression a file can ask for no more memory than its own size
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
        raise ChatFileError(f"{path} is not a saved chat: its content is compressed")


def _is_chat(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return set(archive.namelist()) == {_MESSAGES, _STATE}
    except (OSError, zipfile.BadZipFile):
        return False
