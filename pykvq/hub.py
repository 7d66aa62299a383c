"""Downloads from the Hugging Face hub, or from a mirror that speaks its API.

Downloads resume where they were interrupted, and a file is only put in its place when its SHA-256 is the hub's. The
hub is the one that HF_ENDPOINT names, the token is HF_TOKEN or the one that `hf auth login` kept, and HF_HUB_OFFLINE=1
forbids the network.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from pykvq.catalog import cache_dir
from pykvq.errors import DownloadError, InvalidArgumentError
from pykvq.file_names import model_stem, part_paths
from pykvq.files import sha256_of

Progress = Callable[[int, int], None]

_REFERENCE = re.compile(r"(?:hf:)?(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<file>[^:]+))?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ENDPOINT = re.compile(r"https?://[^\s/]\S*")
# what to take from a repository when nobody says
_PREFERRED = ("q4_k_m", "q4_0", "q5_k_m", "q8_0", "f16", "bf16")
_LISTED = 12
_TIMEOUT_SECONDS = 20


@dataclass(frozen=True)
class Reference:
    """A repository, and which of its models: a file, a type such as "Q4_K_M", or None for the usual one."""

    repo: str
    file: str | None

    def __str__(self) -> str:
        return f"hf:{self.repo}" + (f":{self.file}" if self.file else "")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository."""

    name: str
    n_bytes: int
    sha256: str | None


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]


def models_dir() -> Path:
    """Where pykvq keeps models: catalog models as they are, those of the hub below ORG/REPO."""
    return cache_dir() / "models"


def hf_cache_dir() -> Path:
    """The cache of the Hugging Face libraries, which other programs share."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def parse_reference(text: str) -> Reference:
    """Reads hf:ORG/REPO[:FILE].

    Raises:
        InvalidArgumentError: it is none.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None or ".." in text:
        raise InvalidArgumentError(f"{text!r} names no model of the hub: write hf:ORG/REPO or hf:ORG/REPO:FILE")
    return Reference(match["repo"], match["file"])


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def pull(reference: Reference, progress: Progress | None = None) -> Path:
    """Fetches a model and returns the path of its (first) file; what is here in full is not fetched again.

    Raises:
        DownloadError: offline, no such repository or file, no permission, no space, or a file with another hash.
    """
    if is_offline():
        return _pulled_before(reference, None)
    try:
        repository = list_files(reference.repo)
    except DownloadError as error:
        return _pulled_before(reference, error)
    chosen = choose(repository, reference.file)
    cached = _in_hub_cache(repository, chosen)
    if cached is not None:
        return cached
    fetch_files(repository, chosen, models_dir() / repository.repo, progress)
    return models_dir() / repository.repo / chosen[0].name


def list_files(repo: str) -> Repository:
    """The files of a repository at its newest commit.

    Raises:
        DownloadError: no such repository, no permission, or no network.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils._validators import validate_repo_id

    endpoint = _endpoint()
    try:
        with _hub_errors(repo):
            info = HfApi(endpoint=endpoint).model_info(repo, files_metadata=True, timeout=_TIMEOUT_SECONDS)
        if not _COMMIT.fullmatch(info.sha or ""):
            raise ValueError(f"the commit is {info.sha!r}")
        # a repository that was renamed answers with its new name
        name = parse_reference(info.id).repo
        validate_repo_id(name)
        return Repository(name, str(info.sha), tuple(_hub_file(repo, each) for each in info.siblings or []))
    except DownloadError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DownloadError(
            f"{endpoint or 'the hub'} does not describe {repo} as a hub does ({type(error).__name__}: {error}): check "
            "HF_ENDPOINT, or try again later"
        ) from error


def _hub_file(repo: str, sibling: Any) -> HubFile:
    """A file as the hub describes it, once nothing of that can lead out of the model's folder."""
    name = sibling.rfilename
    path = PurePosixPath(name)
    # written another way, a name may be that of another file, or a command to a terminal
    is_plain = str(path) == name and name.isprintable() and not set(name) & set("\\:")
    if not is_plain or path.is_absolute() or ".." in path.parts:
        raise DownloadError(f"{repo} has a file named {name!r}: it is not fetched")
    digest = sibling.lfs.sha256 if sibling.lfs else None
    if digest is not None and not _SHA256.fullmatch(digest):
        raise DownloadError(f"{repo}: the hub's sha256 of {name} is {digest!r}, which is none")
    size = int(sibling.size or 0)
    if size < 0:
        raise DownloadError(f"{repo}: the hub says that {name} has {size} bytes")
    return HubFile(name, size, digest)


