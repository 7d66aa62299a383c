import pytest

from pykvq import InvalidArgumentError, KVConfig, Tier, kv_presets
from pykvq.kv_config import LayerTypes, parse_kv_config, parse_kv_configs, split_kv_formats


@pytest.mark.parametrize("name", ["f16", "bf16", "q8_0", "q4_0", "q4_ve", "q2_t"])
def test_a_preset_of_a_type_has_it_for_k_and_v(name):
    assert parse_kv_config(name) == KVConfig(name, (Tier(name, name),))


def test_the_tiered_presets():
    presets = kv_presets()
    assert presets["ultra4"].tiers == (Tier("f16", "f16", 128), Tier("q4_ve", "q4_ve", dealt=True))
    assert str(presets["ultra2"]) == "f16:128+q4_ve@auto:16384+q2_t@auto"


def test_k_and_v_apart():
    assert parse_kv_config("Q8_0/q4_ve").tiers == (Tier("q8_0", "q4_ve"),)


def test_tiers_spelled_out():
    config = parse_kv_config("f16:128+q8_0:2048+q8_0/q4_ve:16384+q2_t", n_sink=9)
    assert config.tiers == (
        Tier("f16", "f16", 128),
        Tier("q8_0", "q8_0", 2048),
        Tier("q8_0", "q4_ve", 16384),
        Tier("q2_t", "q2_t"),
    )
    assert config.n_sink == 9
    assert str(config) == "f16:128+q8_0:2048+q8_0/q4_ve:16384+q2_t"
    assert parse_kv_config(config) is config


def test_layers_of_other_types():
    config = parse_kv_config("f16:128+q4_ve@k7=q8_0,v0=q2_t,v7=q8_0:1024+q2_t@auto")
    layers = (LayerTypes(0, "q4_ve", "q2_t"), LayerTypes(7, "q8_0", "q8_0"))
    assert config.tiers[1] == Tier("q4_ve", "q4_ve", 1024, layers)
    assert config.tiers[2] == Tier("q2_t", "q2_t", dealt=True)
    assert str(config) == "f16:128+q4_ve@k7=q8_0,v0=q2_t,v7=q8_0:1024+q2_t@auto"
    spectral = config.with_spectral_keys()
    assert spectral.tiers[1].layers == (LayerTypes(0, "q4_ves", "q2_t"), layers[1])
    assert str(spectral) == "f16:128+q4_ves/q4_ve@k7=q8_0,v0=q2_t,v7=q8_0:1024+q2_ts/q2_t@auto"


def test_types_by_argument_make_a_cache_without_tiers():
    assert parse_kv_config("ultra4", type_k="F16", type_v="q4_ve") == KVConfig("f16/q4_ve", (Tier("f16", "q4_ve"),))
    assert parse_kv_config("ultra4", type_v="q8_0").tiers == (Tier("q8_0", "q8_0"),)
    with pytest.raises(InvalidArgumentError, match=r"'q9' is not a KV type: use one of f32, f16"):
        parse_kv_config("ultra4", type_v="q9")


@pytest.mark.parametrize("name", ["ultra5", "", "q8_0/", "/q8_0", "q8_0/ultra4", "f16/q8_0/q8_0", "f16:1+ultra4", "+"])
def test_an_unknown_name_lists_the_valid_ones_in_one_line(name):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_kv_config(name)
    text = str(caught.value)
    assert "\n" not in text
    assert repr(name) in text
    for preset in kv_presets():
        assert preset in text


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ("f16+q4_ve", "'f16' of 'f16\\+q4_ve' needs a number of tokens"),
        ("f16:128+q4_ve:0+q2_t", "'q4_ve:0' .* needs a number of tokens"),
        ("f16:128+q4_ve:64", "the last tier takes all tokens that are left, so leave :64 away"),
        ("q4_ve:100", "leave :100 away, or add a tier"),
        ("f16:128+q2_t:64+q4_ve", "'q4_ve' .* is larger than 'q2_t:64' before it"),
        ("q8_0:128+q4_ve", "'q8_0:128' .* holds the newest tokens: it must be of f16 or bf16"),
        ("f16/q8_0:128+q4_ve", "holds the newest tokens"),
        ("f32:128+q4_ve", "it must be of f16 or bf16"),
        ("f16:1+f16:2+f16:3+f16:4+f16", "has 5 tiers: give 1 to 4"),
        ("f16:-1+q4_ve", "'-1' is not a number of tokens"),
        ("f16:99999999999+q4_ve", "is not a number of tokens from 0 to"),
        ("f16:x+q4_ve", "'x' is not a number of tokens"),
        ("f16@k1=q8_0:128+q4_ve", "the first tier is of the same types in all layers"),
        ("q4_ve@auto", "the first tier is of the same types in all layers, write f16:128\\+q4_ve@auto"),
        ("q4_ve@k18=q8_0", "the first tier is of the same types in all layers, write f16:128\\+q4_ve@k18=q8_0"),
        ("f16:128+q4_ve@k18=q8_0,k18=q2_t", "has two types for k18: give one"),
        ("f16:128+q4_ve@k18=q8_0,k018=q2_t", "'k018=q2_t' is no type of a layer"),
        ("f16:128+q4_ve:64+q2_t@k1=q8_0", "k1 of .* is q8_0 in tier 'q2_t@k1=q8_0', larger than q4_ve in 'q4_ve:64'"),
        ("f16:128+q4_ve@v1=q2_t:64+q4_ve", "v1 of .* is q4_ve in tier 'q4_ve', larger than q2_t in 'q4_ve@v1=q2_t:64'"),
        ("f16:128+q4_ve@", "'' is no type of a layer: write k7=q8_0"),
        ("f16:128+q4_ve@q7=q8_0", "'q7=q8_0' is no type of a layer"),
        ("f16:128+q4_ve@k7=q9", "'k7=q9' is no type of a layer"),
        ("f16:128+q4_ve@k-1=q8_0", "'k-1=q8_0' is no type of a layer"),
    ],
)
def test_tiers_that_make_no_sense(tiers, message):
    with pytest.raises(InvalidArgumentError, match=message):
        parse_kv_config(tiers)


