"""cmake/llama_source.py: patching, updating in place, the three modes, check-patches."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from llama_project import GGML_CMAKE, ROOM, TREE, Project, error_line, patch_text, source, write_tree


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


# --- prepare ---


def test_prepare_unpacks_what_is_wanted_and_patches_it(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert project.prepare() == 0
    assert project.text("src/a.c").splitlines()[2:5] == ["a3", "first", "a4"]
    assert project.text("src/b.c") == TREE["src/b.c"]
    assert not (project.dest / "tools").exists()
    assert not project.dest.with_name("llama.cpp.staging").exists()
    assert capsys.readouterr().out.splitlines()[0] == "llama.cpp: pinned, fake-llama 1.0 (ggml 7.8.9)"


def test_second_run_touches_nothing(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert project.prepare() == 0
    project.age_files()
    before = project.mtimes()
    project.archive.unlink()  # an up-to-date tree needs no archive
    assert project.prepare() == 0
    assert project.mtimes() == before
    assert "up to date" in capsys.readouterr().out


def test_changed_series_rewrites_only_what_differs(project: Project) -> None:
    second = patch_text("src/b.c", 5, "second")
    project.set_patches({"0001-a.patch": patch_text("src/a.c", 3, "first"), "0002-b.patch": second})
    assert project.prepare() == 0
    project.age_files()
    before = project.mtimes()
    project.set_patches({"0002-b.patch": second, "0003-c.patch": patch_text("src/c.c", 1, "third")})
    assert project.prepare() == 0
    after = project.mtimes()
    assert {name for name in before if after[name] != before[name]} == {"src/a.c", "src/c.c", source.STAMP_NAME}
    assert project.text("src/a.c") == TREE["src/a.c"]
    assert "third" in project.text("src/c.c")


def test_changed_patch_of_the_same_name_and_marker_is_noticed(project: Project) -> None:
    assert project.prepare() == 0
    project.set_patches({"0001-a.patch": patch_text("src/a.c", 6, "first")})
    assert project.prepare() == 0
    assert project.text("src/a.c").splitlines()[5:8] == ["a6", "first", "a7"]
    assert project.text("src/a.c").count("first") == 1


def test_new_archive_removes_vanished_files_and_folders(project: Project) -> None:
    members = {f"{ROOM}/vendor/llama.cpp/{name}": text for name, text in TREE.items()}
    project.set_archive({**members, f"{ROOM}/vendor/llama.cpp/src/old/gone.c": "gone\n"})
    assert project.prepare() == 0
    assert (project.dest / "src/old/gone.c").is_file()
    project.set_archive(members)
    assert project.prepare() == 0
    assert not (project.dest / "src/old").exists()


def test_reverted_patch_is_repaired(project: Project) -> None:
    assert project.prepare() == 0
    (project.dest / "src/a.c").write_text(TREE["src/a.c"])
    assert project.prepare() == 0
    assert "first" in project.text("src/a.c")


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "in_a_git_hook"])
def test_prepare_inside_another_repository(project: Project, monkeypatch: pytest.MonkeyPatch, hook: bool) -> None:
    subprocess.run(["git", "init", "-q", str(project.root)], check=True)
    if hook:
        monkeypatch.setenv("GIT_DIR", str(project.root / ".git"))
        monkeypatch.setenv("GIT_WORK_TREE", str(project.root))
    assert project.prepare() == 0
    assert "first" in project.text("src/a.c")


def test_git_apply_without_effect_is_noticed(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(source, "git_apply", lambda tree, patch, *options: done)
    assert project.prepare() == 1
    line = error_line(capsys)
    assert "0001-a.patch" in line
    assert "src/a.c: first" in line
    assert not project.dest.exists()


def test_wrong_marker_is_noticed(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.set_patches({"0001-a.patch": patch_text("src/a.c", 3, "first", marker="not there")})
    assert project.prepare() == 1
    assert "not there" in error_line(capsys)
    assert not project.dest.exists()


def test_patch_without_marker_is_refused(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.set_patches({"0001-a.patch": patch_text("src/a.c", 3, "first").replace("Marker:", "Remark:")})
    assert project.prepare() == 1
    assert "0001-a.patch has no line 'Marker: FILE: STRING'" in error_line(capsys)


def test_failing_patch_is_named_and_keeps_the_old_tree(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert project.prepare() == 0
    capsys.readouterr()
    before = project.text("src/a.c")
    project.set_patches({"0001-a.patch": patch_text("src/a.c", 3, "first").replace(" a3", " zz")})
    assert project.prepare() == 1
    line = error_line(capsys)
    assert "0001-a.patch" in line
    assert "src/a.c" in line
    assert "check-patches" in line
    assert project.text("src/a.c") == before


@pytest.mark.parametrize(
    ("series", "expected"),
    [("", "names no patch"), ("# none\n", "names no patch"), ("0009-no.patch\n", "0009-no.patch")],
)
def test_bad_series(project: Project, capsys: pytest.CaptureFixture[str], series: str, expected: str) -> None:
    (project.patch_dir / "series").write_text(series)
    assert project.prepare() == 1
    assert expected in error_line(capsys)


def test_missing_git(project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(project.root))
    assert project.prepare() == 1
    assert "git is needed" in error_line(capsys)


def test_ggml_version_must_be_the_pinned_one(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.set_pin(ggml_version="7.8.10")
    assert project.prepare() == 1
    line = error_line(capsys)
    assert "7.8.9" in line
    assert "7.8.10" in line


@pytest.mark.parametrize("content", ["", "{", "[]", '{"package": "x"}'])
def test_bad_pin_file(project: Project, capsys: pytest.CaptureFixture[str], content: str) -> None:
    project.pin.write_text(content)
    assert project.prepare() == 1
    assert str(project.pin) in error_line(capsys)


def test_folder_of_somebody_else_is_refused(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    write_tree(project.dest, {"thesis.txt": "years of work"})
    assert project.prepare() == 1
    assert str(project.dest) in error_line(capsys)
    assert project.text("thesis.txt") == "years of work"


def test_empty_folder_is_taken(project: Project) -> None:
    project.dest.mkdir(parents=True)
    assert project.prepare() == 0
    assert "first" in project.text("src/a.c")


# --- crash safety ---


@pytest.mark.parametrize("survivors", [0, 1, 2])
def test_interrupted_update_never_passes_as_done(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], survivors: int
) -> None:
    """The process dies after the stamp is taken back and `survivors` of two changed files are in place."""
    assert project.prepare() == 0
    both = {"0001-a.patch": patch_text("src/a.c", 3, "changed"), "0002-b.patch": patch_text("src/b.c", 3, "second")}
    project.set_patches(both)
    real = os.replace
    done: list[Path] = []

    def replace(old: Path, new: Path) -> None:
        if Path(new).name != source.STAMP_NAME or done:
            done.append(new)
        if len(done) > survivors:
            raise KeyboardInterrupt
        real(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            project.prepare()
    assert project.run("verify", "--tree", project.dest) == 1
    capsys.readouterr()
    project.set_patches({"0001-a.patch": patch_text("src/a.c", 3, "first")})
    assert project.prepare() == 0  # back to the first series: the half-updated tree is not taken for it
    assert "up to date" not in capsys.readouterr().out
    assert project.text("src/b.c") == TREE["src/b.c"]
    project.set_patches(both)
    assert project.prepare() == 0
    assert "changed" in project.text("src/a.c")
    assert "second" in project.text("src/b.c")


def test_interrupted_first_run_leaves_no_tree(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(tree: Path, patches: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(source, "apply_series", die)
        with pytest.raises(KeyboardInterrupt):
            project.prepare()
    assert not project.dest.exists()
    assert project.prepare() == 0


def test_staging_folder_of_a_killed_run_is_replaced(project: Project) -> None:
    write_tree(project.dest.with_name("llama.cpp.staging"), {"src/rest.c": "left over\n"})
    assert project.prepare() == 0
    assert not (project.dest / "src/rest.c").exists()


# --- override and developer mode ---


def test_override_copies_and_patches(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = project.root / "checkout"
    write_tree(checkout, TREE)
    project.archive.unlink()
    assert project.prepare("--source", checkout) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"llama.cpp: override, {checkout} (ggml 7.8.9)"
    assert "first" in project.text("src/a.c")
    assert (checkout / "src/a.c").read_text() == TREE["src/a.c"]
    assert project.prepare("--source", checkout) == 0
    assert "up to date" in capsys.readouterr().out
    (checkout / "src/b.c").write_text("edited\n")
    assert project.prepare("--source", checkout) == 0
    assert project.text("src/b.c") == "edited\n"


def test_override_warns_of_another_version(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = project.root / "checkout"
    write_tree(checkout, {**TREE, "ggml/CMakeLists.txt": GGML_CMAKE.replace("9", "10")})
    assert project.prepare("--source", checkout) == 0
    out = capsys.readouterr().out
    assert "warning" in out
    assert "7.8.10" in out
    assert "7.8.9" in out


def test_override_that_is_no_checkout(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert project.prepare("--source", project.root) == 1
    assert "not a llama.cpp source tree" in error_line(capsys)


def test_override_that_is_patched_already(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert project.prepare() == 0
    capsys.readouterr()
    assert project.prepare("--source", project.dest, "--dest", project.root / "other") == 1
    assert "PYKVQ_LLAMA_CPP_PATCHED_DIR" in error_line(capsys)


@pytest.mark.parametrize("inside", ["", "src", "ggml/build"])
def test_dest_that_is_part_of_the_source(project: Project, capsys: pytest.CaptureFixture[str], inside: str) -> None:
    checkout = project.root / "checkout"
    write_tree(checkout, TREE)
    assert project.prepare("--source", checkout, "--dest", checkout / inside) == 1
    assert "choose another folder" in error_line(capsys)
    assert (checkout / "src/a.c").read_text() == TREE["src/a.c"]


def test_verify(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert project.prepare() == 0
    capsys.readouterr()
    assert project.run("verify", "--tree", project.dest) == 0
    assert capsys.readouterr().out.startswith(f"llama.cpp: developer, {project.dest} (ggml 7.8.9)")
    (project.dest / "src/a.c").write_text(TREE["src/a.c"])
    assert project.run("verify", "--tree", project.dest) == 1
    assert "0001-a.patch" in error_line(capsys)


# --- check-patches ---


def test_check_patches_reports_every_conflict(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    good = patch_text("src/b.c", 3, "good")
    project.set_patches(
        {
            "0001-a.patch": patch_text("src/a.c", 3, "first").replace(" a3", " zz"),
            "0002-b.patch": good,
            "0003-c.patch": patch_text("src/c.c", 3, "third").replace(" c4", " zz"),
            "0004-d.patch": patch_text("src/d.c", 3, "fourth"),
        }
    )
    before = sorted(project.root.rglob("*"))
    assert project.run("check-patches", "--cache", project.cache) == 1
    out = capsys.readouterr().out
    verdicts = [line.split() for line in out.splitlines() if line.startswith(("ok", "CONFLICT"))]
    assert verdicts == [
        ["CONFLICT", "0001-a.patch"],
        ["ok", "0002-b.patch"],
        ["CONFLICT", "0003-c.patch"],
        ["CONFLICT", "0004-d.patch"],
    ]
    assert "patch failed: src/a.c:3" in out
    assert "patch failed: src/c.c:3" in out
    assert "src/d.c: No such file" in out
    assert out.splitlines()[-1] == "1 of 4 patches apply"
    assert sorted(project.root.rglob("*")) == before


def test_check_patches_applies_the_hunks_that_fit(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The second patch builds on the hunk of the first that fits, so it is no conflict of its own."""
    first = patch_text("src/a.c", 3, "first") + "@@ -8,2 +9,3 @@\n zz\n+lost\n a9\n"
    second = patch_text("src/a.c", 3, "second").replace(" a4", " first")
    project.set_patches({"0001-a.patch": first, "0002-a.patch": second})
    assert project.run("check-patches", "--cache", project.cache) == 1
    out = capsys.readouterr().out
    assert "Rejected hunk #2. (src/a.c)" in out
    assert "ok       0002-a.patch" in out


