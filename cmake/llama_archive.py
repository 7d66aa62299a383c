"""The archive that llama.cpp comes from: the pin, the download cache, and safe unpacking. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath

# Top-level entries of llama.cpp that the libraries and the model converter need; all else stays in the archive.
WANTED = frozenset(
    {
        "CMakeLists.txt",
        "cmake",
        "ggml",
        "include",
        "src",
        "vendor",
        "conversion",
        "convert_hf_to_gguf.py",
        "gguf-py",
        "AUTHORS",
        "LICENSE",
        "licenses",
    }
)
REQUIRED = ("CMakeLists.txt", "ggml/CMakeLists.txt", "include/llama.h", "src/CMakeLists.txt")


class SourceError(Exception):
    """A failure that the caller can act on; the text is one line with the remedy."""


def say(text: str) -> None:
    """Print a line of progress, in order with what subprocesses print."""
    print(text, flush=True)


@dataclass(frozen=True)
class Pin:
    """Which archive llama.cpp comes from. sha256 is that of the archive, ggml_version that of ggml/CMakeLists.txt."""

    package: str
    version: str
    archive: str
    sha256: str
    subdirectory: str
    ggml_version: str

    @property
    def requirement(self) -> str:
        """The package as pip wants it named."""
        return f"{self.package}=={self.version}"

    @property
    def prefix(self) -> PurePosixPath:
        """Where llama.cpp lies inside the archive."""
        return PurePosixPath(self.archive.removesuffix(".tar.gz")) / self.subdirectory


def load_pin(path: Path) -> Pin:
    """Read a pin file; SourceError names the field that is missing."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Pin(**{field.name: str(values[field.name]) for field in fields(Pin)})
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise SourceError(f"cannot read the pin file {path}: {type(exc).__name__}: {exc}") from exc


# --- download and cache ---


def default_cache() -> Path:
    """$PYKVQ_CACHE_DIR/source, else pykvq's folder under the user's cache folder."""
    chosen = os.environ.get("PYKVQ_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser() / "source"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else home() / "AppData" / "Local") / "pykvq" / "Cache" / "source"
    if sys.platform == "darwin":
        return home() / "Library" / "Caches" / "pykvq" / "source"
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else home() / ".cache") / "pykvq" / "source"


def home() -> Path:
    """The user's home folder; SourceError where there is none, as in some containers."""
    try:
        return Path.home()
    except RuntimeError as exc:
        raise SourceError("this user has no home folder: set PYKVQ_CACHE_DIR to a folder for downloads") from exc


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def find_archive(pin: Pin, cache: Path, fallback: Path) -> Path:
    """The verified archive: from the cache, else fetched into it, else into fallback if the cache is not writable."""
    for folder in (cache, fallback):
        archive = folder / pin.archive
        if not archive.is_file():
            continue
        found = sha256_of(archive)
        if found == pin.sha256:
            return archive
        say(f"{archive} has sha256 {found}, the pin wants {pin.sha256}: fetching it again")
    try:
        scratch = make_scratch(cache)
    except OSError as exc:
        say(f"cache folder {cache} is not writable ({exc.strerror}): keeping {pin.archive} in {fallback} instead")
        cache, scratch = fallback, make_scratch(fallback)
    try:
        fetched = fetch(pin, scratch, cache)
        os.replace(fetched, cache / pin.archive)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return cache / pin.archive


