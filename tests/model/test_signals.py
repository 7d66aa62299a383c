"""SIGTERM and SIGHUP end every tool as Ctrl-C does: at once, with no half-written and no temporary file left."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

NEVER = ["--calibration", "never"]


def commands(model, folder):
    """Command lines that take seconds at least."""
    out, text = folder / "out.gguf", folder.parent / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 5000)
    return {
        "calibrate": ["calibrate", model, "--output", out, "--tokens", "8192"],
        "fidelity": ["fidelity", model, "--float-weights", "--kv", "q8_0", *NEVER],
        "quantize": ["quantize", model, out, "q4_k_m", "--allow-requantize"],
        "imatrix": ["quantize", model, out, "--make-imatrix", text],
        "convert": ["convert", model, out, "--type", "q4_k_m"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=str)
@pytest.mark.parametrize("tool", ["calibrate", "fidelity", "quantize", "imatrix", "convert"])
def test_nothing_is_left(request, smollm2_path, tmp_path, tool, number):
    model = request.getfixturevalue("smollm2_f32").path if tool == "convert" else smollm2_path
    folder, temporary = tmp_path / "folder", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    module, *arguments = commands(model, folder)[tool]
    with subprocess.Popen(
        [sys.executable, "-m", f"pykvq.cli.{module}", *map(str, arguments), "--threads", "1"],
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        wait_until_busy(process, folder, temporary, waits_for_file=tool != "calibrate")
        process.send_signal(number)
        assert process.wait(30) == (130 if number == signal.SIGINT else 128 + number)
        assert process.stderr.read() == ""
    assert [*folder.rglob("*"), *temporary.rglob("*")] == []


def wait_until_busy(process, folder, temporary, *, waits_for_file):
    """Until the process has written something, or (a calibration is written at the end) has mapped the model."""
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if waits_for_file:
            files = [*folder.rglob("*"), *temporary.rglob("*.gguf")]
            is_busy = bool(files)
        else:
            is_busy = any(each.path.endswith(".gguf") for each in psutil.Process(process.pid).memory_maps())
        if is_busy:
            time.sleep(0.3)
            return
        time.sleep(0.02)
    raise AssertionError(f"it ended with {process.poll()}: {process.stderr.read() if process.poll() else 'idle'}")
