"""Reading a text that the command line names."""

from __future__ import annotations

from pykvq.errors import InvalidArgumentError


def read_text(path: str) -> str:
    """A text file; bytes that are no UTF-8 are replaced.

    Raises:
        InvalidArgumentError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        raise InvalidArgumentError(f"cannot read the text '{path}': {error.strerror or error}") from error
