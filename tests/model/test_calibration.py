"""Calibration files: made at the first load, found at the next, and refused when they are not the model's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_models import TinyModel

from pykvq import AbortedError, CalibrationError, InvalidArgumentError, Llama
from pykvq.calibration import _default_tokens, calibrate, find
from pykvq.calibration.file import FORMAT
from pykvq.calibration.own_text import _sample, write_texts
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
    calibration = path.with_name("tiny.kvq.gguf")
    assert info["calibration"]["path"] == str(calibration)
    assert info["calibration"]["n_bytes"] > 0
    sensitivity = info["calibration"]["sensitivity"]
    assert [entry["layer"] for entry in sensitivity] == list(range(len(sensitivity)))
    assert all(entry["k"] > 0 < entry["v"] for entry in sensitivity)
    assert info["tiers_spec"] == "f16:128+q4_ves/q4_ve"
    assert shares[0] == 0
    assert shares == sorted(shares)
    written = calibration.stat().st_mtime_ns
    shares.clear()
    load(path, calibration_progress=lambda done: shares.append(done))
    assert not shares
    assert calibration.stat().st_mtime_ns == written


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


def test_a_folder_that_is_not_writable(path, monkeypatch):
    def refuse(self, mode="r", *args, **kwargs):
        if self.parent == path.parent and "w" in mode:
            raise PermissionError(13, "Permission denied")
        return open_file(self, mode, *args, **kwargs)

    open_file = Path.open
    monkeypatch.setattr(Path, "open", refuse)
    info = calibrate(path, n_tokens=N_TOKENS, n_threads=1)
    assert info.path.parent == path.parent / "cache" / "calibrations"
    assert find(path) == info


def test_stopping_leaves_nothing(path):
    with pytest.raises(Exception, match="stopped"):
        calibrate(path, n_tokens=512, n_threads=1, progress=lambda _done: False)
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
    with pytest.raises(CalibrationError, match=f"has format {FORMAT - 1} and this version reads format {FORMAT}"):
        load(path)


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
