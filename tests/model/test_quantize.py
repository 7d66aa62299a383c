"""Quantizing model files and making importance matrices, with a tiny model."""

import os
import shutil
import subprocess
import sys

import gguf
import numpy as np
import pytest
from tiny_models import TinyModel

from pykvq import InvalidArgumentError, Llama, ModelFileError, OutOfMemoryError, files, quantize
from pykvq.calibration import calibrate
from pykvq.cli import quantize as quantize_cli
from pykvq.model_file import read_model_file

# all matrices have rows of whole super-blocks of 256
TINY = TinyModel(n_embd=256, n_ff=512, n_head=4, n_head_kv=2, head_dim_k=64)
TEXT = "The quick brown fox jumps over the lazy dog, and none of the others does. " * 30
N_TOKENS = 3072  # whole chunks; a space is three tokens
PROMPT = list(range(40, 90))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return TINY.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def imatrix(tiny):
    path = tiny.with_name("imatrix.gguf")
    assert quantize.make_imatrix(tiny, TEXT, path, n_threads=1) == N_TOKENS
    return path


def logits(path, kv_quant="f16"):
    with Llama(path, n_ctx=256, n_threads=1, kv_quant=kv_quant) as llm:
        llm.eval(PROMPT)
        return llm._engine.context.logits()


def relative_error(values, reference):
    return float(np.linalg.norm(values - reference) / np.linalg.norm(reference))


def test_every_type_can_be_written_and_run(tiny, imatrix, tmp_path):
    reference = logits(tiny)
    errors = {}
    for name, kind in quantize.quantize_types().items():
        out = tmp_path / f"{name}.gguf"
        seen = []
        quantize.quantize(tiny, out, name, imatrix=imatrix if kind.needs_imatrix else None, progress=seen.append)
        assert seen[-1] == 1.0
        values = logits(out, "ultra4" if name == "q4_k_m" else "f16")
        assert np.isfinite(values).all(), name
        errors[name] = relative_error(values, reference)
        assert out.stat().st_size < tiny.stat().st_size * 1.01
    assert errors["f32"] == 0
    assert errors["f16"] < 0.002 < errors["q4_0"]
    assert errors["q8_0"] < 0.05
    assert errors["q6_k"] < errors["q4_k_m"] < errors["q2_k"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.gguf" for name in errors)


def test_the_imatrix_is_the_sum_of_the_squared_inputs(tiny, imatrix):
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(imatrix).tensors}
    with Llama(tiny, vocab_only=True) as llm:
        tokens = llm.tokenize(TEXT)[:N_TOKENS]
    weights = TINY.weights()
    x = weights["token_embd.weight"][tokens].astype(np.float64)
    normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + TINY.rms_eps) * weights["blk.0.attn_norm.weight"]
    assert tensors["blk.0.attn_q.weight.counts"].ravel() == [N_TOKENS]
    np.testing.assert_allclose(tensors["blk.0.attn_q.weight.in_sum2"].ravel(), (normed**2).sum(axis=0), rtol=1e-3)
    assert "blk.1.ffn_down.weight.in_sum2" in tensors
    assert "output.weight.in_sum2" not in tensors


def test_the_imatrix_changes_the_rounding(tiny, imatrix, tmp_path):
    for name, given in (("plain", None), ("weighted", imatrix)):
        quantize.quantize(tiny, tmp_path / name, "q4_k_m", imatrix=given)
    assert (tmp_path / "plain").read_bytes() != (tmp_path / "weighted").read_bytes()


def test_pure_is_one_type(tiny, tmp_path):
    quantize.quantize(tiny, tmp_path / "pure.gguf", "q4_k_m", pure=True)
    assert set(read_model_file(tmp_path / "pure.gguf").weight_types) == {"q4_K", "f32"}


def test_a_split_model_becomes_one_file(tiny, tmp_path):
    first = TINY.write(tmp_path / "split.gguf", tensors_per_file=8)
    for source, out in ((first, "a.gguf"), (tiny, "b.gguf")):
        quantize.quantize(source, tmp_path / out, "q8_0")
    assert np.array_equal(logits(tmp_path / "a.gguf"), logits(tmp_path / "b.gguf"))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_an_interrupted_run_leaves_nothing_behind(tiny, tmp_path, stop):
    out = tmp_path / "out.gguf"
    out.write_bytes(b"before")

    def progress(done):
        if done > 0.5:
            raise stop

    with pytest.raises(stop):
        quantize.quantize(tiny, out, "q8_0", progress=progress)
    with pytest.raises(stop):
        quantize.make_imatrix(tiny, TEXT, out, n_threads=1, progress=progress)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    assert out.read_bytes() == b"before"


