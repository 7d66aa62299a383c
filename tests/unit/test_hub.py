"""Downloads from a hub: a local server speaks its API."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from hub_server import COMMIT, HubServer

from pykvq import DownloadError, InvalidArgumentError, catalog, hub, models
from pykvq.cli import models as models_cli

CONTENT = b"GGUF" + os.urandom(3_000_000)
NAME = "Tiny-Q4_K_M.gguf"


@pytest.fixture
def server(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "PYKVQ_MODELS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.setenv("PYKVQ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda _seconds: None)  # the client waits between its tries
    with HubServer(files={NAME: CONTENT}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def pull(text="hf:org/repo", progress=None):
    return hub.pull(hub.parse_reference(text), progress)


def pull_error(text="hf:org/repo"):
    with pytest.raises(DownloadError) as caught:
        pull(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def leftovers():
    return sorted(path.name for path in (hub.models_dir() / "org" / "repo").iterdir())


def test_a_model_is_fetched_checked_and_kept(server, tmp_path):
    seen = []
    path = pull(progress=lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "cache" / "models" / "org" / "repo" / NAME
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert leftovers() == [NAME]
    assert pull() == path
    assert server.downloads() == [None]


def interrupt_at(n_bytes):
    def progress(done, _total):
        if done >= n_bytes:
            raise KeyboardInterrupt

    return progress


def test_an_interrupted_fetch_goes_on_where_it_stopped(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    with pytest.raises(KeyboardInterrupt):
        pull(progress=interrupt_at(len(CONTENT) // 2))
    (partial,) = leftovers()
    size = (hub.models_dir() / "org" / "repo" / partial).stat().st_size
    assert len(CONTENT) // 2 <= size < len(CONTENT)
    assert pull().read_bytes() == CONTENT
    assert server.downloads() == [None, f"bytes={size}-"]
    assert leftovers() == [NAME]


def test_a_part_of_an_older_version_is_not_continued(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    with pytest.raises(KeyboardInterrupt):
        pull(progress=interrupt_at(1_000_000))
    server.files[NAME] = CONTENT[::-1]
    assert pull().read_bytes() == CONTENT[::-1]
    assert server.downloads() == [None, None]


def test_a_damaged_part_is_found_out(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    with pytest.raises(KeyboardInterrupt):
        pull(progress=interrupt_at(1_000_000))
    (partial,) = (hub.models_dir() / "org" / "repo").iterdir()
    partial.write_bytes(bytes(partial.stat().st_size))
    assert "has sha256" in pull_error()
    assert leftovers() == []
    assert pull().read_bytes() == CONTENT


def test_dropped_connections_are_taken_up_again(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    server.drop_after = [500_000, 1_000_000]
    assert pull().read_bytes() == CONTENT
    assert server.downloads()[1].startswith("bytes=")


def test_two_pulls_at_once_fetch_once(server):
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(pull())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    assert server.downloads() == [None]


def test_a_server_without_ranges(server, monkeypatch):
    server.drop_after = [500_000]
    server.ignore_ranges = True
    assert pull().read_bytes() == CONTENT


def test_a_wrong_hash_is_named_and_deleted(server):
    server.wrong_hashes.add(NAME)
    text = pull_error()
    assert NAME in text
    assert hashlib.sha256(CONTENT).hexdigest() in text
    assert "0" * 64 in text
    assert leftovers() == []


@pytest.mark.parametrize(
    ("settings", "reference", "expected"),
    [
        ({"token": "secret"}, "hf:org/repo", "is private"),
        ({"token": "secret", "gated": True}, "hf:org/repo", "is gated"),
        ({}, "hf:org/other", "has no repository org/other"),
        ({"status": 403}, "hf:org/repo", "status 403: set HF_TOKEN"),
        ({"status": 500}, "hf:org/repo", "status 500"),
        ({}, "hf:org/repo:Q8_0", f"has no model 'Q8_0': it has {NAME}"),
        ({"files": {"model.safetensors": b"x"}}, "hf:org/repo", "has no GGUF file: convert it with `pykvq-convert"),
        ({"files": {"../../evil.gguf": b"x"}}, "hf:org/repo", "it is not fetched"),
        ({"files": {"a-00001-of-00003.gguf": b"x"}}, "hf:org/repo", "has 1 of the 3 files"),
    ],
)
def test_refusals_are_one_line(server, settings, reference, expected):
    for name, value in settings.items():
        setattr(server, name, value)
    assert expected in pull_error(reference)


def described(**changes):
    """A repository's description with other values."""
    lfs = {"sha256": "0" * 64, "size": 5, "pointerSize": 134}
    sibling = {"rfilename": NAME, "size": 5, "blobId": "0" * 40, "lfs": lfs}
    fields = {"id": "org/repo", "sha": COMMIT, "private": False, "tags": [], "siblings": [sibling], **changes}
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "info",
    [
        *(b"<html>", b"[]", b"{}", b"null", b"\xff"),
        *(described(id=name) for name in (5, None, "../../x", "./.", "org")),
        *(described(sha=commit) for commit in (5, None, "main", "../../..")),
        *(described(siblings=files) for files in (5, [5], [{}], [{"rfilename": 5}])),
    ],
)
def test_what_does_not_describe_a_repository(server, info):
    server.info = info
    assert "does not describe org/repo as a hub does" in pull_error()
    assert not hub.models_dir().exists()


