"""Types dealt to the layers by what they cost, and what is predicted of a format."""

from __future__ import annotations

from pathlib import Path

import pytest

from pykvq.calibration import CalibrationInfo
from pykvq.calibration.file import LayerSensitivity
from pykvq.kv_config import KV_TYPE_BITS, KVConfig, parse_kv_config
from pykvq.kv_layers import predicted_kld, usual_deal, with_calibration

# one layer's keys and one layer's values cost most of all, one layer next to nothing
COSTS = [(0.01, 0.01), (1.0, 0.01), (0.01, 3.0), (1e-9, 1e-9), *[(0.01, 0.01)] * 12]


def info(costs=COSTS, *, spectral: bool = True, n_k: int = 64, n_v: int = 64) -> CalibrationInfo:
    layers = tuple(LayerSensitivity(i, k, v, n_k, n_v) for i, (k, v) in enumerate(costs))
    return CalibrationInfo(Path("x"), "", "", spectral, 1024, 2048, "", "", layers)


def bits(kv: KVConfig, calibration: CalibrationInfo) -> float:
    """Bits an element of the last tier."""
    tier = kv.tiers[-1]
    own = {layer.layer: layer for layer in tier.layers}
    total = 0.0
    for layer in calibration.sensitivity:
        types = own.get(layer.layer, tier)
        total += layer.n_k * KV_TYPE_BITS[types.type_k] + layer.n_v * KV_TYPE_BITS[types.type_v]
    return total / sum(layer.n_k + layer.n_v for layer in calibration.sensitivity)


def dealt(name: str, calibration: CalibrationInfo | None) -> KVConfig:
    return with_calibration(parse_kv_config(name), calibration)


def test_four_bits_go_from_the_layer_that_costs_nothing_to_those_that_cost_most():
    kv = dealt("ultra4", info())
    assert str(kv) == "f16:128+q4_ves/q4_ve@k1=q8_0,k3=q2_ts,v3=q2_t"
    assert bits(kv, info()) <= 4.375


def test_two_bits_are_raised_where_it_pays():
    kv = dealt("f16:128+q2_t@auto", info())
    types = kv.tiers[1].types_of_layers()
    assert KV_TYPE_BITS[types["k1"]] > 4 < KV_TYPE_BITS[types["v2"]]
    assert 2.4 < bits(kv, info()) <= 2.5625
    uniform = dealt("f16:128+q2_t", info())
    assert predicted_kld(kv, info()) < predicted_kld(uniform, info()) / 5


@pytest.mark.parametrize(("n_k", "n_v"), [(64, 256), (512, 64)])
@pytest.mark.parametrize("name", ["ultra4", "f16:128+q2_t@auto", "f16:128+q8_0/q4_ve@auto"])
def test_bits_are_counted_by_the_size_of_keys_and_values(n_k, n_v, name):
    calibration = info(n_k=n_k, n_v=n_v)
    kv = dealt(name, calibration)
    nominal = sum(KV_TYPE_BITS[getattr(kv.tiers[1], f"type_{part}")] for part in "kv") / 2
    assert bits(kv, calibration) <= nominal + (0.1875 if nominal < 3 else 0)


def test_an_older_tier_never_has_the_larger_type():
    kv = dealt("ultra2", info())
    for i in range(len(COSTS)):
        for part in "kv":
            younger, older = (
                tier.types_of_layers().get(f"{part}{i}", tier.type_k if part == "k" else tier.type_v)
                for tier in kv.tiers[1:]
            )
            assert KV_TYPE_BITS[younger] >= KV_TYPE_BITS[older]


@pytest.mark.parametrize("costs", [COSTS, [(1.0, 1e-9), *[(1e-9, 1e-9)] * 15]])
@pytest.mark.parametrize("spectral", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "ultra2",
        "f16:128+q8_0@auto:64+q4_ve",
        "f16:128+q8_0@auto:64+q4_ve@auto:64+q4_ve/q2_t@v3=q4_ve",
        "f16:128+q5_0@auto:64+q5_0",
        "f16:128+q4_ve@auto:64+q2_t@k3=q4_ve",
        "f16:128+q8_0/q4_ve@auto:64+q4_ve",
    ],
)
def test_what_was_dealt_can_be_given_as_a_format(name, spectral, costs):
    calibration = info(costs, spectral=spectral)
    kv = dealt(name, calibration)
    assert parse_kv_config(str(kv)).tiers == kv.tiers


def test_what_a_younger_tier_rounded_gets_no_larger_type():
    one_layer = info([(1.0, 1e-9), *[(1e-9, 1e-9)] * 15])
    assert dealt("f16:128+q2_t@auto", one_layer).tiers[1].types_of_layers()["k0"] == "q8_0"
    assert dealt("f16:128+q4_ve:64+q2_t@auto", one_layer).tiers[2].types_of_layers()["k0"] == "q4_ves"


def test_without_a_calibration_all_layers_are_alike():
    kv = dealt("ultra2", None)
    assert str(kv) == "f16:128+q4_ve:16384+q2_t"
    assert dealt("ultra4", info(spectral=False)).tiers[1].type_k == "q4_ve"
    assert "s" not in {name[-1] for name in dealt("ultra4", info(spectral=False)).tiers[1].types()}


def test_tiers_that_were_spelled_out_stay_as_they_are():
    assert str(dealt("f16:128+q8_0:64+q2_t@k1=q8_0", info())) == "f16:128+q8_0:64+q2_ts/q2_t@k1=q8_0"


def test_what_a_model_without_calibration_may_come_to():
    calibration = info([(1.0, 1.0)] * 30)
    kv = usual_deal(parse_kv_config("ultra2").with_spectral_keys(), 30)
    assert 2.5 < bits(kv, calibration) <= 2.5625
    assert not any(tier.dealt for tier in kv.tiers)


@pytest.mark.parametrize("calibration", [None, info()])
def test_prediction_grows_with_noise(calibration):
    names = ["f16", "f16:128+q8_0", "f16:128+q4_ve", "f16:128+q2_t"]
    costs = [predicted_kld(parse_kv_config(name), calibration) for name in names]
    assert costs == sorted(costs)
    assert costs[0] == 0