def test_check_patches_passes_and_tells_of_moved_hunks(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = project.root / "checkout"
    write_tree(checkout, {**TREE, "src/a.c": "new\n" + TREE["src/a.c"]})
    assert project.run("check-patches", "--source", checkout) == 0
    out = capsys.readouterr().out
    assert "moved, look at it: Hunk #1 succeeded at 4 (offset 1 line). (src/a.c)" in out
    assert (checkout / "src/a.c").read_text() == "new\n" + TREE["src/a.c"]


def test_check_patches_notices_a_marker_that_proves_nothing(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.set_patches({"0001-a.patch": patch_text("src/a.c", 3, "first", marker="a7")})
    assert project.run("check-patches", "--cache", project.cache) == 1
    assert "its marker is there before it is applied: src/a.c: a7" in capsys.readouterr().out


def test_check_patches_notices_a_patch_without_effect(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.set_patches({"0001-a.patch": patch_text("src/a.c", 3, "first", marker="elsewhere")})
    assert project.run("check-patches", "--cache", project.cache) == 1
    assert "its marker is missing: src/a.c: elsewhere" in capsys.readouterr().out


def test_usage_error() -> None:
    with pytest.raises(SystemExit) as exit_info:
        source.main(["prepare"])
    assert exit_info.value.code == 2
