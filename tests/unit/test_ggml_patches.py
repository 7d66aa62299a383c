"""The files in ggml_patches/ against their rules and their README, and against the pinned source itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCH_DIR = ROOT / "ggml_patches"
README = (PATCH_DIR / "README.md").read_text(encoding="utf-8")
PATCHES = sorted(path.name for path in PATCH_DIR.glob("*.patch"))

MAX_ADDED_IN_ALL = 150
MAX_REMOVED_IN_ONE = 20  # a changed line counts as one removed
MAX_CONTEXT = 1

# named in the README to say whose fields are meant; the sources fill them through a macro inside upstream's own tables
STRUCTS = {"ggml_type_traits", "ggml_type_traits_cpu"}


def table_rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of the README, without its two header lines."""
    section = README.split(f"\n## {heading}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code_words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def header_and_diff(name: str) -> tuple[str, str]:
    header, _, diff = (PATCH_DIR / name).read_text(encoding="utf-8").partition("\ndiff --git ")
    return header, "diff --git " + diff


def hunk_bodies(diff: str) -> list[list[str]]:
    """The lines of each hunk below its @@ line."""
    hunks: list[list[str]] = []
    inside = False
    for line in diff.splitlines():
        if line.startswith("@@ "):
            hunks.append([])
            inside = True
        elif line.startswith("diff --git "):
            inside = False
        elif inside:
            hunks[-1].append(line)
    return hunks


def changed_lines(name: str, sign: str) -> list[str]:
    return [line for hunk in hunk_bodies(header_and_diff(name)[1]) for line in hunk if line.startswith(sign)]


def test_series_readme_and_folder_name_the_same_patches() -> None:
    series = (PATCH_DIR / "series").read_text(encoding="utf-8").split()
    assert series, "the series is empty"
    assert series == PATCHES
    assert [code_words(row[0])[0] for row in table_rows("Index")] == PATCHES
    assert [name[:4] for name in PATCHES] == [f"{number:04}" for number in range(1, len(PATCHES) + 1)]


def test_folder_holds_nothing_else() -> None:
    assert sorted(path.name for path in PATCH_DIR.iterdir()) == sorted([*PATCHES, "README.md", "series"])


def test_readme_names_the_files_that_each_patch_changes() -> None:
    for row in table_rows("Index"):
        diff = header_and_diff(code_words(row[0])[0])[1]
        assert code_words(row[1]) == re.findall(r"^diff --git a/(\S+) b/", diff, re.MULTILINE)
        assert row[2], f"{row[0]}: no reason given"
        assert row[3].startswith(("yes", "no")), f"{row[0]}: candidate for upstreaming is neither yes nor no"


def test_details_relied_on_are_still_used_where_the_readme_says() -> None:
    rows = table_rows("Upstream details")
    assert rows
    for detail, used_in, remedy in rows:
        files = [ROOT / word for word in code_words(used_in)]
        missing = [path for path in files if not path.is_file()]
        assert not missing, f"{detail}: {missing} not found"
        text = "".join(path.read_text(encoding="utf-8") for path in files)
        for word in code_words(detail):
            name = word.rpartition("::")[2]
            assert name in text or name in STRUCTS, f"{detail}: {name} is not in {used_in}"
        assert remedy


def test_readme_names_the_pinned_archive() -> None:
    pin = json.loads((ROOT / "cmake" / "llama_cpp_pin.json").read_text(encoding="utf-8"))
    assert f"tar xf {pin['archive']} " in README
    assert f"{pin['archive'].removesuffix('.tar.gz')}/{pin['subdirectory']}\n" in README


@pytest.mark.parametrize("name", PATCHES)
def test_header_says_what_why_and_until_when(name: str) -> None:
    header, diff = header_and_diff(name)
    lines = header.splitlines()
    assert lines[0] == "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001"
    assert re.search(r"^Subject: \[PATCH\] [a-z-]+: [a-z]\S* ", header, re.MULTILINE)
    body = header.split("\n\n", 1)[1].partition("\nUpstream:")[0]
    assert len(body.split()) >= 20, "the message does not say why"
    assert re.search(r"^Upstream: (no|candidate|https://\S+)\. May go ", header, re.MULTILINE)
    markers = re.findall(r"^Marker: (\S+): (.+)$", header, re.MULTILINE)
    assert markers
    for file, string in markers:
        assert f"diff --git a/{file} b/{file}\n" in diff
        assert any(string in line for line in changed_lines(name, "+"))
        assert not any(string in line for line in changed_lines(name, "-"))


@pytest.mark.parametrize("name", PATCHES)
def test_patch_is_call_sites_only(name: str) -> None:
    diff = header_and_diff(name)[1]
    assert "/dev/null" not in diff, "patches add and remove no files"
    assert len(changed_lines(name, "-")) <= MAX_REMOVED_IN_ONE
    for hunk in hunk_bodies(diff):
        changed = [i for i, line in enumerate(hunk) if line.startswith(("+", "-"))]
        assert changed[0] <= MAX_CONTEXT
        assert len(hunk) - 1 - changed[-1] <= MAX_CONTEXT


def test_patches_stay_small_in_all() -> None:
    assert sum(len(changed_lines(name, "+")) for name in PATCHES) <= MAX_ADDED_IN_ALL


@pytest.mark.parametrize("name", [*PATCHES, "README.md", "series"])
def test_no_path_of_a_machine(name: str) -> None:
    text = (PATCH_DIR / name).read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(home|root|tmp|usr|opt|work|mnt|Users)/|[A-Za-z]:\\", text)


@pytest.mark.slow
def test_all_patches_apply_to_the_pinned_source() -> None:
    """Fetches the pinned archive into the cache if it is not there."""
    command = [sys.executable, str(ROOT / "cmake" / "llama_source.py"), "check-patches"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(PATCHES)} of {len(PATCHES)} patches apply" in result.stdout
    assert "moved" not in result.stdout, "made for another source than the pinned one: refresh the line numbers"