@pytest.mark.parametrize(
    "name",
    [
        "/x.gguf",
        "../x.gguf",
        "a/../../x.gguf",
        "./x.gguf",
        "a//x.gguf",
        "a\\x.gguf",
        "C:x.gguf",
        "a\nx.gguf",
        "\x1b[2J.gguf",
    ],
)
def test_names_that_lead_elsewhere_are_not_fetched(server, name):
    server.files = {name: CONTENT}
    assert "it is not fetched" in pull_error()
    assert not hub.models_dir().exists()


@pytest.mark.parametrize(
    ("size", "expected"),
    [(-5, "has -5 bytes"), (1000, "more than the 1000 bytes"), (0, "has sha256"), (10**18, "not enough space")],
)
def test_sizes_that_lie(server, size, expected):
    server.sizes[NAME] = size
    assert expected in pull_error()
    assert not [path for path in hub.models_dir().rglob("*") if path.is_file()]


def test_a_file_that_ends_early_is_kept_to_go_on(server):
    server.sizes[NAME] = len(CONTENT) + 1000
    assert "it goes on where it stopped" in pull_error()
    assert len(leftovers()) == 1


def test_a_pull_that_was_interrupted_after_its_last_byte(server):
    pull().unlink()
    digest = hashlib.sha256(CONTENT).hexdigest()[:16]
    (hub.models_dir() / "org" / "repo" / f".{NAME}.{digest}.part").write_bytes(CONTENT)
    assert pull().read_bytes() == CONTENT
    assert server.downloads() == [None]


def test_another_host_is_not_told_the_token(server, monkeypatch):
    server.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    with HubServer(files={NAME: CONTENT}) as other:
        server.files_at = other.url
        assert pull().read_bytes() == CONTENT
    assert server.tokens == ["Bearer secret"] * len(server.tokens)
    assert other.downloads() == [None]
    assert other.tokens == [None]


def test_headers_without_end(server):
    server.headers = {f"X-{i}": "x" * 1000 for i in range(300)}
    assert "the connection to" in pull_error()


