"""The snippets of docs/migration.md do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from server.conftest import running_server

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.S | re.M)


def run(snippet, folder):
    command = [sys.executable, "-c", snippet]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture
def folder(smollm2_path, tmp_path):
    (tmp_path / "model.gguf").symlink_to(smollm2_path)
    return tmp_path


def test_the_page_has_its_snippets():
    assert len(SNIPPETS) == 5


@pytest.mark.parametrize("i", range(4))
def test_python_snippets(folder, i):
    assert run(SNIPPETS[i], folder).strip()


def test_the_snippet_for_a_client(folder):
    with running_server({"model": folder / "model.gguf"}) as (url, _):
        output = run(SNIPPETS[4].replace("http://127.0.0.1:1234", url), folder)
    assert output.splitlines()[-1] == "['model']"
