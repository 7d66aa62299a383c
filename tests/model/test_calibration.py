"""Calibration files: made at the first load, found at the next, and refused when they are not the model's."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
from tiny_models import TinyModel

from pykvq import AbortedError, CalibrationError, InvalidArgumentError, Llama, calibration
from pykvq.calibration import _default_tokens, calibrate, find, model_hash
from pykvq.calibration.file import FORMAT
from pykvq.calibration.own_text import _sample, write_texts
from pykvq.cli.calibrate import main
from pykvq.runtime import Model
from pykvq.sample_text import sample_text

TINY = TinyModel(n_ctx_train=1024)
N_TOKENS = 256


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("PYKVQ_CACHE_DIR", str(tmp_path / "cache"))
    return TINY.write(tmp_path / "tiny.gguf")


def load(path, **kwargs) -> dict:
    with Llama(path, n_ctx=1024, n_threads=1, **{"kv_quant": "ultra4", "calibrate": "auto", **kwargs}) as llm:
        llm.eval(llm.tokenize("The first load calibrates, the next ones need not."))
        return llm.kv_info()


def test_the_first_load_calibrates_and_the_second_does_not(path):
    shares: list[float] = []
    info = load(path, calibration_progress=lambda done: shares.append(done))
    file = path.with_name("tiny.kvq.gguf")
    assert info["calibration"]["path"] == str(file)
    assert info["calibration"]["n_bytes"] > 0
    sensitivity = info["calibration"]["sensitivity"]
    assert [entry["layer"] for entry in sensitivity] == list(range(len(sensitivity)))
    assert all(entry["k"] > 0 < entry["v"] for entry in sensitivity)
    assert info["tiers_spec"] == "f16:128+q4_ves/q4_ve"
    assert shares[0] == 0
    assert shares == sorted(shares)
    written = file.stat().st_mtime_ns
    shares.clear()
    load(path, calibration_progress=lambda done: shares.append(done))
    assert not shares
    assert file.stat().st_mtime_ns == written


def test_types_of_single_layers_reach_the_cache(path):
    plain, raised = (load(path, kv_quant=f"f16:128+q4_ve{layers}") for layers in ("", "@k1=q8_0,v0=q2_t"))
    assert raised["tiers"][1]["layers"] == {"k1": "q8_0", "v0": "q2_t"}
    # keys of a layer from 4.5 to 8.5 bits, values of one from 4.25 to 2.25, of two layers
    more = (4.0 - 2.0) / (2 * (4.5 + 4.25))
    assert raised["tiers"][1]["n_bytes"] == pytest.approx(plain["tiers"][1]["n_bytes"] * (1 + more))


def test_without_a_use_for_it_nothing_is_calibrated(path):
    assert load(path, kv_quant="q8_0")["calibration"] is None
    info = load(path, calibrate="never")
    assert info["calibration"] is None
    assert info["tiers_spec"] == "f16:128+q4_ve"
    assert not path.with_name("tiny.kvq.gguf").exists()


def test_a_longer_context_calibrates_anew(path):
    calibrate(path, n_tokens=N_TOKENS, n_positions=512, n_threads=1)
    assert load(path)["calibration"]["n_positions"] >= 1024


def refuse_writing(monkeypatch, folder=None):
    """Into a folder, or any."""

    def refuse(self, mode="r", *args, **kwargs):
        if "w" in mode and folder in (None, self.parent):
            raise PermissionError(13, "Permission denied")
        return open_file(self, mode, *args, **kwargs)

    open_file = Path.open
    monkeypatch.setattr(Path, "open", refuse)


def test_a_folder_that_is_not_writable(path, monkeypatch):
    refuse_writing(monkeypatch, path.parent)
    info = calibrate(path, n_tokens=N_TOKENS, n_threads=1)
    assert info.path.parent == path.parent / "cache" / "calibrations"
    assert find(path) == info


def test_without_a_place_to_write_nothing_is_computed(path, monkeypatch, caplog):
    refuse_writing(monkeypatch)
    monkeypatch.setattr(calibration, "collect_moments", Mock(side_effect=AssertionError))
    with pytest.raises(CalibrationError, match=r"cannot write the calibration \(.*Permission denied.*\): give a path"):
        calibrate(path, n_tokens=N_TOKENS, n_threads=1)
    assert load(path)["calibration"] is None
    assert "no calibration, a plain rotation is used instead: cannot write" in caplog.text


@pytest.mark.parametrize("share", [0.0, 0.95])
def test_stopping_leaves_nothing(path, share):
    with pytest.raises(AbortedError, match="stopped"):
        calibrate(path, n_tokens=512, n_threads=1, progress=lambda done: done < share)
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_foreign_calibration(path, tmp_path):
    other = TinyModel(seed=2).write(tmp_path / "other.gguf")
    file = calibrate(other, n_tokens=N_TOKENS, n_threads=1).path
    with pytest.raises(
        CalibrationError, match=r"of another model .other.gguf.: make one with pykvq-calibrate"
    ) as error:
        load(path, calibrate=str(file))
    one_line(error)


def test_a_missing_calibration(path):
    with pytest.raises(CalibrationError, match=r"calibration not found: .*nowhere.gguf.*pykvq-calibrate"):
        load(path, calibrate="nowhere.gguf")


@pytest.mark.parametrize("keep", [0, 3, 40, 300, -100])
def test_a_calibration_cut_short(path, keep):
    file = calibrate(path, n_tokens=N_TOKENS, n_threads=1).path
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CalibrationError, match="pykvq-calibrate") as error:
        load(path)
    one_line(error)


def test_an_older_format(path):
    writer = gguf.GGUFWriter(path.with_name("tiny.kvq.gguf"), "kvq")
    writer.add_uint32("kvq.format", FORMAT - 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CalibrationError) as error:
        load(path)
    assert one_line(error) == (
        f"the calibration '{path.with_name('tiny.kvq.gguf')}' has format {FORMAT - 1} and this version reads format "
        f"{FORMAT}: make a new one with pykvq-calibrate MODEL"
    )


def test_a_changed_byte(path):
    """Also where it leaves all numbers finite."""
    file = calibrate(path, n_tokens=N_TOKENS, n_threads=1).path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CalibrationError, match=r"is damaged .*checksum is wrong.*pykvq-calibrate MODEL"):
        load(path)


def test_one_that_does_not_fit_beside_the_model_hides_none_in_the_cache(path):
    beside = path.with_name("tiny.kvq.gguf")
    cached = path.parent / "cache" / "calibrations" / f"{model_hash(path)[:32]}.kvq.gguf"
    for n_positions, file in ((512, beside), (1024, cached)):
        calibrate(path, n_tokens=N_TOKENS, n_positions=n_positions, output=file, n_threads=1)
    assert find(path).path == beside
    assert find(path, 512).path == beside
    assert find(path, 1024).path == find(path, 2048).path == cached
    beside.write_bytes(b"damaged")
    assert find(path).path == cached
    cached.write_bytes(b"too")
    with pytest.raises(CalibrationError, match=r"tiny\.kvq\.gguf"):
        find(path)
    beside.unlink()
    beside.mkdir()
    cached.unlink()
    assert find(path) is None
    assert calibrate(path, n_tokens=N_TOKENS, n_threads=1).path == cached


def test_a_calibration_for_shorter_contexts_is_told(path, tmp_path, caplog):
    output = tmp_path / "short.gguf"
    calibrate(path, n_tokens=N_TOKENS, n_positions=512, output=output, n_threads=1)
    load(path, calibrate=output)
    assert "is for contexts of 512 tokens, this one has 1024" in caplog.text


def test_a_short_one_that_cannot_be_replaced_is_told(path, monkeypatch, caplog):
    calibrate(path, n_tokens=N_TOKENS, n_positions=512, n_threads=1)
    refuse_writing(monkeypatch)
    assert load(path)["calibration"]["n_positions"] == 512
    assert "is for contexts of 512 tokens, this one has 1024" in caplog.text


def test_a_model_that_computes_nan(tmp_path, monkeypatch):
    weights = TINY.weights()
    weights["blk.1.attn_k.weight"][:] = np.nan
    monkeypatch.setattr(TinyModel, "weights", lambda _self: weights)
    path = TINY.write(tmp_path / "nan.gguf")
    with pytest.raises(CalibrationError, match=r"layer 1 of .* computes values that are not finite"):
        calibrate(path, n_tokens=N_TOKENS, n_threads=1)


def test_short_texts_are_refused(path):
    with pytest.raises(InvalidArgumentError, match=r"the text has \d+ tokens: a calibration needs 256 at least"):
        calibrate(path, text="four")
    with pytest.raises(InvalidArgumentError, match="n_tokens=255"):
        calibrate(path, n_tokens=255)


@pytest.mark.parametrize("text", ["\n" * 5000, "\0" * 3000, " the" * 3000])
def test_a_text_of_few_different_tokens_is_refused(path, text):
    with pytest.raises(InvalidArgumentError, match=r"the text consists of \d+ different tokens, again and again"):
        calibrate(path, text=text, n_tokens=N_TOKENS, n_threads=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_tokens": -5}, "256 tokens at least, got n_tokens=-5"),
        ({"n_tokens": 10**20}, "without a text of yours a calibration takes 65536 tokens at most"),
        ({"n_tokens": "256"}, "n_tokens must be a whole number"),
        ({"n_positions": -1}, r"n_positions=-1: a calibration is for contexts of 1 to 1073741824 tokens"),
        ({"n_positions": 2**31}, r"n_positions=2147483648"),
        ({"n_positions": None}, "n_positions must be a whole number"),
        ({"text": b"four"}, "text must be text"),
    ],
)
def test_arguments_that_are_refused_at_once(path, arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        calibrate(path, **arguments)


def test_no_positions_are_those_of_the_model(path):
    assert calibrate(path, n_tokens=N_TOKENS, n_positions=0, n_threads=1).n_positions == TINY.n_ctx_train


def test_a_calibration_does_not_replace_its_text(path, capsys):
    text = path.with_name("text.txt")
    text.write_text("words")
    assert main([str(path), "--text", str(text), "--output", str(text)]) == 2
    assert "write to another file" in capsys.readouterr().err
    assert text.read_text() == "words"


def test_sorted_keys_need_a_calibration(path):
    with pytest.raises(InvalidArgumentError, match="there is none that does: use q4_ve and q2_t"):
        load(path, kv_quant="f16:128+q4_ves", calibrate="never")


def test_a_model_writes_whole_texts_and_the_same_each_time(path):
    with Model(path) as model:
        texts = write_texts(model, 3, 20, n_threads=1)
        assert [len(text) for text in texts] == [20, 20, 20]
        assert len({tuple(text) for text in texts}) == 3
        assert not any(model.is_eog(token) for text in texts for token in text[1:])
        assert write_texts(model, 3, 20, n_threads=1) == texts
        with pytest.raises(AbortedError):
            write_texts(model, 1, 20, n_threads=1, progress=lambda done: done < 0.5)


def test_half_of_the_default_text_is_the_models_own(path):
    with Model(path) as model:
        written = [token for text in write_texts(model, 4, 128, n_threads=1) for token in text]
        tokens = _default_tokens(model, 3, 1, lambda _done: True)
        assert tokens[:256] + tokens[512:] == written
        start = model.tokenize(sample_text()[:2048].encode(), add_special=True, parse_special=False)
        assert tokens[256:512] == start[:256]


def test_a_model_without_numbers_writes_something():
    assert _sample(np.full(8, np.nan, dtype=np.float32), [2], np.random.default_rng(0)) in range(8)
