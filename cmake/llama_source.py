#!/usr/bin/env python3
"""Fetch, verify, unpack and patch the pinned llama.cpp. Standard library only; called by CMake and by people.

    python cmake/llama_source.py prepare --dest DIR               pinned: a patched copy of the pinned source in DIR
    python cmake/llama_source.py prepare --dest DIR --source SRC  override: the same from an unpatched checkout SRC
    python cmake/llama_source.py verify --tree DIR                developer: check a tree that is already patched
    python cmake/llama_source.py check-patches [--source SRC]     try every patch and report all conflicts at once

The pin is llama_cpp_pin.json beside this file, the patches are those that ggml_patches/series names. prepare does
nothing when DIR is up to date, and otherwise rewrites only the files whose content changes, so that a compiler sees
unchanged modification times for the rest. Exit codes: 0 done, 1 failed with one line that says what to do, 2 usage.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from llama_archive import (
    WANTED,
    Pin,
    SourceError,
    check_is_llama_cpp,
    copy_tree,
    default_cache,
    find_archive,
    ggml_version,
    load_pin,
    read_text,
    say,
    sha256_of,
    unpack,
    wanted_files,
)

ROOT = Path(__file__).resolve().parent.parent
PIN_FILE = ROOT / "cmake" / "llama_cpp_pin.json"
PATCH_DIR = ROOT / "ggml_patches"
STAMP_NAME = ".pykvq-source.json"


# --- the series ---


@dataclass(frozen=True)
class Patch:
    """One file of the series. markers are (file, string) pairs that are in the tree exactly when it is applied."""

    path: Path
    text: str
    markers: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """File name, as the series has it."""
        return self.path.name

    def present_markers(self, tree: Path) -> list[str]:
        """The markers that are in the tree, as "FILE: STRING"."""
        return [f"{file}: {string}" for file, string in self.markers if string in read_text(tree / file)]

    def missing_markers(self, tree: Path) -> list[str]:
        """The markers that are not in the tree, as "FILE: STRING"."""
        return [f"{file}: {string}" for file, string in self.markers if string not in read_text(tree / file)]


def load_series(patch_dir: Path) -> list[Patch]:
    """The patches in the order of patch_dir/series (one name a line, # starts a comment)."""
    series = patch_dir / "series"
    if not series.is_file():
        raise SourceError(f"{series} is missing: it lists the patches in order, one file name a line")
    lines = (line.partition("#")[0].strip() for line in series.read_text(encoding="utf-8").splitlines())
    patches = [load_patch(patch_dir / name) for name in lines if name]
    if not patches:
        raise SourceError(f"{series} names no patch: without its patches llama.cpp lacks the KV types")
    return patches


def load_patch(path: Path) -> Patch:
    """Read a patch file; SourceError if it is missing or names no marker."""
    if not path.is_file():
        raise SourceError(f"{path} is missing but {path.parent / 'series'} names it: restore it or drop the line")
    text = path.read_text(encoding="utf-8")
    header = text.partition("\ndiff --git ")[0]
    markers = tuple(re.findall(r"^Marker: ([^:\s]+): (\S.*?)\s*$", header, re.MULTILINE))
    if not markers:
        raise SourceError(f"{path} has no line 'Marker: FILE: STRING' above its diff: name a string that it adds")
    return Patch(path, text, markers)


# --- patching ---


def git_apply(tree: Path, patch: Patch, *options: str) -> subprocess.CompletedProcess[str]:
    """Run git apply in the tree, out of reach of any repository around it. The caller looks at the exit code."""
    git = shutil.which("git")
    if git is None:
        raise SourceError("git is needed to apply the patches and was not found on PATH: install git")
    # Inside another repository git apply takes paths from that repository's root, skips all of ours and exits 0. The
    # ceiling hides it, and so must GIT_DIR and its like be hidden, which git sets for hooks.
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env["GIT_CEILING_DIRECTORIES"] = str(tree.resolve().parent)
    env["LC_ALL"] = "C"
    config = ("core.autocrlf=false", "core.safecrlf=false", "apply.ignoreWhitespace=no")
    command = [git, *(word for pair in config for word in ("-c", pair)), "apply", "--whitespace=nowarn", "-p1"]
    command += [*options, str(patch.path.resolve())]
    return subprocess.run(
        command,
        cwd=tree,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )


def apply_series(tree: Path, patches: list[Patch]) -> None:
    """Apply all patches in order; SourceError at the first that does not apply or leaves no trace."""
    refuse_patched(tree, patches)
    for patch in patches:
        result = git_apply(tree, patch)
        if result.returncode != 0:
            message = "; ".join(line.removeprefix("error: ") for line in result.stderr.strip().splitlines())
            raise SourceError(
                f"{patch.name} does not apply: {message}. The source or an earlier patch has changed: "
                "run 'python cmake/llama_source.py check-patches' for all conflicts, then see CONTRIBUTING.md"
            )
    check_markers(
        tree, patches, "git applied it without effect, or its Marker line is wrong (see ggml_patches/README.md)"
    )


def refuse_patched(tree: Path, patches: list[Patch]) -> None:
    """A marker that is there before its patch proves nothing: the source is patched already, or the marker is wrong."""
    for patch in patches:
        present = patch.present_markers(tree)
        if present:
            raise SourceError(
                f"the unpatched source already holds {patch.name}'s marker ({present[0]}): give an unpatched checkout, "
                "or use the patched tree as it is with -DPYKVQ_LLAMA_CPP_PATCHED_DIR=DIR"
            )


def check_markers(tree: Path, patches: list[Patch], remedy: str) -> None:
    """SourceError at the first patch that left no trace in the tree."""
    for patch in patches:
        missing = patch.missing_markers(tree)
        if missing:
            raise SourceError(f"{tree} lacks what {patch.name} adds ({missing[0]}): {remedy}")


# --- the finished tree ---


def digest_of(pin: Pin, patches: list[Patch], source: Path | None) -> str:
    """Identifies everything that a tree is made from."""
    digest = hashlib.sha256()
    inputs = [asdict(pin), sorted(WANTED), [(patch.name, patch.text) for patch in patches]]
    digest.update(json.dumps(inputs, sort_keys=True).encode())
    if source is not None:
        for relative, path in wanted_files(source):
            digest.update(f"\0{relative}\0{sha256_of(path)}".encode())
    return digest.hexdigest()


def write_stamp(tree: Path, digest: str) -> None:
    """Note what the tree is made from, "" while it is being changed."""
    temporary = tree / (STAMP_NAME + ".new")
    temporary.write_text(json.dumps({"digest": digest}) + "\n", encoding="utf-8")
    os.replace(temporary, tree / STAMP_NAME)


def read_stamp(tree: Path) -> str:
    """The digest that the tree was finished with, "" if it is unfinished or not one of ours."""
    try:
        return str(json.loads((tree / STAMP_NAME).read_text(encoding="utf-8"))["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def is_up_to_date(dest: Path, digest: str, patches: list[Patch]) -> bool:
    """Whether dest was finished from these inputs and still carries every patch."""
    return read_stamp(dest) == digest and not any(patch.missing_markers(dest) for patch in patches)


def files_in(tree: Path) -> dict[str, Path]:
    """All files of a tree but the stamp, by relative POSIX path."""
    found = {path.relative_to(tree).as_posix(): path for path in tree.rglob("*") if path.is_file() or path.is_symlink()}
    found.pop(STAMP_NAME, None)
    return found


def install(staging: Path, dest: Path, digest: str) -> int:
    """Make dest equal to staging and stamp it; returns how many files changed. Files that are equal stay untouched."""
    if not dest.exists() or not any(dest.iterdir()):
        if dest.exists():
            dest.rmdir()
        write_stamp(staging, digest)
        os.replace(staging, dest)
        return len(files_in(dest))
    # from here until the last line dest is a mixture, so its stamp must not match anything
    write_stamp(dest, "")
    new, old = files_in(staging), files_in(dest)
    changed = 0
    for relative in old.keys() - new.keys():
        old[relative].unlink()
        changed += 1
    remove_empty_folders(dest)
    for relative, path in new.items():
        target = dest / relative
        if relative in old and not target.is_symlink() and filecmp.cmp(path, target, shallow=False):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
        changed += 1
    write_stamp(dest, digest)
    return changed


def remove_empty_folders(tree: Path) -> None:
    """Remove folders without files, innermost first."""
    for folder in sorted((path for path in tree.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


def check_dest(dest: Path, source: Path | None) -> None:
    """Refuse a folder that holds somebody else's files: updating deletes whatever is not in the new tree."""
    if source is not None and (source == dest or any(source / top in (dest, *dest.parents) for top in WANTED)):
        raise SourceError(f"--dest {dest} is part of --source {source}: choose another folder")
    if dest.exists() and not dest.is_dir():
        raise SourceError(f"--dest {dest} is a file: choose a folder")
    if dest.exists() and any(dest.iterdir()) and not (dest / STAMP_NAME).is_file():
        raise SourceError(f"--dest {dest} holds files that this script did not put there: choose an empty folder")


# --- commands ---


def fill_from(source: Path | None, pin: Pin, cache: Path, fallback: Path) -> Callable[[Path], None]:
    """A function that puts the unpatched source into a folder. A pinned archive is fetched and verified here."""
    if source is not None:
        return lambda tree: copy_tree(source, tree)
    archive = find_archive(pin, cache, fallback)
    return lambda tree: unpack(archive, pin, tree)


def announce(source: Path | None, pin: Pin) -> None:
    """Print the mode and the version, and warn of a version that the patches are not made for."""
    if source is None:
        say(f"llama.cpp: pinned, {pin.package} {pin.version} (ggml {pin.ggml_version})")
        return
    check_is_llama_cpp(source, str(source))
    version = ggml_version(source)
    say(f"llama.cpp: override, {source} (ggml {version})")
    if version != pin.ggml_version:
        say(f"warning: the patches are made for ggml {pin.ggml_version}, {source} has {version}: they may not fit")


def prepare(dest: Path, source: Path | None, cache: Path, pin: Pin, patches: list[Patch]) -> None:
    """Make dest a patched copy of the pinned source, or of `source`. SourceError says what stands in the way."""
    announce(source, pin)
    check_dest(dest, source)
    digest = digest_of(pin, patches, source)
    if is_up_to_date(dest, digest, patches):
        say(f"{dest} is up to date")
        return
    fill = fill_from(source, pin, cache, dest.parent / "llama-cpp-download")
    staging = dest.with_name(dest.name + ".staging")
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    try:
        fill(staging)
        version = ggml_version(staging)
        if source is None and version != pin.ggml_version:
            raise SourceError(f"{pin.archive} holds ggml {version}, the pin says {pin.ggml_version}: correct the pin")
        apply_series(staging, patches)
        changed = install(staging, dest, digest)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    say(f"{dest} is ready: {len(patches)} patches applied, {changed} files written or removed")


def verify(tree: Path, pin: Pin, patches: list[Patch]) -> None:
    """Check that a tree used as it is carries every patch."""
    say(f"llama.cpp: developer, {tree} (ggml {ggml_version(tree)}), used as it is")
    check_is_llama_cpp(tree, str(tree))
    if (tree / STAMP_NAME).is_file() and not read_stamp(tree):
        raise SourceError(f"{tree} was left half updated: run prepare on it again")
    check_markers(tree, patches, "apply the series to it (see ggml_patches/README.md), or use prepare")
    if ggml_version(tree) != pin.ggml_version:
        say(f"warning: the patches are made for ggml {pin.ggml_version}")


def check_patches(source: Path | None, cache: Path, pin: Pin, patches: list[Patch]) -> int:
    """Apply the patches one by one to a scratch copy, print every conflict, and return how many patches have one."""
    announce(source, pin)
    with tempfile.TemporaryDirectory(prefix="pykvq-patches-") as scratch:
        fill = fill_from(source, pin, cache, Path(scratch))
        tree = Path(scratch) / "tree"
        tree.mkdir()
        fill(tree)
        return sum(not try_patch(tree, patch) for patch in patches)


def try_patch(tree: Path, patch: Patch) -> bool:
    """Apply what fits of one patch, so that later ones meet what they expect, and print what does not."""
    problems = [f"its marker is there before it is applied: {marker}" for marker in patch.present_markers(tree)]
    # --reject does not say which files fail, so they are listed by a dry run first
    problems += [line for line in git_apply(tree, patch, "--check").stderr.splitlines() if line]
    applied = git_apply(tree, patch, "--reject", "--verbose").stderr.splitlines()
    problems += [f"{line} ({name})" for name, line in hunk_lines(applied) if line.startswith("Rejected hunk")]
    if not problems:
        problems += [f"git reports success but its marker is missing: {line}" for line in patch.missing_markers(tree)]
    moved = [f"{line} ({name})" for name, line in hunk_lines(applied) if "offset" in line]
    say(f"{'CONFLICT' if problems else 'ok':8} {patch.name}")
    for line in problems:
        say(f"    {line}")
    for line in moved:
        say(f"    moved, look at it: {line}")
    return not problems


def hunk_lines(output: list[str]) -> Iterator[tuple[str, str]]:
    """(file, line about one of its hunks) from git apply's verbose output."""
    name = ""
    for line in output:
        if match := re.match(r"(?:Checking|Applying|Applied) patch (.+?)(?:\.\.\.| with | cleanly)", line):
            name = match.group(1)
        elif "unk #" in line:
            yield name, line


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description="Fetch, verify, unpack and patch the pinned llama.cpp.")
    commands = top.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--pin", type=Path, default=PIN_FILE, metavar="FILE", help="pin file (default: %(default)s)")
    common.add_argument("--patches", type=Path, default=PATCH_DIR, metavar="DIR", help="folder with the series file")
    origin = argparse.ArgumentParser(add_help=False)
    origin.add_argument("--source", type=Path, metavar="DIR", help="an unpatched llama.cpp checkout to use instead")
    origin.add_argument("--cache", type=Path, metavar="DIR", help="where the archive is kept (default: user cache)")
    command = commands.add_parser("prepare", parents=[common, origin], help="make a patched copy of llama.cpp")
    command.add_argument("--dest", type=Path, required=True, metavar="DIR", help="the folder to make or update")
    command = commands.add_parser("verify", parents=[common], help="check a tree that is already patched")
    command.add_argument("--tree", type=Path, required=True, metavar="DIR", help="the patched tree")
    commands.add_parser("check-patches", parents=[common, origin], help="report every patch that does not apply")
    return top


def run(args: argparse.Namespace) -> int:
    """Carry out a parsed command line; returns the exit code."""
    pin, patches = load_pin(args.pin), load_series(args.patches)
    if args.command == "verify":
        verify(args.tree.resolve(), pin, patches)
        return 0
    source = args.source.resolve() if args.source else None
    cache = args.cache.resolve() if args.cache else default_cache()
    if args.command == "prepare":
        prepare(args.dest.resolve(), source, cache, pin, patches)
        return 0
    conflicts = check_patches(source, cache, pin, patches)
    say(f"{len(patches) - conflicts} of {len(patches)} patches apply")
    return 1 if conflicts else 0


def main(argv: list[str] | None = None) -> int:
    """Entry point: every expected failure is one line on stderr and exit code 1."""
    try:
        return run(parser().parse_args(argv))
    except SourceError as exc:
        print(f"error: {exc}", file=sys.stderr)
    except OSError as exc:
        print(f"error: {exc.strerror or exc}: {exc.filename or 'while writing'}", file=sys.stderr)
    except (tarfile.TarError, EOFError, UnicodeDecodeError) as exc:
        print(f"error: damaged input: {exc}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
