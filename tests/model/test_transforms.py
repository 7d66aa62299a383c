"""The transforms of a calibration in the graph: with F16 caches they change nothing but rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from native_api import Context, Model, NativeError
from tiny_models import TinyModel, random_tokens

from pykvq.calibration import calibrate
from pykvq.quality import fidelity
from pykvq.sample_text import sample_text

MODELS = {
    "64": TinyModel(head_dim_k=64),
    "80": TinyModel(head_dim_k=80),
    "112, 3 heads a KV head": TinyModel(head_dim_k=112, n_head=6, n_head_kv=2),
    "128, 4 heads a KV head": TinyModel(head_dim_k=128, n_head=4, n_head_kv=1),
    "256": TinyModel(head_dim_k=256, n_head=3, n_head_kv=3),
    "128/64": TinyModel(arch="plamo3", head_dim_k=128, head_dim_v=64),
    "96/80": TinyModel(arch="plamo3", head_dim_k=96, head_dim_v=80),
    "soft cap, window": TinyModel(arch="gemma2", window=64, n_layer=3),
    "sink logits, window": TinyModel(arch="mimo2", window=64, n_layer=3, head_dim_k=64, head_dim_v=128),
}
ALL_F16 = "f16:48+f16"
SIZES = {"n_ctx": 512, "n_ubatch": 16}
# Largest difference of a logit over their standard deviation: keys and values are rounded to F16 in another basis;
# measured at most 4e-3.
LIMIT = 1e-2


@pytest.fixture(scope="module", params=list(MODELS))
def calibrated(request, tmp_path_factory) -> tuple[TinyModel, Path, Path]:
    """A tiny model, its file and its calibration."""
    folder = tmp_path_factory.mktemp("calibrated")
    tiny = MODELS[request.param]
    path = tiny.write(folder / "tiny.gguf")
    return tiny, path, calibrate(path, n_tokens=512, n_positions=512, n_threads=1).path


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / expected.std())


def logits_of(context: Context) -> np.ndarray:
    return context.prefill(random_tokens(300))


def test_logits_of_f16_tiers_stay(calibrated):
    _, path, calibration = calibrated
    model = Model(path)
    plain = logits_of(Context(model, ALL_F16, **SIZES))
    transformed = logits_of(Context(model, ALL_F16, calibration=str(calibration), **SIZES))
    assert 0 < difference(transformed, plain) < LIMIT


def test_context_shift_undoes_the_transform(calibrated):
    tiny, path, calibration = calibrated
    if tiny.window:
        pytest.skip("a sliding-window cache cannot shift")
    model = Model(path)
    contexts = [Context(model, ALL_F16, **SIZES, **extra) for extra in ({}, {"calibration": str(calibration)})]
    for context in contexts:
        context.prefill(random_tokens(300))
        context.remove(0, 4, 104)
        context.shift(0, 104, -1, -100)
    plain, transformed = (context.decode([7], 200)[-1] for context in contexts)
    assert 0 < difference(transformed, plain) < LIMIT


def test_context_shift_of_one_quantized_tensor(tmp_path):
    tiny = TinyModel(head_dim_k=128, n_head=4, n_head_kv=2)
    path = tiny.write(tmp_path / "tiny.gguf")
    calibration = str(calibrate(path, n_tokens=512, n_positions=512, spectral_keys=False, n_threads=1).path)
    model = Model(path)
    types = {"type_k": "q8_0", "type_v": "f16"}
    expected = shifted_logits(Context(model, ALL_F16, **SIZES))
    found = shifted_logits(Context(model, calibration=calibration, **types, **SIZES))
    assert difference(found, expected) < 0.05


def shifted_logits(context: Context) -> np.ndarray:
    context.prefill(random_tokens(300))
    context.remove(0, 4, 104)
    context.shift(0, 104, -1, -100)
    return context.decode([7], 200)[-1]


def test_spectral_keys_lose_less_than_uniform_ones(smollm2_path, tmp_path):
    """On real keys: those of random weights have no coordinates that queries look at more than at others."""
    text, rows = sample_text()[200_000:206_000], {}
    for spectral in (False, True):
        output = tmp_path / f"{spectral}.gguf"
        calibrate(smollm2_path, n_tokens=1024, spectral_keys=spectral, output=output)
        report = fidelity(smollm2_path, ["f16:32+q4_ve/f16"], text=text, n_ctx=640, n_chunks=2, calibrate=output)
        rows[spectral] = report["presets"][0]
    assert "q4_ves" in rows[True]["tiers"]
    assert rows[True]["kld_mean"] < rows[False]["kld_mean"] - 2 * rows[False]["kld_sem"]


def test_a_state_of_another_calibration_is_refused(tmp_path):
    path = TinyModel().write(tmp_path / "tiny.gguf")
    model = Model(path)
    files = [
        str(calibrate(path, n_tokens=n, n_positions=512, output=tmp_path / f"{n}.gguf", n_threads=1).path)
        for n in (256, 512)
    ]
    first, second = (Context(model, ALL_F16, calibration=file, **SIZES) for file in files)
    state = first.save()
    first.prefill(random_tokens(20))
    second.prefill(random_tokens(20))
    before = second.save()
    with pytest.raises(NativeError, match="calibration"):
        second.load(state)
    assert second.save() == before
    first.load(state)


@pytest.mark.parametrize(
    ("tiny", "message"),
    [(TinyModel(head_dim_k=128), "another shape"), (TinyModel(n_layer=3), "missing or has another shape")],
)
def test_native_side_refuses_a_calibration_of_other_shapes(tmp_path, tiny, message):
    calibration = calibrate(TinyModel().write(tmp_path / "a.gguf"), n_tokens=256, n_positions=512, n_threads=1).path
    model = Model(tiny.write(tmp_path / "b.gguf"))
    with pytest.raises(NativeError, match=message) as raised:
        Context(model, ALL_F16, calibration=str(calibration), **SIZES)
    assert raised.value.status == "FORMAT"


def test_native_side_refuses_values_that_are_not_finite(tmp_path):
    path = TinyModel().write(tmp_path / "tiny.gguf")
    calibration = calibrate(path, n_tokens=256, n_positions=512, n_threads=1).path
    data = bytearray(calibration.read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    calibration.write_bytes(data)
    with pytest.raises(NativeError, match="not finite; make a new one with pykvq-calibrate"):
        Context(Model(path), ALL_F16, calibration=str(calibration), **SIZES)
