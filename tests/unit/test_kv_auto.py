"""kv_quant="auto": sizes, and the choice among formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pykvq import kv_auto
from pykvq.calibration import CalibrationInfo
from pykvq.calibration.file import LayerSensitivity
from pykvq.errors import InvalidArgumentError, OutOfMemoryError
from pykvq.kv_auto import choose_format, parse_memory
from pykvq.kv_config import KV_TYPE_BITS


def info(k: float = 1.0, v: float = 1.0, spectral: bool = True) -> CalibrationInfo:
    return CalibrationInfo(
        path=Path("x"),
        model_hash="",
        model_name="",
        spectral_keys=spectral,
        n_tokens=1024,
        n_positions=2048,
        text="",
        version="",
        sensitivity=(LayerSensitivity(0, k, v, 64, 64), LayerSensitivity(1, k, v, 64, 64)),
    )


@pytest.fixture
def sizes(monkeypatch):
    """A cache of as many bytes as its oldest tier has bits an element, for each token."""

    def kv_bytes(_model, kv, n_ctx, **_sizes):
        return int(kv.tiers[-1].bits_per_element() * n_ctx), 16 * n_ctx

    monkeypatch.setattr(kv_auto, "kv_bytes", kv_bytes)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(4096, 4096), ("2GiB", 2**31), ("1.5 MiB", 3 * 2**19), ("100MB", 10**8), ("77", 77), (1e6, 10**6)],
)
def test_memory(value, expected):
    assert parse_memory(value) == expected


def test_memory_as_a_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr(kv_auto, "available_memory", lambda: 1000)
    assert parse_memory(0.5) == 500
    assert parse_memory("0.25") == 250


@pytest.mark.parametrize("value", [None, 0, -1, "much", "2 XiB", "", True, 0.0])
def test_memory_that_is_none(value):
    with pytest.raises(InvalidArgumentError, match=r"is no size: give bytes"):
        parse_memory(value)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(16000, "f16"), (8600, "q8_0"), (4400, "q4_ves/q4_ve"), (2400, "q2_ts/q2_t")],
)
def test_more_memory_takes_a_larger_format(sizes, budget, expected):
    choice = choose_format(object(), info(), 1000, budget, n_sink=4)
    assert str(replace(choice.kv.tiers[-1], layers=())) == expected
    assert choice.n_bytes <= budget
    assert expected.split("/")[0] in str(choice.kv)


@pytest.mark.parametrize(("k", "v", "more"), [(1.0, 1e3, "v"), (10.0, 1e-3, "k")])
def test_the_more_sensitive_side_gets_the_bits(sizes, k, v, more):
    tier = choose_format(object(), info(k, v), 1000, 3450, n_sink=4).kv.tiers[-1]
    own = {layer.layer: layer for layer in tier.layers}
    bits = {
        part: sum(KV_TYPE_BITS[getattr(own.get(i, tier), f"type_{part}")] for i in range(2)) / 2 for part in ("k", "v")
    }
    assert max(bits, key=bits.__getitem__) == more, tier


def test_nothing_fits(sizes):
    with pytest.raises(OutOfMemoryError, match="use n_ctx 256 or less"):
        choose_format(object(), info(), 1000, 700, n_sink=4)
    with pytest.raises(OutOfMemoryError, match=r"the smallest takes .* MiB: give it more"):
        choose_format(object(), info(), 1000, 1, n_sink=4)


def test_without_a_calibration_types_stay_uniform(sizes):
    assert str(choose_format(object(), None, 1000, 4400, n_sink=4).kv.tiers[-1]) == "q4_ve"