def choose(repository: Repository, wanted: str | None) -> list[HubFile]:
    """The file, or the files of a split model, that ``wanted`` names.

    Raises:
        DownloadError: there is none; the message lists what there is.
    """
    models: dict[str, list[HubFile]] = {}
    for file in sorted(repository.files, key=lambda file: file.name):
        name = PurePosixPath(file.name)
        if name.suffix == ".gguf" and not name.name.startswith("mmproj"):
            models.setdefault(model_stem(file.name), []).append(file)
    if not models:
        raise DownloadError(
            f"{repository.repo} has no GGUF file: convert it with `pykvq-convert {repository.repo} OUT.gguf`"
        )
    for tag in [wanted] if wanted else [*_PREFERRED, ""]:
        matching = [files for stem, files in models.items() if _matches(stem, files, tag)]
        if matching:
            return _complete(repository, matching[0])
    names = [files[0].name for files in models.values()]
    listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    raise DownloadError(f"{repository.repo} has no model {wanted!r}: it has {listed}")


def fetch_files(repository: Repository, files: list[HubFile], folder: Path, progress: Progress | None = None) -> None:
    """Fetches files of a repository into a folder; those that are here in full are not fetched again.

    Raises:
        DownloadError: no space, no permission, a broken connection, or a file with another hash, which is deleted.
    """
    total = sum(file.n_bytes for file in files)
    done = 0
    missing = []
    for file in files:
        if _is_here(folder / file.name, file):
            done += file.n_bytes
        else:
            missing.append(file)
    _require_space(folder, sum(file.n_bytes - _size(_partial(folder, file)) for file in missing))
    for file in missing:

        def report(n_bytes: int, already: int = done) -> None:
            if progress is not None:
                progress(already + n_bytes, total)

        _fetch(repository, file, folder, report)
        done += file.n_bytes


def has_type(stem: str, tag: str) -> bool:
    """Whether a file name without its ending says that the model is of a type, such as "Q4_K_M"."""
    return re.search(rf"(^|[-._]){re.escape(tag.lower())}$", stem.lower()) is not None


def _matches(stem: str, files: list[HubFile], tag: str) -> bool:
    names = {name for file in files for name in (file.name, PurePosixPath(file.name).name)}
    return tag == "" or tag in names or has_type(PurePosixPath(stem).name, tag.removesuffix(".gguf"))


def _complete(repository: Repository, files: list[HubFile]) -> list[HubFile]:
    expected = [path.name for path in part_paths(PurePosixPath(files[0].name).name)]
    if [PurePosixPath(file.name).name for file in files] != expected:
        raise DownloadError(f"{repository.repo} has {len(files)} of the {len(expected)} files of {files[0].name}")
    return files


def _pulled_before(reference: Reference, problem: DownloadError | None) -> Path:
    """The model as it is on this machine, when the hub cannot be asked."""
    from pykvq.models import find

    model = find(str(reference))
    if model is not None:
        return model.path
    if problem is not None:
        raise problem
    raise DownloadError(f"{reference} is not on this machine, and HF_HUB_OFFLINE is set: unset it to fetch it")


def _in_hub_cache(repository: Repository, files: list[HubFile]) -> Path | None:
    """The path of the first file if another program fetched all of them into the Hugging Face cache."""
    from huggingface_hub import try_to_load_from_cache

    paths = [
        try_to_load_from_cache(repository.repo, file.name, cache_dir=hf_cache_dir(), revision=repository.commit)
        for file in files
    ]
    found = [Path(path) for path in paths if isinstance(path, str)]
    sizes = [_size(path) for path in found]
    return found[0] if sizes == [file.n_bytes for file in files] else None


def _endpoint() -> str | None:
    endpoint = os.environ.get("HF_ENDPOINT")
    if not endpoint:
        return None
    if not _ENDPOINT.fullmatch(endpoint):
        raise DownloadError(f"HF_ENDPOINT is {endpoint!r}, which is no address: set it to http://HOST or https://HOST")
    return endpoint


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _partial(folder: Path, file: HubFile) -> Path:
    """Where a file grows; the hash in its name keeps an older version from being continued."""
    target = folder / file.name
    return target.with_name(f".{target.name}.{(file.sha256 or 'unknown')[:16]}.part")


def _is_here(path: Path, file: HubFile) -> bool:
    # its hash was compared before it was moved here
    return path.is_file() and path.stat().st_size == file.n_bytes


def _require_space(folder: Path, needed: int) -> None:
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise DownloadError(
            f"not enough space in {parent}: {needed / 1e6:.0f} MB are to be fetched, {free / 1e6:.0f} MB are free; "
            "free some, or set PYKVQ_CACHE_DIR to a folder with more room"
        )


