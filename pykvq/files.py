"""Writing files so that nobody ever sees half of one, and telling whether one is what it should be."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pykvq.errors import InvalidArgumentError, ModelFileError


@contextlib.contextmanager
def temporary_beside(path: Path, purpose: str = "part") -> Iterator[Path]:
    """Yields the path of an empty file in the same folder, which is deleted when the block ends.

    Raises:
        ModelFileError: the folder is missing or not writable.
    """
    if not path.parent.is_dir():
        raise ModelFileError(f"the folder '{path.parent}' does not exist: create it, or choose another")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{purpose}")
    try:
        with temporary.open("wb"):
            pass
        yield temporary
    except OSError as error:
        raise ModelFileError(f"cannot write '{path}' ({error.strerror or error}): choose another place") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def written_at_once(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path``, whose place it takes when the block ends without an exception.

    Raises:
        ModelFileError: the folder is missing or not writable, or ``path`` is something else than a file.
    """
    if path.exists() and not path.is_file():
        raise ModelFileError(f"'{path}' exists and is no file: choose another name")
    with temporary_beside(path) as temporary:
        yield temporary
        os.replace(temporary, path)


def require_other_file(target: Path, *sources: Path) -> None:
    """Refuses to write over what is read.

    Raises:
        InvalidArgumentError: ``target`` is one of ``sources``, by whatever name.
    """
    for source in sources:
        if target.exists() and source.exists() and target.samefile(source):
            raise InvalidArgumentError(f"'{target}' is '{source}' itself, which is read: write to another file")


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON, which has no NaN and no infinity: these become null."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: plain(each) for name, each in part.items()}
        if isinstance(part, (list, tuple)):
            return [plain(each) for each in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(plain(value), indent=indent, allow_nan=False)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def require_space(folder: Path, needed: int) -> None:
    """Refuses to begin what would fill the disk.

    Raises:
        ModelFileError: fewer than ``needed`` bytes are free.
    """
    if not folder.is_dir():
        raise ModelFileError(f"the folder '{folder}' does not exist: create it, or choose another")
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelFileError(
            f"not enough space in {folder}: about {needed / 1e6:.0f} MB will be written, {free / 1e6:.0f} MB are free"
        )
