"""Some 1,600 damaged copies of a model, through pykvq-inspect and through Llama: an error, and never a signal."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mutated_gguf import write_mutations
from tiny_models import TinyModel

TESTS = Path(__file__).parents[1]
# numbers that a reader cannot know to be wrong
HARMLESS = re.compile(
    r"(llama\.(context_length|feed_forward_length|rope\.\S+|attention\.layer_norm_rms_epsilon)"
    r"|tokenizer\.ggml\.\w+_token_id|tokenizer\.ggml\.(tokens|scores|token_type)\S*( element)? type"
    r"|\S+ type) = \S+"
)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Damaged files by what was done to them."""
    folder = tmp_path_factory.mktemp("damaged")
    small = TinyModel(n_layer=1, n_embd=32, n_ff=32, n_head=2, n_head_kv=1, head_dim_k=32)
    return write_mutations(small.write(folder / "sound.gguf"), folder / "files")


def open_all(action, damaged):
    """Runs the action on all files; returns [what was done, exit code, error text, seconds] and the most MiB."""
    names = {str(path): name for name, path in damaged.items()}
    done = subprocess.run(
        [sys.executable, str(TESTS / "open_damaged.py"), action, *names],
        capture_output=True,
        encoding="utf-8",
        timeout=500,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"signal or failure after {lines[-1:]} of {len(names)}: {done.stderr[-2000:]}"
    return [[names[path], *rest] for path, *rest in lines[:-1]], lines[-1]


def test_inspect(damaged):
    results, most_mib = open_all("inspect", damaged)
    assert len(results) == len(damaged) > 1000
    assert most_mib < 100
    for name, code, text, seconds in results:
        assert seconds < 1, name
        assert code in ((0, 1) if HARMLESS.fullmatch(name) else (1,)), (name, text)
        assert text.count("\n") == (1 if code else 0), (name, text)
    assert sum(code for _, code, *_ in results) > 1000


def test_load(damaged):
    results, _ = open_all("load", damaged)
    assert len(results) == len(damaged)
    for name, code, text, _ in results:
        assert code or HARMLESS.fullmatch(name), name
        assert text.count("\n") == code, (name, text)
