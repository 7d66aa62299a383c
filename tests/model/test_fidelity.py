"""The fidelity command and function, on tiny models."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from tiny_models import TinyModel

from pykvq import InternalError, InvalidArgumentError, KVConfig, Llama, Tier
from pykvq.cli import fidelity as command
from pykvq.cli.text_file import write_json
from pykvq.measured import recall, warning
from pykvq.quality import evaluate, fidelity, needle
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


@pytest.mark.filterwarnings("error")
def test_a_token_whose_logits_are_not_a_number_has_no_likeliest_successor():
    reference = np.zeros((3, 10), dtype=np.float32)
    reference[:, 0] = 9
    divergence = Divergence()
    logits = reference.copy()
    logits[0] = np.nan
    logits[1, 0] = np.inf
    divergence.add(log_softmax(reference), logits, np.zeros(3, dtype=np.int32))
    assert divergence.same_top == [False, False, True]
    assert np.isnan(divergence.summary()["kld_mean"])


@pytest.fixture
def broken_path(tmp_path, monkeypatch):
    tiny = TinyModel()
    weights = tiny.weights()
    weights["blk.1.attn_k.weight"][:] = np.nan
    monkeypatch.setattr(TinyModel, "weights", lambda _self: weights)
    return tiny.write(tmp_path / "nan.gguf")


def test_a_model_that_computes_nan(broken_path, text_path, tmp_path, capsys):
    with pytest.raises(InternalError, match="the model's logits are not a number: its weights or an F16 cache are"):
        fidelity(broken_path, ["q8_0"], **SIZES)
    assert recall(broken_path, "q8_0") is None
    out = tmp_path / "out.json"
    code, out_text, err = run(capsys, broken_path, "--kv", "q8_0", *small(text_path), "--json", out)
    assert (code, out_text, err.count("\n")) == (1, "", 1)
    assert not out.exists()


def test_a_format_that_computes_nan(path, text_path, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pykvq.measured.cache_dir", lambda: tmp_path)
    decode = evaluate._decode
    monkeypatch.setattr(
        evaluate, "_decode", lambda context, *rest: decode(context, *rest) * (1 if context.read_tiers() else np.nan)
    )
    out = tmp_path / "out.json"
    code, table, err = run(capsys, path, "--kv", "q8_0,f16:32+q4_0", *small(text_path), "--json", out)
    assert code == 0, err
    assert "q8_0: 100 % of the logits are not finite" in err
    assert " nan " in table
    row, other = json.loads(out.read_text(), parse_constant=pytest.fail)["presets"]
    assert (row["kld_mean"], row["same_top"], row["nonfinite"]) == (None, 0, 1)
    assert other["kld_mean"] > 0
    json.loads(next((tmp_path / "fidelity").iterdir()).read_text(), parse_constant=pytest.fail)
    told = recall(path, "q8_0")
    assert (told["kld_mean"], told["nonfinite"]) == (None, 1)


def test_a_share_is_told_without_an_exponent():
    for share, text in [(1.0, "100 %"), (0.5, "50 %"), (0.00123, "0.123 %"), (1e-9, "less than 0.01 %")]:
        assert warning("x", {"nonfinite": share}) == f"x: {text} of the logits are not finite"


def test_what_stayed_in_the_first_tier_is_not_remembered(path, text_path, capsys):
    sizes = {**SIZES, "n_chunks": 1}
    before = fidelity(path, ["f16:128+q2_t"], **sizes)["presets"][0]
    assert before["n_aged"] > 0
    assert fidelity(path, ["q8_0"], **sizes)["presets"][0]["n_aged"] is None
    code, _, err = run(capsys, path, "--kv", "f16:128+q2_t", *small(text_path), "--ctx", 128)
    assert code == 0
    assert "f16:128+q2_t: no token left the first tier at --ctx 128: give a larger one" in err
    assert recall(path, "f16:128+q2_t")["kld_mean"] == before["kld_mean"]


@pytest.mark.parametrize("kv", ["q8_0", KVConfig("mine", (Tier("q8_0", "q8_0"),))])
def test_a_single_format(path, kv):
    rows = fidelity(path, kv, **{**SIZES, "n_ctx": np.int64(256), "n_chunks": 1})["presets"]
    assert [row["tiers"] for row in rows] == ["q8_0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv": None}, "kv must be a list, got None"),
        ({"kv": [4]}, "kv_quant must be a name such as 'ultra4', got 4"),
        ({"text": b"text"}, "text must be text, got b'text'"),
        ({"n_ctx": "512"}, "n_ctx must be a whole number, got '512'"),
        ({"n_chunks": 1.5}, "n_chunks must be a whole number, got 1.5"),
        ({"float_weights": 1}, "float_weights must be True or False, got 1"),
    ],
)
def test_arguments_of_another_type(path, arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        fidelity(path, **{"kv": ["q8_0"], **SIZES, **arguments})


def test_float_weights_change_the_model_a_little(path):
    row = fidelity(path, ["f16:32+q4_0"], float_weights=True, **SIZES)["presets"][0]
    plain = fidelity(path, ["f16:32+q4_0"], **SIZES)["presets"][0]
    assert row["ppl"] == pytest.approx(plain["ppl"], rel=1e-2)


@pytest.fixture(scope="module")
def text_path(tmp_path_factory):
    target = tmp_path_factory.mktemp("text") / "text.txt"
    target.write_text(TEXT)
    return target


def small(text_path):
    """Options of a quick run."""
    return ["--ctx", 512, "--chunks", 1, "--threads", 1, "--text", text_path]


def run(capsys, *arguments):
    code = command.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(path, text_path, tmp_path, capsys):
    options = [*small(text_path), "--json", tmp_path / "out.json"]
    code, out, err = run(capsys, path, "--kv", "q8_0,f16:32+q2_t@k1=q8_0,v1=q4_ve", *options)
    assert code == 0, err
    names = ["q8_0", "f16:32+q2_t@k1=q8_0,v1=q4_ve"]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("| ")][-2:] == names, out
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["name"] for row in report["presets"]] == names
    assert set(report) == {"model", "settings", "versions", "presets"}


def test_command_finds_needles(path, text_path, capsys):
    code, out, err = run(capsys, path, "--kv", "q8_0", *small(text_path), "--needle", "256")
    assert code == 0, err
    assert "same greedy tokens" in out


@pytest.fixture
def nothing_computed(monkeypatch):
    """Fails where a comparison begins."""
    monkeypatch.setattr("pykvq.quality.compare", pytest.fail)
    monkeypatch.setattr(sys.modules["pykvq.quality.needle"], "Llama", pytest.fail)


@pytest.mark.usefixtures("nothing_computed")
def test_a_text_too_short_for_a_needle_is_refused_first(path, text_path, capsys):
    code, _, err = run(capsys, path, "--kv", "q8_0", *small(text_path), "--needle", "256,50000")
    assert code == 2
    assert "tokens and a prompt of 50000 needs 49" in err
    with pytest.raises(InvalidArgumentError, match="the text has 9 tokens and a prompt of 512 needs"):
        needle(path, "q8_0", text="short", lengths=[128, 512])


@pytest.mark.usefixtures("nothing_computed")
@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_what_is_read_is_not_written_over(text_path, tmp_path, capsys, option):
    first = TinyModel(n_layer=3).write(tmp_path / "split.gguf", tensors_per_file=20)
    link = tmp_path / "link.png"
    os.link(text_path, link)
    calibration = tmp_path / first.name.replace(".gguf", ".kvq.gguf")
    calibration.write_text("")
    for target in [*sorted(tmp_path.glob("split-*")), link]:
        code, _, err = run(capsys, first, *small(text_path), option, target)
        assert code == 2
        assert "itself, which is read: write to another file" in err
    for target, problem in [(tmp_path, "it is a folder"), (tmp_path / "no" / "x.png", "its folder does not exist")]:
        code, _, err = run(capsys, first, *small(text_path), option, target)
        assert (code, f"cannot write '{target}': {problem}" in err) == (2, True), err


def test_json_is_written_at_once(tmp_path):
    target, link, before = (tmp_path / name for name in ("out.json", "link.json", "before.json"))
    write_json(target, {"a": [1, math.inf]})
    link.symlink_to(target)
    os.link(target, before)
    write_json(link, {"a": 2})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"a": 2}
    assert json.loads(before.read_text()) == {"a": [1, None]}  # not written into
    assert sorted(tmp_path.iterdir()) == [before, link, target]
    write_json(Path(os.devnull), {})
    with pytest.raises(InvalidArgumentError, match="does not exist"):
        write_json(tmp_path / "no" / "x.json", {})


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