def test_a_config_made_by_hand_is_checked_too():
    with pytest.raises(InvalidArgumentError, match="is larger than"):
        parse_kv_config(KVConfig("mine", (Tier("f16", "f16", 1), Tier("q2_t", "q2_t", 1), Tier("q8_0", "q8_0"))))
    with pytest.raises(InvalidArgumentError, match="has 0 tiers"):
        parse_kv_config(KVConfig("mine", ()))
    window = Tier("f16", "f16", 128)
    k3 = LayerTypes(3, "q8_0", "q4_ve")
    with pytest.raises(InvalidArgumentError, match="has types of layers and dealt=True"):
        parse_kv_config(KVConfig("mine", (window, Tier("q4_ve", "q4_ve", layers=(k3,), dealt=True))))
    with pytest.raises(InvalidArgumentError, match="has layer 3 more than once"):
        parse_kv_config(KVConfig("mine", (window, Tier("q4_ve", "q4_ve", layers=(k3, k3)))))


@pytest.mark.parametrize("name", ["q9", "Q8_0", 8])
def test_a_config_made_by_hand_of_unknown_types(name):
    window, own = Tier("f16", "f16", 128), LayerTypes(3, name, "q4_ve")
    for tiers in [(Tier(name, "f16"),), (window, Tier("q4_ve", name)), (window, Tier("q4_ve", "q4_ve", layers=(own,)))]:
        with pytest.raises(
            InvalidArgumentError, match=f"{name!r} in the KV format .* is not a KV type: use one of f32"
        ):
            parse_kv_config(KVConfig("mine", tiers))


def test_a_list_of_formats():
    assert parse_kv_configs("q8_0") == parse_kv_configs(parse_kv_config("q8_0")) == [parse_kv_config("q8_0")]
    assert [config.name for config in parse_kv_configs(iter(["f16", parse_kv_config("ultra4")]))] == ["f16", "ultra4"]
    with pytest.raises(InvalidArgumentError, match="kv must be a list, got None"):
        parse_kv_configs(None)


def test_types_of_layers_do_not_split_a_list_of_formats():
    formats = ["f16:128+q4_ve@k3=q8_0,v3=q8_0", "q8_0", "f16:128+q4_ve@k3=q8_0,V4=q8_0:64+q2_t"]
    assert split_kv_formats(",".join(formats)) == formats
    assert split_kv_formats(" q8_0 , ,f16:128+q4_ve@k3=q8_0, v3=q8_0,") == ["q8_0", formats[0]]
    assert split_kv_formats("") == []
    assert split_kv_formats("k3=q8_0") == ["k3=q8_0"]


def test_what_uses_a_calibration():
    assert parse_kv_config("f16:128+q8_0@auto").uses_calibration
    assert parse_kv_config("f16:128+q8_0@k1=q4_ve").uses_calibration
    assert not parse_kv_config("f16:128+q8_0").uses_calibration


def test_a_name_must_be_text():
    with pytest.raises(InvalidArgumentError, match="must be a name such as 'ultra4', got 8"):
        parse_kv_config(8)


def test_a_negative_number_of_sinks():
    with pytest.raises(InvalidArgumentError, match="n_sink must be between 0 and"):
        parse_kv_config("ultra4", n_sink=-1)


def test_what_needs_flash_attention():
    assert not parse_kv_config("q8_0/f16").needs_flash_attention
    assert parse_kv_config("f16/q8_0").needs_flash_attention
    assert parse_kv_config("f16:64+f16").needs_flash_attention


def test_micro_batch_keeps_the_room_for_new_tokens_small():
    ultra4 = parse_kv_config("ultra4")
    assert [ultra4.micro_batch(n) for n in (1, 512, 4096, 8192, 10000, 131072)] == [64, 64, 128, 256, 256, 512]
    assert parse_kv_config("q8_0").micro_batch(512) == 512


def test_bits_per_element_include_scales():
    assert parse_kv_config("q8_0/q4_ve").tiers[0].bits_per_element() == pytest.approx((8.5 + 4.25) / 2)
