"""pykvq-inspect on sound models: facts, KV formats, split files, JSON and the plot."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from tiny_models import TinyModel

from pykvq import Llama, ModelFileError, kv_presets, predict_kv
from pykvq.cli import inspect
from pykvq.file_names import part_paths
from pykvq.model_file import read_model_file

TINY = TinyModel(n_layer=3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return TINY.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return TINY.write(tmp_path_factory.mktemp("split") / "tiny.gguf", tensors_per_file=10)


def run(capsys, *arguments):
    code = inspect.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_facts_of_a_real_model(smollm2_path, capsys):
    code, out, err = run(capsys, smollm2_path, "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["architecture"] == "llama"
    assert facts["n_params"] == 134_515_008
    assert facts["context_length"] == 8192
    assert facts["shape"]["head_count"] == 9
    assert facts["shape"]["head_count_kv"] == 3
    assert facts["shape"]["key_length"] == 64
    assert facts["rope"]["freq_base"] == 100_000
    assert facts["tokenizer"]["n_tokens"] == 49152
    assert facts["has_chat_template"] is True
    assert facts["calibration"] is None
    assert facts["weight_types"]["q4_1"]["n_tensors"] == 210
    # 30 layers, 3 heads of 64 in K and in V, 2 bytes
    assert facts["kv_formats"]["f16"]["bytes_per_token"] == 30 * 3 * 64 * 2 * 2
    assert facts["kv_formats"]["ultra2"]["ratio"] == pytest.approx(2.25 / 16)
    assert facts["error"] is None


def test_the_text_names_all_presets(tiny, capsys):
    code, out, _ = run(capsys, tiny)
    assert code == 0
    for name in (*kv_presets(), "chat template", "calibration", "heads", "largest context in"):
        assert f"\n{name} " in out or name in out
    assert "chat template  no\n" in out


def test_the_largest_context_fits_the_budget_and_no_more_does(smollm2_path, capsys):
    budget = 260 * 2**20
    formats = json.loads(run(capsys, smollm2_path, "--json", "--memory", budget)[1])["kv_formats"]
    found = formats["f16"]["largest_context"]
    assert 1024 < found < formats["q8_0"]["largest_context"] < 8192
    assert formats["ultra4"]["largest_context"] == 8192
    free = budget - predict_kv(smollm2_path, found, "f16")["kv_bytes"]
    # within the step of the search
    assert predict_kv(smollm2_path, int(found * 1.1), "f16")["kv_bytes"] + free > budget


@pytest.mark.parametrize(("head_dim", "impossible"), [(32, "q4_ve, q2_t"), (80, "q8_0, q4_0, q4_ve, q2_t")])
def test_formats_that_the_heads_do_not_fit_are_left_out(tmp_path, capsys, head_dim, impossible):
    path = TinyModel(n_head=2, n_head_kv=1, head_dim_k=head_dim).write(tmp_path / "tiny.gguf")
    code, out, err = run(capsys, path)
    assert (code, err) == (0, "")
    assert out.endswith(f"\nnot for heads of this size: {impossible}\n")
    assert "\nultra4 " in out


def test_a_budget_that_is_no_size(tiny, capsys):
    code, _, err = run(capsys, tiny, "--memory", "much")
    assert code == 2
    assert err == "pykvq-inspect: error: --memory 'much' is no size: give a number with K, M, G or T, as in 8G\n"


def test_a_calibration_beside_the_model_is_told(tmp_path):
    path = TINY.write(tmp_path / "tiny.gguf")
    assert read_model_file(path).calibration is None
    (tmp_path / "tiny.kvq.gguf").write_bytes(b"GGUF")
    assert read_model_file(path).calibration == tmp_path / "tiny.kvq.gguf"


def test_a_split_model_is_one_model(tiny, split):
    parts = part_paths(split)
    assert len(parts) > 2
    assert part_paths(parts[1]) == parts
    whole, in_parts = read_model_file(tiny), read_model_file(parts[-1])
    assert in_parts.paths == parts
    assert in_parts.n_params == whole.n_params
    assert in_parts.weight_types == whole.weight_types
    with Llama(split, n_ctx=256, n_threads=1) as llm, Llama(tiny, n_ctx=256, n_threads=1) as other:
        for model in (llm, other):
            model.eval([5, 6, 7])
        assert llm.sample(temp=0) == other.sample(temp=0)


def test_a_split_model_with_a_part_missing(tmp_path, capsys):
    first = TINY.write(tmp_path / "tiny.gguf", tensors_per_file=10)
    missing = part_paths(first)[1]
    missing.unlink()
    code, _, err = run(capsys, first)
    assert code == 1
    assert f"1 of the {len(part_paths(first))} files" in err
    assert missing.name in err


def test_an_architecture_that_cannot_be_run_still_has_facts(tiny, tmp_path, capsys):
    path = tmp_path / "new.gguf"
    path.write_bytes(tiny.read_bytes().replace(b"llama", b"lluma"))
    code, out, err = run(capsys, path)
    assert code == 1
    assert "architecture lluma" in out
    # other tests may have sent the native log here too
    (error,) = [line for line in err.splitlines() if line.startswith("pykvq-inspect: ")]
    assert error.startswith("pykvq-inspect: error: this model cannot be run: ")
    assert "lluma" in error


@pytest.mark.skipif(sys.platform == "win32", reason="no such files")
def test_what_is_no_regular_file(tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    for path, text in (
        (tmp_path / "fifo", "no regular file"),
        ("/dev/null", "no regular file"),
        (tmp_path, "directory"),
    ):
        code, _, err = run(capsys, path)
        assert code == 1
        assert text in err
        with pytest.raises(ModelFileError, match=text):
            Llama(path)


def test_a_file_that_is_not_there(tmp_path, capsys):
    code, _, err = run(capsys, tmp_path / "nothing.gguf")
    assert code == 1
    assert "No such file" in err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the tools extra")
def test_a_plot(tiny, tmp_path, capsys):
    code, _, err = run(capsys, tiny, "--plot", tmp_path / "kv.png")
    assert (code, err) == (0, f"drew {tmp_path}/kv.png\n")
    assert (tmp_path / "kv.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = run(capsys, tiny, "--plot", tmp_path / "kv.nonsense")
    assert code == 2
    assert err.count("\n") == 1


def test_a_model_larger_than_memory_is_read_at_once(tiny, tmp_path):
    """A hole of 2 TB is put before the end of the data: a header tells, and no more is read."""
    data = tiny.read_bytes()
    path = tmp_path / "huge.gguf"
    path.write_bytes(data)
    os.truncate(path, 2**41)
    done = subprocess.run(
        [sys.executable, "-m", "pykvq.cli.inspect", path],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert "2.0 TiB" in done.stdout
