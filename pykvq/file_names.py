"""How model files are named: the parts of a split model, and the calibration beside a model."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pykvq.errors import ModelFileError

CALIBRATION_SUFFIX = ".kvq.gguf"
MAX_PARTS = 1 << 12
_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})$")


def is_model(name: str) -> bool:
    """Whether a file name is that of a model, not of a projector or of a calibration."""
    return name.endswith(".gguf") and not name.endswith(CALIBRATION_SUFFIX) and not name.startswith(("mmproj", "."))


def model_stem(name: str) -> str:
    """A file's name without ``.gguf``, and without the number of a part."""
    stem = name.removesuffix(".gguf")
    match = _PART_NAME.match(stem)
    return match["stem"] if match else stem


def part_paths(path: str | os.PathLike[str]) -> list[Path]:
    """All files of a split model, given any of them; the file itself for a model in one file.

    Raises:
        ModelFileError: the name tells an impossible number of parts.
    """
    path = Path(path)
    match = _PART_NAME.match(path.name.removesuffix(".gguf")) if path.suffix == ".gguf" else None
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count <= MAX_PARTS:
        raise ModelFileError(f"'{path}' is named as part {number} of {count}: rename it, or fetch the model again")
    return [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def calibration_path(model_path: str | os.PathLike[str]) -> Path:
    """Where the calibration beside a model is: MODEL.kvq.gguf, of a split model beside its first part."""
    first = part_paths(model_path)[0]
    return first.with_name(first.name.removesuffix(".gguf") + CALIBRATION_SUFFIX)
