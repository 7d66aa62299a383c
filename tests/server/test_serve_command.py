"""pykvq-serve as a process."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from pykvq.server.serve import main


def start(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "pykvq.server.serve", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_serving_until_a_signal(smollm2_path):
    process = start(str(smollm2_path), "--port", "0", "--slots", "2", "--ctx", "512", PYKVQ_API_KEY="secret")
    try:
        line = process.stderr.readline()
        url = re.search(r"listening on (http://127\.0\.0\.1:\d+)/v1", line)[1]
        rest = []
        threading.Thread(target=lambda: rest.extend(process.stderr), daemon=True).start()
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{url}/v1/models").status_code == 401
        body = {"prompt": "The capital of France is", "max_tokens": 24, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            # the running answer may end
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(60) in (0, 128 + signal.SIGTERM)
        assert not any("Traceback" in line for line in rest)
    finally:
        process.kill()
        process.wait()


def test_a_port_that_is_taken(smollm2_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main([str(smollm2_path), "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing.gguf"], "model file not found: 'nothing.gguf'"),
        (["--slots", "0"], "--slots 0 is out of range: give 1 to 64"),
        (["--port", "70000"], "--port 70000 is out of range"),
        (["--kv", "ultra9"], "unknown KV format 'ultra9'"),
        (["--api-key", " "], "an API key is empty"),
        (["--timeout", "-1"], "--timeout -1.0 is out of range"),
    ],
)
def test_wrong_usage(arguments, text, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("pykvq.server.serve._demo_model", lambda: __file__)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("pykvq-serve: error: ")
    assert text in error
    assert error.count("\n") == 1


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pykvq-serve ")
