"""A tiny llama.cpp with a fake pin and patches of a few lines, for the tests of cmake/llama_source.py."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import shutil
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cmake"))
source: Any = importlib.import_module("llama_source")
archive: Any = importlib.import_module("llama_archive")

ROOM = "fake_llama-1.0"
GGML_CMAKE = "set(GGML_VERSION_MAJOR 7)\nset(GGML_VERSION_MINOR 8)\nset(GGML_VERSION_PATCH 9)\n"
TREE = {
    "CMakeLists.txt": "project(llama.cpp)\n",
    "ggml/CMakeLists.txt": GGML_CMAKE,
    "include/llama.h": "// llama.h\n",
    "src/CMakeLists.txt": "add_library(llama)\n",
    "src/a.c": "".join(f"a{i}\n" for i in range(1, 11)),
    "src/b.c": "".join(f"b{i}\n" for i in range(1, 11)),
    "src/c.c": "".join(f"c{i}\n" for i in range(1, 11)),
    "tools/main.cpp": "int main() {}\n",
}


def patch_text(file: str, line: int, added: str, marker: str | None = None) -> str:
    """A patch that puts `added` below line `line` of one of the .c files above."""
    letter = Path(file).stem
    return (
        "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\nSubject: [PATCH] test: add a line\n\n"
        f"Why.\n\nMarker: {file}: {marker or added}\n---\n\n"
        f"diff --git a/{file} b/{file}\n--- a/{file}\n+++ b/{file}\n"
        f"@@ -{line},2 +{line},3 @@\n {letter}{line}\n+{added}\n {letter}{line + 1}\n"
    )


def write_tree(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def write_archive(path: Path, members: dict[str, str], links: dict[str, str] | None = None) -> str:
    """A .tar.gz of the given member names; returns its sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class Project:
    """A pin, a patch folder, a cache that holds the archive, and where the tree goes."""

    root: Path
    patches: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache, self.dest = self.root / "cache", self.root / "build" / "llama.cpp"
        self.patch_dir, self.pin = self.root / "patches", self.root / "pin.json"
        self.archive = self.cache / f"{ROOM}.tar.gz"
        self.set_archive({f"{ROOM}/vendor/llama.cpp/{name}": text for name, text in TREE.items()})
        self.set_patches({"0001-a.patch": patch_text("src/a.c", 3, "first")})

    def set_archive(self, members: dict[str, str], links: dict[str, str] | None = None) -> None:
        self.set_pin(sha256=write_archive(self.archive, members, links))

    def set_pin(self, **changes: str) -> None:
        values = {"package": "fake-llama", "version": "1.0", "archive": f"{ROOM}.tar.gz", "sha256": "0" * 64}
        values |= {"subdirectory": "vendor/llama.cpp", "ggml_version": "7.8.9"}
        if self.pin.exists():
            values |= json.loads(self.pin.read_text())
        self.pin.write_text(json.dumps(values | changes))

    def set_patches(self, patches: dict[str, str]) -> None:
        self.patches = patches
        shutil.rmtree(self.patch_dir, ignore_errors=True)
        write_tree(self.patch_dir, {**patches, "series": "# in order\n" + "".join(f"{name}\n" for name in patches)})

    def run(self, command: str, *options: str | Path) -> int:
        common = ["--pin", self.pin, "--patches", self.patch_dir, *options]
        return int(source.main([command, *(str(word) for word in common)]))

    def prepare(self, *options: str | Path) -> int:
        return self.run("prepare", "--dest", self.dest, "--cache", self.cache, *options)

    def mtimes(self) -> dict[str, int]:
        files = (path for path in self.dest.rglob("*") if path.is_file())
        return {path.relative_to(self.dest).as_posix(): path.stat().st_mtime_ns for path in files}

    def age_files(self) -> None:
        """Put all modification times back, so that a rewritten file shows."""
        for path in self.dest.rglob("*"):
            os.utime(path, ns=(1_000_000_000, 1_000_000_000))

    def text(self, name: str) -> str:
        return (self.dest / name).read_text()


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]
