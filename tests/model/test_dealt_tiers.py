"""Tiers whose types a calibration deals to the layers, through a load."""

from __future__ import annotations

import pytest
from tiny_models import TinyModel

from pykvq import Llama


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A model in which the attention of the second and third layer hardly counts."""
    monkeypatch.setenv("PYKVQ_CACHE_DIR", str(tmp_path / "cache"))
    tiny = TinyModel(n_layer=4, n_ctx_train=1024)
    weights = tiny.weights()
    for layer in (1, 2):
        weights[f"blk.{layer}.attn_output.weight"] *= 1e-4
    monkeypatch.setattr(TinyModel, "weights", lambda _self: weights)
    return tiny.write(tmp_path / "tiny.gguf")


def load(path, calibrate) -> dict:
    with Llama(path, kv_quant="f16:128+q8_0@auto", n_ctx=1024, n_threads=1, calibrate=calibrate) as llm:
        llm.eval(llm.tokenize("x" * 400))
        return llm.kv_info()


def test_a_tier_of_llama_cpps_type_is_dealt(path):
    info = load(path, "auto")
    assert info["calibration"] is not None
    dealt = info["tiers"][1]["layers"]
    assert {"k1", "v1", "k2", "v2"} <= dealt.keys()
    assert "f16" in dealt.values()
    assert "@auto" not in info["tiers_spec"]
    plain = load(path, "never")
    assert (plain["calibration"], plain["tiers_spec"]) == (None, "f16:128+q8_0")
    assert info["tiers"][1]["n_bytes"] <= plain["tiers"][1]["n_bytes"]
