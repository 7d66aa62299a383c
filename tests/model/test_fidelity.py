"""The fidelity command and function, on tiny models."""

from __future__ import annotations

import json
import math
from pydoc_data.topics import topics

import numpy as np
import pytest
from tiny_models import TinyModel

from pykvq import InvalidArgumentError, Llama
from pykvq.cli import fidelity as command
from pykvq.quality import fidelity
from pykvq.quality.metrics import Divergence, log_softmax

FORMATS = ["f16:128+f16", "q8_0", "f16:32+q4_0", "f16:32+q2_t"]
# all of the default text takes a minute in the tiny models' tokenizer
TEXT = "\n".join(topics.values())[:20_000]
SIZES = {"n_ctx": 512, "n_chunks": 2, "n_threads": 1, "text": TEXT}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return TinyModel(n_layer=3).write(tmp_path_factory.mktemp("fidelity") / "tiny.gguf")


def test_report(path):
    report = fidelity(path, FORMATS, **SIZES)
    rows = {row["name"]: row for row in report["presets"]}
    same = rows["f16:128+f16"]
    assert (same["kld_mean"], same["same_top"], same["ppl_change"], same["nonfinite"]) == (0, 1, 0, 0)
    assert 0 < rows["q8_0"]["kld_mean"] < rows["f16:32+q4_0"]["kld_mean"] < rows["f16:32+q2_t"]["kld_mean"]
    assert rows["q8_0"]["bits_per_element"] == 8.5
    for row in rows.values():
        assert row["kld_median"] <= row["kld_p99"] <= row["kld_p999"]
        assert math.isclose(row["ppl"], same["ppl"] * (1 + row["ppl_change"]), rel_tol=1e-5)
    assert report["settings"]["n_compared"] == 2 * (512 - 128 - 1)


def test_what_was_measured_is_told_when_the_model_is_loaded(path, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("pykvq.measured.cache_dir", lambda: tmp_path)
    report = fidelity(path, ["q8_0", "f16:32+q2_t"], **SIZES)
    measured = report["presets"][1]
    assert measured["same_top"] < 0.97
    with Llama(path, kv_quant="f16:32+q2_t", n_ctx=512) as llm:
        told = llm.kv_info()["measured"]
    assert (told["kld_mean"], told["same_top"]) == (measured["kld_mean"], measured["same_top"])
    assert "f16:32+q2_t changes the likeliest token of" in caplog.text
    with Llama(path, kv_quant="q4_0", n_ctx=512) as llm:
        assert llm.kv_info()["measured"] is None
    next((tmp_path / "fidelity").iterdir()).write_text("not JSON")
    with Llama(path, kv_quant="q8_0", n_ctx=512) as llm:
        assert llm.kv_info()["measured"] is None


def test_divergence_is_that_of_the_definition():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((5, 40)).astype(np.float32) for _ in range(2))
    tokens = rng.integers(0, 40, 5).astype(np.int32)
    divergence = Divergence()
    divergence.add(log_softmax(a), b, tokens)
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (a, b))
    assert np.allclose(divergence.kld, (p * np.log(p / q)).sum(-1), atol=1e-6)
    assert np.allclose(divergence.nll, -np.log(q[np.arange(5), tokens]), atol=1e-6)
    assert divergence.same_top == (p.argmax(-1) == q.argmax(-1)).tolist()


def test_logits_that_are_not_finite_are_counted():
    logits = np.zeros((2, 10), dtype=np.float32)
    logits[0, 3] = np.nan
    divergence = Divergence()
    divergence.add(log_softmax(np.zeros((2, 10), dtype=np.float32)), logits, np.zeros(2, dtype=np.int32))
    assert divergence.summary()["nonfinite"] == 0.05


def test_float_weights_change_the_model_a_little(path):
    row = fidelity(path, ["f16:32+q4_0"], float_weights=True, **SIZES)["presets"][0]
    plain = fidelity(path, ["f16:32+q4_0"], **SIZES)["presets"][0]
    assert row["ppl"] == pytest.approx(plain["ppl"], rel=1e-2)


@pytest.fixture(scope="module")
def text_path(tmp_path_factory):
    target = tmp_path_factory.mktemp("text") / "text.txt"
    target.write_text(TEXT)
    return target


def run(capsys, *arguments):
    code = command.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(path, text_path, tmp_path, capsys):
    small = ["--ctx", 512, "--chunks", 1, "--threads", 1, "--text", text_path]
    code, out, err = run(capsys, path, "--kv", "q8_0,f16:32+q2_t", *small, "--json", tmp_path / "out.json")
    assert code == 0, err
    assert [line.split()[1] for line in out.splitlines() if line.startswith("| ")][-2:] == ["q8_0", "f16:32+q2_t"], out
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["name"] for row in report["presets"]] == ["q8_0", "f16:32+q2_t"]
    assert set(report) == {"model", "settings", "versions", "presets"}


def test_command_finds_needles(path, text_path, capsys):
    small = ["--ctx", 512, "--chunks", 1, "--threads", 1, "--text", text_path]
    code, out, err = run(capsys, path, "--kv", "q8_0", *small, "--needle", "256")
    assert code == 0, err
    assert "same greedy tokens" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv", "q3_x"], "unknown KV format 'q3_x'"),
        (["--text", "nowhere.txt"], "cannot read the text 'nowhere.txt': No such file"),
        (["--needle", "12"], "give prompt lengths of 128 tokens or more"),
        (["--chunks", "0"], "nothing to compare"),
    ],
)
def test_command_errors_are_one_line(path, capsys, arguments, message):
    code, out, err = run(capsys, path, *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_text_shorter_than_a_chunk(path):
    with pytest.raises(InvalidArgumentError, match=r"the text has \d+ tokens and one chunk takes 512"):
        fidelity(path, ["q8_0"], **{**SIZES, "text": "ten bytes."})
