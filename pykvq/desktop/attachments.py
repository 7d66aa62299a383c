"""Files that go with a message: their text, and how a model gets it."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pykvq.desktop.conversations import Attachment
from pykvq.errors import InvalidArgumentError, LibraryError

MAX_BYTES = 8 << 20
_MAX_CHARACTERS = 2_000_000
_MAX_PAGES = 2_000
_MAX_SECONDS = 60.0


def read_attachment(name: str, data: bytes) -> Attachment:
    """The text of a text file or PDF. Call it in a thread: large PDFs take seconds.

    Raises:
        InvalidArgumentError: too large, no text, or damaged. LibraryError: reading PDFs needs a package.
    """
    if len(data) > MAX_BYTES:
        raise InvalidArgumentError(
            f"{name} has {len(data) / 2**20:.1f} MiB: attach files of at most {MAX_BYTES >> 20} MiB"
        )
    text = _pdf_text(name, data) if data.startswith(b"%PDF-") else _plain_text(name, data)
    if not text.strip():
        raise InvalidArgumentError(f"{name} has no text: a scanned PDF needs text recognition first")
    if len(text) > _MAX_CHARACTERS:
        raise InvalidArgumentError(f"{name} has {len(text):,} characters: attach at most {_MAX_CHARACTERS:,}")
    return Attachment(name, text)


def with_attachments(content: str, attachments: Sequence[Attachment]) -> str:
    """A message's text with that of its files before it."""
    parts = [f"File {attachment.name}:\n\n{attachment.content}" for attachment in attachments]
    return "\n\n---\n\n".join([*parts, content])


def _plain_text(name: str, data: bytes) -> str:
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"{name} is neither text (UTF-8) nor a PDF: convert it first") from error
    if "\0" in text:
        raise InvalidArgumentError(f"{name} is a binary file: attach texts and PDFs")
    return text


def _pdf_text(name: str, data: bytes) -> str:
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise LibraryError(f"reading PDFs needs pypdf ({error}): pip install 'pykvq[desktop]'") from error
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise InvalidArgumentError(f"{name} is locked with a password: save it without one, and attach that")
        if len(reader.pages) > _MAX_PAGES:
            raise InvalidArgumentError(f"{name} has {len(reader.pages):,} pages: attach at most {_MAX_PAGES:,}")
        return "\n\n".join(_page_texts(name, reader.pages))
    except InvalidArgumentError:
        raise
    except Exception as error:  # damaged files make it raise nearly anything
        raise InvalidArgumentError(f"{name} cannot be read as a PDF ({error}): save it anew, or attach text") from error


def _page_texts(name: str, pages: Sequence[Any]) -> Iterator[str]:
    """The texts of pages, as long as they are short enough and come soon enough."""
    end, n_characters = time.monotonic() + _MAX_SECONDS, 0
    for i, page in enumerate(pages):
        text = page.extract_text()
        n_characters += len(text)
        if n_characters > _MAX_CHARACTERS:
            raise InvalidArgumentError(
                f"{name} has more than {_MAX_CHARACTERS:,} characters on its first {i + 1} pages: attach a part of it"
            )
        if time.monotonic() > end:
            raise InvalidArgumentError(
                f"{name} takes longer than {_MAX_SECONDS:.0f} s to read ({i + 1} of {len(pages)} pages): attach a part"
            )
        yield text