class _OversizedError(Exception):
    """More came than the hub said."""


class _CountingFile:
    """A file for the hub's client to write to, which tells how far it is and takes ``n_bytes`` at most."""

    def __init__(self, file: BinaryIO, on_size: Callable[[int], None], n_bytes: int) -> None:
        self._file = file
        self._on_size = on_size
        self._n_bytes = n_bytes

    def write(self, block: bytes) -> int:
        if self._file.tell() + len(block) > self._n_bytes:
            raise _OversizedError
        n = self._file.write(block)
        self._on_size(self._file.tell())
        return n

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def _only_one_process(partial: Path) -> Iterator[None]:
    """Waits until no other process writes to the same partial file."""
    import filelock

    locks = cache_dir() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(locks / f"{hashlib.sha256(os.fsencode(partial)).hexdigest()[:32]}.lock"):
        yield


def _fetch(repository: Repository, file: HubFile, folder: Path, on_size: Callable[[int], None]) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars  # type: ignore[attr-defined, unused-ignore]

    disable_progress_bars("huggingface_hub.http_get")
    # it tells every try again; what fails in the end is told by us
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    target, partial = folder / file.name, _partial(folder, file)
    url = hf_hub_url(repository.repo, file.name, revision=repository.commit, endpoint=_endpoint())
    with _write_errors(target.parent), _only_one_process(partial):
        if _is_here(target, file):  # another process was faster
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if _size(partial) > file.n_bytes:
            partial.unlink()
        try:
            with partial.open("ab") as output, _hub_errors(f"{repository.repo}:{file.name}"):
                if output.tell() < file.n_bytes:  # else it was interrupted between its last byte and its hash
                    http_get(
                        url,
                        _CountingFile(output, on_size, file.n_bytes),  # type: ignore[arg-type, unused-ignore]
                        resume_size=output.tell(),
                        headers=build_hf_headers(),
                        expected_size=file.n_bytes,
                    )
        except _OversizedError as error:
            partial.unlink()
            raise DownloadError(
                f"{file.name} from {repository.repo} has more than the {file.n_bytes} bytes that the hub says: it was "
                "deleted; try again, or check the mirror that HF_ENDPOINT names"
            ) from error
        _verify(partial, file, repository)
        os.replace(partial, target)


def _verify(partial: Path, file: HubFile, repository: Repository) -> None:
    if file.sha256 is None:  # a small file that the hub keeps in git; its size was compared
        return
    digest = sha256_of(partial)
    if digest != file.sha256:
        partial.unlink()
        raise DownloadError(
            f"{file.name} from {repository.repo} has sha256 {digest}, the hub says {file.sha256}: it was "
            "deleted; try again, or check the mirror that HF_ENDPOINT names"
        )


@contextlib.contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Turns failures of the disk into one line; what was fetched so far stays for the next try."""
    try:
        yield
    except DownloadError:
        raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DownloadError(
                f"no space left in {folder}: free some and repeat the command, it goes on where it stopped"
            ) from error
        raise DownloadError(
            f"cannot write to {folder} ({error.strerror or error}): set PYKVQ_CACHE_DIR to a folder you can write to"
        ) from error


@contextlib.contextmanager
def _hub_errors(what: str) -> Iterator[None]:
    """Turns failures of the hub's client into one line."""
    from huggingface_hub import errors

    hub = _endpoint() or "the hub"
    try:
        yield
    except DownloadError:
        raise
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{what} is gated: accept its terms on its page and set HF_TOKEN to a token of yours"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"{hub} has no repository {what}, or it is private: check the name, and set HF_TOKEN if it is private"
        ) from error
    except errors.EntryNotFoundError as error:
        raise DownloadError(f"{hub} has no {what} any more: try again") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no status"
        advice = "set HF_TOKEN to a token that may read it" if status in (401, 403) else "try again later"
        raise DownloadError(f"{hub} refused {what} with status {status}: {advice}") from error
    except errors.HFValidationError as error:
        raise DownloadError(f"{what} is no name that the hub knows: write ORG/REPO") from error
    except errors.HTTPError as error:  # type: ignore[attr-defined, unused-ignore]
        raise DownloadError(
            f"the connection to {hub} failed while fetching {what} ({error}): repeat the command, it goes on where it "
            "stopped; HF_ENDPOINT names a mirror"
        ) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise DownloadError(
            f"{what} was cut short ({' '.join(str(error).split())}): repeat the command, it goes on where it stopped"
        ) from error
    except UnicodeEncodeError as error:  # in a header
        raise DownloadError("the token for the hub has characters that no token has: check HF_TOKEN") from error
