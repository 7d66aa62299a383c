"""The model library: which model files are on this machine, and how a name becomes the path of one.

Folders of llama.cpp, LM Studio and the Hugging Face cache are recognised beside pykvq's own.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pykvq import catalog, hub
from pykvq.errors import InvalidArgumentError, ModelFileError
from pykvq.file_names import is_model, model_stem, part_paths

_FOLDERS_VARIABLE = "PYKVQ_MODELS_DIR"
# a folder given by mistake (the root of a disk, say) must not be walked for minutes
_MAX_DEPTH = 6
_MAX_FOLDERS = 20_000
_HUB_FOLDER = re.compile(r"models--(?P<org>[^/]+?)--(?P<repo>[^/]+)$")


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine. ``path`` is its first file if it is split in several."""

    name: str
    source: str
    path: Path
    n_files: int
    file_bytes: int


@dataclass(frozen=True)
class Folder:
    """A folder with models, and whose it is."""

    source: str
    path: Path


def folders() -> list[Folder]:
    """Where models are looked for; some may not exist."""
    home = Path.home()
    cache = home / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    given = filter(None, os.environ.get(_FOLDERS_VARIABLE, "").split(os.pathsep))
    return [
        Folder("pykvq", hub.models_dir()),
        *(Folder(_FOLDERS_VARIABLE, Path(part).expanduser()) for part in given),
        Folder("Hugging Face", hub.hf_cache_dir()),
        Folder("LM Studio", home / ".lmstudio" / "models"),
        Folder("LM Studio", home / ".cache" / "lm-studio" / "models"),
        Folder("llama.cpp", Path(os.environ.get("LLAMA_CACHE") or cache / "llama.cpp")),
    ]


def local_models() -> list[LocalModel]:
    """All models on this machine, by name."""
    found: dict[Path, LocalModel] = {}
    for folder in folders():
        for path in _model_files(folder.path):
            with contextlib.suppress(OSError, ModelFileError):
                model = _local_model(folder, path)
                found.setdefault(path.resolve(), model)
    return sorted(found.values(), key=lambda model: (model.name.lower(), str(model.path)))


def find(name: str) -> LocalModel | None:
    """The model on this machine with this name, file name or path; None if there is none.

    Raises:
        InvalidArgumentError: several models have the name; the message lists them.
    """
    wanted = name.lower().removeprefix("hf:")
    models = local_models()
    for is_named in (_has_full_name, _has_short_name, _has_type):
        matches = [model for model in models if is_named(model, wanted)]
        if len(matches) > 1:
            listed = ", ".join(sorted({model.name for model in matches}))
            if len({model.name for model in matches}) > 1:
                raise InvalidArgumentError(f"{name!r} may be one of {listed}: give the full name")
        if matches:
            return matches[0]
    return None


def resolve(name: str, *, fetch: bool = True, progress: hub.Progress | None = None) -> Path:
    """The path of the model that a command-line argument names.

    It may be a path, hf:ORG/REPO[:FILE], a name of the catalog, or the name of a model on this machine. A path that
    does not exist is returned as it is, for the loader to report.

    Args:
        name: what the user typed.
        fetch: download what is not here.
        progress: called with (bytes so far, bytes in all) meanwhile.

    Raises:
        DownloadError: it cannot be fetched. InvalidArgumentError: the name is ambiguous or no name.
        ModelFileError: it is not here, and ``fetch`` is False.
    """
    path = Path(name)
    if not name.startswith("hf:") and (path.exists() or (name.endswith(".gguf") and os.sep in name)):
        return path
    if name.startswith("hf:") and fetch:
        return hub.pull(hub.parse_reference(name), progress)
    _, entries = catalog.load_catalog()
    if name in entries and (fetch or catalog.is_cached(entries[name])):
        return catalog.fetch(entries[name], progress)
    model = find(name)
    if model is not None:
        return model.path
    if name.startswith("hf:"):
        raise ModelFileError(f"{name} is not on this machine: fetch it with `pykvq-models pull {name}`")
    return path


def remove(model: LocalModel) -> None:
    """Deletes a model that pykvq fetched.

    Raises:
        InvalidArgumentError: it lies in another program's folder. ModelFileError: it cannot be deleted.
    """
    own = hub.models_dir()
    if own.resolve() not in model.path.resolve().parents:
        raise InvalidArgumentError(
            f"{model.path} belongs to {model.source}, not to pykvq: delete it there, or the file itself"
        )
    try:
        for path in part_paths(model.path):
            path.unlink(missing_ok=True)
        for folder in model.path.parents:
            if folder == own or any(folder.iterdir()):
                break
            folder.rmdir()
    except OSError as error:
        raise ModelFileError(
            f"cannot delete {model.path} ({error.strerror}): check the folder's permissions"
        ) from error


def _model_files(root: Path) -> Iterator[Path]:
    """The first files of the models below a folder."""
    for n_folders, (folder, subfolders, files) in enumerate(os.walk(root)):
        if n_folders == _MAX_FOLDERS:
            return
        depth = len(Path(folder).relative_to(root).parts)
        subfolders[:] = [] if depth >= _MAX_DEPTH else sorted(name for name in subfolders if not name.startswith("."))
        for file in sorted(files):
            path = Path(folder) / file
            if is_model(file) and part_paths(path)[0] == path:
                yield path


def _local_model(folder: Folder, path: Path) -> LocalModel:
    parts = part_paths(path)
    return LocalModel(
        name=_name(folder, path),
        source=folder.source,
        path=path,
        n_files=len(parts),
        file_bytes=sum(part.stat().st_size for part in parts),
    )


def _name(folder: Folder, path: Path) -> str:
    """ORG/REPO:FILE where the layout tells them, else the file's name without its ending."""
    parts = path.relative_to(folder.path).parts
    stem = model_stem(path.name)
    match = _HUB_FOLDER.match(parts[0])
    if match and len(parts) > 3:  # models--ORG--REPO/snapshots/REVISION/FILE
        return f"{match['org']}/{match['repo']}:{stem}"
    return f"{parts[0]}/{parts[1]}:{stem}" if len(parts) > 2 else stem


def _has_full_name(model: LocalModel, wanted: str) -> bool:
    name = model.name.lower()
    return wanted in (name, f"{name}.gguf", str(model.path).lower())


def _has_short_name(model: LocalModel, wanted: str) -> bool:
    repo, _, stem = model.name.lower().rpartition(":")
    return wanted in (stem, f"{stem}.gguf", model.path.name.lower()) or (wanted == repo != "")


def _has_type(model: LocalModel, wanted: str) -> bool:
    repo, _, stem = model.name.lower().rpartition(":")
    wanted_repo, _, tag = wanted.rpartition(":")
    return wanted_repo == repo != "" and hub.has_type(stem, tag)
