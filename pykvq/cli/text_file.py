"""Reading and writing the text files that a command line names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pykvq.errors import InvalidArgumentError, ModelFileError
from pykvq.file_names import calibration_path, part_paths
from pykvq.files import json_text, require_other_file, written_at_once


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


def require_targets(targets: Iterable[Path | None], model_path: str, *others: str | None) -> None:
    """Refuses files that could not be written, or that are read, before the work whose results they are to hold.

    Args:
        others: what is read apart from the model and its calibration.

    Raises:
        InvalidArgumentError: a folder does not exist, a file is a folder, or it is one of those that are read.
    """
    read = [*part_paths(model_path), calibration_path(model_path), *(Path(name) for name in others if name)]
    for target in targets:
        if target is not None:
            _require_target(target, read)


def _require_target(target: Path, sources: Sequence[Path]) -> None:
    if not target.absolute().parent.is_dir():
        raise InvalidArgumentError(f"cannot write '{target}': its folder does not exist")
    if target.is_dir():
        raise InvalidArgumentError(f"cannot write '{target}': it is a folder, give the name of a file")
    require_other_file(target, *sources)


def write_json(path: Path, value: Any) -> None:
    """Writes a value as indented JSON, at once; what is not finite is null.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """
    text = json_text(value, indent=2) + "\n"
    try:
        if path.exists() and not path.is_file():  # such as /dev/stdout
            path.write_text(text, encoding="utf-8")
            return
        with written_at_once(path.resolve()) as temporary:  # a link stays one
            temporary.write_text(text, encoding="utf-8")
    except ModelFileError as error:
        raise InvalidArgumentError(str(error)) from error
    except OSError as error:
        raise InvalidArgumentError(f"cannot write '{path}': {error.strerror or error}") from error