def test_refusals(tiny, imatrix, tmp_path, monkeypatch):
    out = tmp_path / "out.gguf"
    with pytest.raises(InvalidArgumentError, match="unknown model type 'q9': use one of f32, f16"):
        quantize.quantize(tiny, out, "q9")
    with pytest.raises(InvalidArgumentError, match="only usable with an importance matrix"):
        quantize.quantize(tiny, out, "iq1_s")
    with pytest.raises(ModelFileError, match="is no importance matrix"):
        quantize.quantize(tiny, out, "q4_0", imatrix=tiny)
    for overwrite in (
        lambda: quantize.quantize(tiny, tiny, "q4_0"),
        lambda: quantize.quantize(tiny, imatrix, "q4_0", imatrix=imatrix),
        lambda: quantize.make_imatrix(tiny, TEXT, tiny),
        lambda: calibrate(tiny, output=tiny),
    ):
        before = tiny.read_bytes(), imatrix.read_bytes()
        with pytest.raises(InvalidArgumentError, match="itself, which is read: write to another file"):
            overwrite()
        assert (tiny.read_bytes(), imatrix.read_bytes()) == before
    with pytest.raises(ModelFileError, match="does not exist"):
        quantize.quantize(tiny, tmp_path / "no" / "out.gguf", "q4_0")
    with pytest.raises(InvalidArgumentError, match="the text has 7 tokens"):
        quantize.make_imatrix(tiny, "abc", out)
    quantize.quantize(tiny, tmp_path / "q8.gguf", "q8_0")
    with pytest.raises(InvalidArgumentError, match="is quantized already"):
        quantize.quantize(tmp_path / "q8.gguf", out, "q4_0")
    quantize.quantize(tmp_path / "q8.gguf", out, "q4_0", allow_requantize=True)
    monkeypatch.setattr(quantize, "available_memory", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match="for its largest tensor"):
        quantize.quantize(tiny, out, "q4_0")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: files.shutil._ntuple_diskusage(1, 1, 1))
    with pytest.raises(ModelFileError, match="not enough space"):
        quantize.quantize(tiny, out, "q4_0")
    quantize.quantize(tiny, out, "q4_0", force=True)


def test_the_command(tiny, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    assert quantize_cli.main([str(tiny), str(out), "Q4_K_M"]) == 0
    assert capsys.readouterr().err.startswith(f"wrote {out}, ")
    (tmp_path / "text").write_text(TEXT)
    assert quantize_cli.main([str(tiny), str(out), "--make-imatrix", str(tmp_path / "text")]) == 0
    assert capsys.readouterr().err == f"wrote {out}, over {N_TOKENS} tokens\n"
    for arguments, code, text in (
        ([str(tiny), str(out)], 2, "give a TYPE, or --make-imatrix"),
        ([str(tiny), str(out), "q9"], 2, "unknown model type 'q9'"),
        ([str(tmp_path / "nothing.gguf"), str(out), "q8_0"], 1, "nothing.gguf"),
        ([str(tiny), str(out), "--make-imatrix", str(tmp_path / "nothing")], 1, "give a text file"),
    ):
        assert quantize_cli.main(arguments) == code
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="file names are Unicode there")
def test_file_names_that_are_no_unicode(tiny, imatrix, tmp_path, capsys):
    folder = os.fsencode(tmp_path)
    source, matrix, out = (os.fsdecode(folder + b"/" + name) for name in (b"m\xff.gguf", b"i\xff.gguf", b"o\xff.gguf"))
    shutil.copy(tiny, source)
    assert quantize_cli.main([source, out, "q4_0", "--imatrix", matrix]) == 1
    error = capsys.readouterr().err
    assert "cannot read the importance matrix" in error
    assert error.count("\n") == 1
    shutil.copy(imatrix, matrix)
    assert quantize_cli.main([source, out, "q4_0", "--imatrix", matrix]) == 0
    assert np.isfinite(logits(out)).all()
    with pytest.raises(InvalidArgumentError, match=r"imatrix .* is not valid Unicode"):
        quantize.quantize(tiny, out, "q4_0", imatrix="\ud800")
    with pytest.raises(InvalidArgumentError, match=r"imatrix .* holds a NUL character"):
        quantize.quantize(tiny, out, "q4_0", imatrix="a\0b")


def test_damaged_models_end_in_one_line(tiny, tmp_path):
    data = tiny.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    command = [sys.executable, "-m", "pykvq.cli.quantize", tmp_path / "cut.gguf", tmp_path / "out.gguf", "q8_0"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert done.returncode == 1
    assert "cut short" in done.stderr
    assert done.stderr.count("\n") == 1
