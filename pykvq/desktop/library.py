"""The models that the app shows: those of the model library, and files that the user picked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pykvq import calibration, catalog, hub, models
from pykvq.desktop.jobs import Job
from pykvq.desktop.records import Records
from pykvq.errors import InvalidArgumentError, PykvqError
from pykvq.model_file import ModelFile, read_model_file
from pykvq.models import LocalModel
from pykvq.server.settings import LoadOptions

PICKED = "picked by you"
_SETTING = "picked_models"
_LAST_LOAD = "last_load"


@dataclass(frozen=True)
class LibraryModel:
    """A model with its facts; ``problem`` tells why there are none."""

    local: LocalModel
    facts: ModelFile | None
    problem: str | None
    calibration: str


class Library:
    """Its methods read many files: call them in a thread.

    Raises:
        PykvqError: a file is no model, or something cannot be stored.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    def all(self) -> list[LibraryModel]:
        """All models, by name."""
        found = {model.path: model for model in models.local_models() if not model.name.endswith(".kvq")}
        for name in self._records.setting(_SETTING, []):
            path = Path(name)
            if path.is_file() and path not in found:
                found[path] = LocalModel(path.stem, PICKED, path, 1, path.stat().st_size)
        return [_described(model, model.path.stat().st_mtime) for model in found.values()]

    def pick(self, text: str) -> Path:
        """Adds a file that the user names; it stays where it is."""
        path = Path(text.strip().strip('"')).expanduser()
        if not path.is_file():
            raise InvalidArgumentError(f"there is no file {str(path)!r}: give the path of a GGUF file")
        path = path.resolve()
        read_model_file(path)
        picked = self._records.setting(_SETTING, [])
        if str(path) not in picked:
            self._records.set(_SETTING, [*picked, str(path)])
        return path

    def remove(self, model: LocalModel) -> None:
        """Deletes a model that pykvq fetched; a picked one is only left out of the list."""
        if model.source == PICKED:
            picked = [name for name in self._records.setting(_SETTING, []) if name != str(model.path)]
            self._records.set(_SETTING, picked)
        else:
            models.remove(model)

    def last_load(self) -> tuple[Path, LoadOptions] | None:
        """What was loaded last, if it is still there."""
        last = self._records.setting(_LAST_LOAD)
        if last is None or not Path(last["path"]).is_file():
            return None
        return Path(last["path"]), LoadOptions(**last["options"])

    def keep_load(self, path: Path, options: LoadOptions) -> None:
        """Remembers what was loaded."""
        values = {"kv_quant": options.kv_quant, "n_slots": options.n_slots, "n_ctx": options.n_ctx}
        values |= {"n_threads": options.n_threads, "n_gpu_layers": options.n_gpu_layers}
        self._records.set(_LAST_LOAD, {"path": str(path), "options": values})


def fetch(reference: str, job: Job) -> Path:
    """Fetches a model of the hub, or the demo model for ""; ended and begun again it goes on where it was."""

    def report(done: int, total: int) -> None:
        job.require(done / total if total else 0.0)

    if not reference:
        return catalog.fetch(catalog.default_model(), report)
    return hub.pull(hub.parse_reference(reference), report)


@lru_cache(maxsize=512)
def _described(model: LocalModel, _changed: float) -> LibraryModel:
    try:
        facts, problem = read_model_file(model.path), None
    except PykvqError as error:
        return LibraryModel(model, None, str(error), "unknown")
    return LibraryModel(model, facts, problem, _calibration_text(model.path))


def _calibration_text(path: Path) -> str:
    try:
        info = calibration.find(path)
    except PykvqError as error:
        return str(error)
    return "none yet" if info is None else f"for contexts up to {info.n_positions:,} tokens"
