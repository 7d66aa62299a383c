import pytest

from pykvq import InvalidArgumentError, KVConfig, kv_presets
from pykvq.kv_config import parse_kv_config


@pytest.mark.parametrize("name", ["f16", "bf16", "q8_0", "q4_0", "q4_ve", "q2_t"])
def test_a_preset_of_a_type_has_it_for_k_and_v(name):
    assert parse_kv_config(name) == KVConfig(name, name, name)


def test_ultra4_is_q4_ve_in_this_version():
    assert kv_presets()["ultra4"] == KVConfig("ultra4", "q4_ve", "q4_ve")


def test_k_and_v_apart():
    assert parse_kv_config("Q8_0/q4_ve") == KVConfig("q8_0/q4_ve", "q8_0", "q4_ve")
    assert parse_kv_config("iq4_nl") == KVConfig("iq4_nl", "iq4_nl", "iq4_nl")


def test_types_replace_those_of_the_name():
    assert parse_kv_config("ultra4", type_k="F16") == KVConfig("f16/q4_ve", "f16", "q4_ve")
    with pytest.raises(InvalidArgumentError, match=r"type_v='q9' is not a KV type: use one of f32, f16"):
        parse_kv_config("ultra4", type_v="q9")


@pytest.mark.parametrize("name", ["ultra5", "ultra2", "", "q8_0/", "/q8_0", "q8_0/ultra4", "f16/q8_0/q8_0"])
def test_an_unknown_name_lists_the_valid_ones_in_one_line(name):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_kv_config(name)
    text = str(caught.value)
    assert "\n" not in text
    assert repr(name) in text
    for preset in kv_presets():
        assert preset in text


@pytest.mark.parametrize("name", ["f16:128+q4_ve", "f16+q4_ve", "q4_ve:100"])
def test_a_tier_list_is_refused_by_that_name(name):
    with pytest.raises(InvalidArgumentError, match="tier list, which this version does not support: use one of f16"):
        parse_kv_config(name)


def test_a_name_must_be_text():
    with pytest.raises(InvalidArgumentError, match="must be a name such as 'ultra4', got 8"):
        parse_kv_config(8)


def test_only_a_quantized_v_needs_flash_attention():
    assert not parse_kv_config("q8_0/f16").needs_flash_attention
    assert parse_kv_config("f16/q8_0").needs_flash_attention


def test_bits_per_element_include_scales(lib):
    assert parse_kv_config("f16").bits_per_element() == 16
    assert parse_kv_config("q8_0/q4_ve").bits_per_element() == pytest.approx((8.5 + 4.25) / 2)
