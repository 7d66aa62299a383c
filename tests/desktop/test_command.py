"""pykvq-desktop cannot start: one line that says what to do, and nothing left behind."""

import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("nicegui")

from desktop.running import COMMAND
from pykvq.desktop.database import FILE_NAME, Database


def run(folder, *arguments):
    environment = {**os.environ, "HOME": str(folder), "PYKVQ_MODELS_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "--no-window", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )


def refused(result):
    """The only line of a run that did not start."""
    assert result.returncode in (1, 2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(run(tmp_path, "--port", str(port), "--data-dir", str(tmp_path / "data")))
    assert f"cannot listen on 127.0.0.1, port {port}" in line
    assert line.endswith("give another --port")
    Database(tmp_path / "data").close()  # which is not in use any more


def test_a_folder_that_another_app_uses(tmp_path):
    database = Database(tmp_path / "data")
    line = refused(run(tmp_path, "--port", "0", "--data-dir", str(tmp_path / "data")))
    database.close()
    assert "in use by another pykvq-desktop: use its window, or give another folder with --data-dir" in line


def test_a_damaged_database(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / FILE_NAME).write_bytes(b"no database" * 1000)
    line = refused(run(tmp_path, "--port", "0", "--data-dir", str(tmp_path / "data")))
    assert "is damaged" in line
    assert "move it away to begin anew" in line


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "data").touch()
    line = refused(run(tmp_path, "--port", "0", "--data-dir", str(tmp_path / "data")))
    assert "cannot use the data folder" in line
