"""Reading and writing the text files that a command line names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def write_json(path: Path, value: Any) -> None:
    """Writes a value as indented JSON.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write '{path}': {error.strerror or error}") from error