def make_scratch(folder: Path) -> Path:
    """A new folder on the file system of `folder`, so that what lands there can be moved in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder))


def fetch(pin: Pin, scratch: Path, cache: Path) -> Path:
    """Download the archive into scratch with pip and verify it."""
    say(f"fetching {pin.requirement} with pip (kept in {cache})")
    # pip runs a source archive's build backend to read its metadata, so pip itself has to check the hash first
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{pin.requirement} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
    # -E: inside an isolated build PYTHONPATH hides the interpreter's own pip
    command = [sys.executable, "-E", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", pin.package, "--require-hashes", "-r", str(requirements)]
    command += ["-d", str(scratch)]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        raise SourceError(pip_failure(pin, result.returncode, result.stderr or result.stdout, cache))
    archive = scratch / pin.archive
    if not archive.is_file():
        found = ", ".join(sorted(path.name for path in scratch.iterdir() if path != requirements)) or "nothing"
        raise SourceError(f"pip was to fetch {pin.archive} and brought {found}; {by_hand(pin, cache)}")
    actual = sha256_of(archive)
    if actual != pin.sha256:
        raise SourceError(hash_differs(pin, actual, cache))
    return archive


def pip_failure(pin: Pin, code: int, output: str, cache: Path) -> str:
    """One line from pip's output: what failed and the way out."""
    if "No module named pip" in output:
        return f"{sys.executable} has no pip: run '{sys.executable} -m ensurepip', or {by_hand(pin, cache)}"
    if "DO NOT MATCH THE HASHES" in output:
        found = re.search(r"Got\s+([0-9a-f]{64})", output)
        return hash_differs(pin, found.group(1) if found else "another one", cache)
    errors = [line.strip() for line in output.splitlines() if "ERROR" in line or "error:" in line]
    last = "; ".join((errors or output.strip().splitlines())[-3:]) or "no message"
    return (
        f"cannot fetch {pin.requirement}: pip ended with {code} ({last}). "
        f"If this machine is offline, {by_hand(pin, cache)}"
    )


def hash_differs(pin: Pin, found: str, cache: Path) -> str:
    """The error for an archive that is not the pinned one."""
    return (
        f"{pin.archive}: wanted sha256 {pin.sha256}, the package index sent {found}: do not use that file; "
        f"check the index or mirror that pip is set to, or {by_hand(pin, cache)}"
    )


def by_hand(pin: Pin, cache: Path) -> str:
    """The way out that needs no network on this machine."""
    return (
        f"on a connected machine run 'python -m pip download --no-deps --no-binary {pin.package} {pin.requirement}' "
        f"and put {pin.archive} into {cache}, or build from a llama.cpp checkout with -DPYKVQ_LLAMA_CPP_DIR=DIR"
    )


# --- unpacking and copying ---


def unpack(archive: Path, pin: Pin, dest: Path) -> None:
    """Extract the wanted part of llama.cpp to dest. Links and paths that leave dest are refused."""
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if path == pin.prefix or pin.prefix not in path.parents:
                continue
            relative = path.relative_to(pin.prefix)
            if ".." in relative.parts or re.search(r'[\\:*?"<>|]', str(relative)):
                raise SourceError(f"{archive} holds {member.name!r}, which could leave the target folder: not unpacked")
            if relative.parts[0] not in WANTED or member.isdir():
                continue
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise SourceError(f"{archive} holds {member.name!r}, which is not a plain file: not unpacked")
            target = dest / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            with content, target.open("wb") as file:
                shutil.copyfileobj(content, file)
    check_is_llama_cpp(dest, f"{pin.subdirectory} of {archive}")


def check_is_llama_cpp(tree: Path, name: str) -> None:
    """SourceError that calls the tree `name` if files are missing that the build starts from."""
    missing = [file for file in REQUIRED if not (tree / file).is_file()]
    if missing:
        raise SourceError(f"{name} is not a llama.cpp source tree: {', '.join(missing)} not found in it")


def wanted_files(tree: Path) -> Iterator[tuple[str, Path]]:
    """(relative POSIX path, path) of every wanted file of a llama.cpp tree, in a fixed order."""
    for top in sorted(WANTED):
        entry = tree / top
        for path in sorted(entry.rglob("*")) if entry.is_dir() else [entry]:
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(tree).as_posix(), path


def copy_tree(source: Path, dest: Path) -> None:
    """Copy the wanted files of a checkout to dest."""
    for relative, path in wanted_files(source):
        target = dest / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def read_text(path: Path) -> str:
    """The text of a file, "" if there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def ggml_version(tree: Path) -> str:
    """MAJOR.MINOR.PATCH from ggml/CMakeLists.txt, with a ? for a part that is not found."""
    text = read_text(tree / "ggml" / "CMakeLists.txt")
    parts = [re.search(rf"set\(GGML_VERSION_{part}\s+(\d+)\)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part.group(1) if part else "?" for part in parts)