@pytest.mark.parametrize("endpoint", ["localhost:9", "::", "file:///etc", "http://", "http://\n", "http:///x"])
def test_an_endpoint_that_is_no_address(server, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert "which is no address" in pull_error()


def test_a_token_that_is_none(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "tökën")
    assert "check HF_TOKEN" in pull_error()


# the client takes pieces of 10 MB, which nobody would see the middle of
PULL = """
import sys
import huggingface_hub.constants
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 100_000
from pykvq.cli.models import main
sys.exit(main(["pull", "hf:org/repo"]))
"""


@contextlib.contextmanager
def pulling_processes(server, n):
    """Processes that pull, held when one of them has half of the file until the server's ``hold`` is set."""
    server.hold = threading.Event()
    started = [subprocess.Popen([sys.executable, "-c", PULL], stdout=subprocess.PIPE) for _ in range(n)]
    deadline = time.monotonic() + 60
    while sum(path.stat().st_size for path in hub.models_dir().rglob("*.part")) < len(CONTENT) // 2:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    try:
        yield started
    finally:
        server.hold.set()
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_pull_that_was_killed_goes_on(server, number):
    with pulling_processes(server, 1) as (process,):
        process.send_signal(getattr(signal, number))
        assert process.wait(30) == {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}[number]
    (partial,) = leftovers()
    assert partial.endswith(".part")
    assert pull().read_bytes() == CONTENT
    first, second = server.downloads()
    assert first is None
    assert int(second.removeprefix("bytes=").removesuffix("-")) >= len(CONTENT) // 2
    assert leftovers() == [NAME]


def test_two_processes_that_pull_at_once_fetch_once(server):
    with pulling_processes(server, 2) as processes:
        server.hold.set()
        for process in processes:
            assert process.communicate(timeout=60)[0].decode() == f"{hub.models_dir() / 'org' / 'repo' / NAME}\n"
            assert process.returncode == 0
    assert server.downloads() == [None]
    assert leftovers() == [NAME]


def test_the_token_comes_from_the_environment(server, monkeypatch):
    server.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert pull().read_bytes() == CONTENT


def test_no_server(server, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "HF_ENDPOINT names a mirror" in pull_error()


def test_a_disk_with_too_little_room(server, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    assert "3 MB are to be fetched, 0 MB are free" in pull_error()


def test_a_disk_that_fills_up_keeps_what_is_there(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    write = hub._CountingFile.write

    def full(self, block):
        if self._file.tell() > 1_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, block)

    with monkeypatch.context() as patch:
        patch.setattr(hub._CountingFile, "write", full)
        assert "no space left in" in pull_error()
    assert pull().read_bytes() == CONTENT
    assert server.downloads()[1].startswith("bytes=")


def test_which_file_is_taken(server):
    server.files = {
        name: name.encode()
        for name in (
            "README.md",
            "mmproj-F16.gguf",
            "tiny-Q2_K.gguf",
            "tiny.Q8_0.gguf",
            "big/tiny-F16-00001-of-00002.gguf",
            "big/tiny-F16-00002-of-00002.gguf",
        )
    }
    assert pull().name == "tiny.Q8_0.gguf"
    assert pull("hf:org/repo:q2_k").name == "tiny-Q2_K.gguf"
    assert pull("hf:org/repo:tiny-Q2_K.gguf").name == "tiny-Q2_K.gguf"
    first = pull("org/repo:F16")
    assert first.name == "tiny-F16-00001-of-00002.gguf"
    assert sorted(path.name for path in first.parent.iterdir())[1] == "tiny-F16-00002-of-00002.gguf"


def test_offline_uses_what_is_here(server, monkeypatch):
    path = pull()
    server.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert pull() == path
    assert pull("hf:org/repo:Q4_K_M") == path
    assert "HF_HUB_OFFLINE is set" in pull_error("hf:org/other")
    assert server.requests == []


def test_without_a_connection_what_is_here_is_used(server, monkeypatch):
    path = pull()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert pull() == path


def test_what_the_hugging_face_cache_has_is_not_fetched_again(server, tmp_path):
    cached = tmp_path / "hf" / "hub" / "models--org--repo" / "snapshots" / COMMIT / NAME
    cached.parent.mkdir(parents=True)
    cached.write_bytes(CONTENT[:-1])
    assert pull() != cached  # it is not all there
    cached.write_bytes(CONTENT)
    assert pull() == cached
    assert len(server.downloads()) == 1


@pytest.mark.parametrize("text", ["hf:", "hf:org", "hf:org/repo/more", "hf:../x", "hf:a/b:", "hf:a/../b"])
def test_wrong_references(text):
    with pytest.raises(InvalidArgumentError, match="hf:ORG/REPO"):
        hub.parse_reference(text)


# --- pykvq-models


def run(capsys, *arguments):
    code = models_cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_pull_list_path_and_remove(server, capsys):
    path = hub.models_dir() / "org" / "repo" / NAME
    assert run(capsys, "list")[:2] == (0, "")
    assert run(capsys, "path", "hf:org/repo")[0] == 1
    assert run(capsys, "pull", "org/repo") == (0, f"{path}\n", "")
    code, out, _ = run(capsys, "list")
    assert (code, out.split()) == (0, ["org/repo:Tiny-Q4_K_M", "2.9", "MiB", "pykvq", str(path)])
    for name in ("org/repo:Tiny-Q4_K_M", "hf:org/repo", "tiny-q4_k_m", NAME, str(path)):
        assert run(capsys, "path", name) == (0, f"{path}\n", "")
    assert run(capsys, "remove", "org/repo", "--yes") == (0, "", f"deleted {path}\n")
    assert not path.parent.exists()
    assert hub.models_dir().exists()
    code, _, err = run(capsys, "remove", "org/repo")
    assert (code, err) == (
        1,
        "pykvq-models: error: there is no model 'org/repo' on this machine: `pykvq-models list` shows those that are\n",
    )


def test_a_failed_pull_is_one_line(server, capsys):
    code, out, err = run(capsys, "pull", "hf:org/other")
    assert (code, out) == (1, "")
    assert err.startswith("pykvq-models: error: ")
    assert err.count("\n") == 1
    assert run(capsys, "pull", "nonsense")[0] == 1
    assert run(capsys, "pull")[0] == 2


def test_layouts_of_other_programs(server, tmp_path, monkeypatch, capsys):
    home = tmp_path / "home"
    other = tmp_path / "mine"
    monkeypatch.setenv("PYKVQ_MODELS_DIR", f"{other}{os.pathsep}{tmp_path / 'missing'}")
    blob = tmp_path / "blob"
    blob.write_bytes(b"GGUF")
    files = {
        "a": home / ".lmstudio" / "models" / "pub" / "a-GGUF" / "a-Q8_0.gguf",
        "b": home / ".cache" / "llama.cpp" / "ggml-org_b_b.gguf",
        "c": tmp_path / "hf" / "hub" / "models--org--c" / "snapshots" / "abc" / "c-Q4_0.gguf",
        "d": other / "deep" / "down" / "d-00001-of-00002.gguf",
        "d2": other / "deep" / "down" / "d-00002-of-00002.gguf",
        "no": other / "d.kvq.gguf",
    }
    for path in files.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        if path == files["c"]:
            path.symlink_to(blob)
        else:
            path.write_bytes(b"GGUF" + path.name.encode())
    found = {model.name: model for model in models.local_models()}
    assert {name: model.source for name, model in found.items()} == {
        "pub/a-GGUF:a-Q8_0": "LM Studio",
        "ggml-org_b_b": "llama.cpp",
        "org/c:c-Q4_0": "Hugging Face",
        "deep/down:d": "PYKVQ_MODELS_DIR",
    }
    assert found["deep/down:d"].n_files == 2
    assert models.resolve("c-q4_0", fetch=False) == files["c"]
    code, _, err = run(capsys, "remove", "c-q4_0", "--yes")
    assert code == 2
    assert "belongs to Hugging Face" in err
    assert files["c"].exists()


def test_an_ambiguous_name(server, tmp_path, monkeypatch):
    monkeypatch.setenv("PYKVQ_MODELS_DIR", str(tmp_path / "mine"))
    for repo in ("one", "two"):
        path = tmp_path / "mine" / "org" / repo / "same.gguf"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"GGUF" + repo.encode())
    with pytest.raises(InvalidArgumentError, match="may be one of org/one:same, org/two:same"):
        models.resolve("same")
    assert models.resolve("org/two", fetch=False).parent.name == "two"


def test_a_path_wins(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert models.resolve(str(path)) == path
    assert models.resolve(str(tmp_path / "missing.gguf")) == tmp_path / "missing.gguf"


def test_a_damaged_demo_model_is_fetched_again(server, monkeypatch):
    model = catalog.CatalogModel(
        "T", "MIT", "p", "1", 10, "p/t.gguf", "t.gguf", 8, hashlib.sha256(b"GGUF1234").hexdigest()
    )
    path = catalog.cached_path(model)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF1234")
    assert catalog.is_cached(model)
    path.write_bytes(b"GGUF1235")
    assert not catalog.is_cached(model)
