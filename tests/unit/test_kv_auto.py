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


def choose(calibration, budget, *, tiers=True):
    """For 1,000 tokens, each of as many bytes as the oldest tier has bits an element."""
    return choose_format(
        calibration,
        1000,
        budget,
        n_sink=4,
        n_bytes=lambda kv, n_ctx: int(kv.tiers[-1].bits_per_element() * n_ctx),
        tiers=tiers,
    )


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


@pytest.mark.parametrize(
    "value", [None, 0, -1, "much", "2 XiB", "", True, 0.0, float("inf"), float("nan"), "9" * 400, 10**400]
)
def test_memory_that_is_none(value):
    with pytest.raises(InvalidArgumentError, match=r"is no size: give bytes"):
        parse_memory(value)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(16000, "f16"), (8600, "q8_0"), (4400, "q4_ves/q4_ve"), (2400, "q2_ts/q2_t")],
)
def test_more_memory_takes_a_larger_format(budget, expected):
    choice = choose(info(), budget)
    assert str(replace(choice.kv.tiers[-1], layers=())) == expected
    assert choice.n_bytes <= budget
    assert expected.split("/")[0] in str(choice.kv)


@pytest.mark.parametrize(("k", "v", "more"), [(1.0, 1e3, "v"), (10.0, 1e-3, "k")])
def test_the_more_sensitive_side_gets_the_bits(k, v, more):
    tier = choose(info(k, v), 3450).kv.tiers[-1]
    own = {layer.layer: layer for layer in tier.layers}
    bits = {
        part: sum(KV_TYPE_BITS[getattr(own.get(i, tier), f"type_{part}")] for i in range(2)) / 2 for part in ("k", "v")
    }
    assert max(bits, key=bits.__getitem__) == more, tier


def test_nothing_fits():
    with pytest.raises(OutOfMemoryError, match="use n_ctx 256 or less"):
        choose(info(), 700)
    with pytest.raises(OutOfMemoryError, match=r"the smallest takes .* MiB: give it more"):
        choose(info(), 1)


def test_without_a_calibration_types_stay_uniform():
    assert str(choose(None, 4400).kv.tiers[-1]) == "q4_ve"


def test_without_tiers_only_f16_is_left():
    assert choose(None, 16000, tiers=False).kv.name == "f16"
    with pytest.raises(OutOfMemoryError, match="use n_ctx 768 or less"):
        choose(None, 15000, tiers=False)
