"""The memory that is predicted is the memory that is taken, and what does not fit is refused before it is loaded."""

import functools
import json
import subprocess
import sys

import pytest
from tiny_models import TinyModel

from pykvq import Llama, OutOfMemoryError, predict, predict_memory
from pykvq.calibration import calibrate
from pykvq.cli import run

MIB = 2**20


# A process of its own, since memory that was freed is not always given back. The compute buffers are touched as far as
# tokens are in the cache: filling 32,768 takes a quarter of an hour, so the prediction for fewer stands in for them.
MEASURE = """
import json, sys
import psutil
from pykvq import Llama, kv_presets, predict_memory
path, kv, n_ctx, n_tokens, calibration = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
calibrated = calibration != "never"
need = predict_memory(path, n_ctx, kv, calibrated=calibrated)
n_ubatch = kv_presets()[kv].micro_batch(n_ctx)
used = predict_memory(path, n_tokens, kv, n_ubatch=n_ubatch, calibrated=calibrated).compute_bytes
with Llama(path, n_ctx=n_ctx, kv_quant=kv, calibrate=calibration) as llm:
    llm.eval([100 + i % 1000 for i in range(n_tokens)])
    print(json.dumps([need.total_bytes - need.compute_bytes + used, psutil.Process().memory_info().rss]))
"""


def measure(path, kv, n_ctx, n_tokens, calibration="never"):
    """Bytes (predicted, measured) after n_tokens tokens."""
    arguments = [str(path), kv, str(n_ctx), str(n_tokens), str(calibration)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, encoding="utf-8", timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def calibrations(tmp_path_factory):
    """Makes the calibration of a model once; returns its path."""

    @functools.cache
    def make(path):
        return calibrate(path, output=tmp_path_factory.mktemp("calibration") / "model.kvq.gguf").path

    return make


@pytest.mark.parametrize(("kv", "n_ctx"), [("f16", 512), ("ultra4", 4096), ("q8_0", 2048), ("f16", 8192)])
def test_the_prediction_is_what_is_measured(smollm2_path, kv, n_ctx):
    predicted, measured = measure(smollm2_path, kv, n_ctx, min(n_ctx - 1, 600))
    assert predicted == pytest.approx(measured, rel=0.03)


def test_a_calibration_is_counted(smollm2_path, calibrations):
    calibration = calibrations(smollm2_path)
    predicted, measured = measure(smollm2_path, "ultra4", 2048, 600, calibration)
    assert predicted == pytest.approx(measured, rel=0.03)
    without, counted = (predict_memory(smollm2_path, 2048, calibrated=calibrated) for calibrated in (False, True))
    with Llama(smollm2_path, n_ctx=2048, calibrate=calibration) as llm:
        assert counted.weights_bytes - without.weights_bytes == llm.kv_info()["calibration"]["n_bytes"]
        assert counted.kv_bytes == llm.kv_info()["kv_bytes"] > without.kv_bytes


@pytest.mark.slow
@pytest.mark.parametrize("n_ctx", [512, 2048, 8192, 32768])
@pytest.mark.parametrize("kv", ["f16", "ultra4", "ultra2", "ultra4 calibrated", "ultra2 calibrated"])
@pytest.mark.parametrize("model", ["smollm2", "qwen"])
def test_the_prediction_over_models_contexts_and_presets(request, calibrations, model, kv, n_ctx):
    path = request.getfixturevalue(f"{model}_path")
    preset, _, calibrated = kv.partition(" ")
    calibration = calibrations(path) if calibrated else "never"
    predicted, measured = measure(path, preset, n_ctx, min(n_ctx - 1, 600), calibration)
    error = predicted / measured - 1
    print(f"{model} {kv} {n_ctx}: predicted {predicted / MIB:.0f} MiB, measured {measured / MIB:.0f} MiB, {error:+.1%}")
    assert abs(error) < 0.05


def with_free_memory(monkeypatch, n_bytes):
    monkeypatch.setattr(predict, "available_memory", lambda: n_bytes)


def test_what_does_not_fit_is_refused_with_numbers(smollm2_path, monkeypatch):
    with_free_memory(monkeypatch, 300 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        Llama(smollm2_path, n_ctx=8192, kv_quant="f16")
    text = str(caught.value)
    assert "needs 393 MiB (weights 187 MiB, KV cache 180 MiB, compute buffers 25 MiB) and 300 MiB are free" in text
    assert "the KV format q8_0 does" not in text
    assert "ultra4 fits n_ctx 8192" in text
    n_ctx = int(text.split("n_ctx ")[2].split()[0])
    with Llama(smollm2_path, n_ctx=n_ctx, kv_quant="f16") as llm:
        assert llm.n_ctx() == n_ctx
    with pytest.raises(OutOfMemoryError):
        Llama(smollm2_path, n_ctx=int(1.1 * n_ctx), kv_quant="f16")


def test_a_model_that_does_not_fit_at_all(smollm2_path, monkeypatch):
    with_free_memory(monkeypatch, 100 * MIB)
    with pytest.raises(OutOfMemoryError, match="no context fits: free memory, or take a smaller model"):
        Llama(smollm2_path, n_ctx=512)


def test_a_refusal_passes_over_formats_that_the_heads_do_not_fit(tmp_path, monkeypatch):
    path = TinyModel(n_head=2, n_head_kv=1, head_dim_k=80).write(tmp_path / "tiny.gguf")
    with_free_memory(monkeypatch, 1000)
    with pytest.raises(OutOfMemoryError, match="no context fits"):
        Llama(path, n_ctx=512)


def test_force_loads_it_all_the_same(smollm2_path, monkeypatch, capsys):
    with_free_memory(monkeypatch, 100 * MIB)
    arguments = [str(smollm2_path), "-p", "Hello", "-n", "1", "--ctx", "512"]
    assert run.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--force" in error
    assert run.main([*arguments, "--force"]) == 0


def test_long_contexts_are_extrapolated_from_shorter_ones(smollm2_path, monkeypatch):
    exact = {kv: predict_memory(smollm2_path, 65536, kv) for kv in ("f16", "ultra2")}
    monkeypatch.setattr(predict, "_MEASURED_TOKENS", 32768)
    for kv, need in exact.items():
        assert predict_memory(smollm2_path, 65536, kv).new_bytes == pytest.approx(need.new_bytes, rel=0.001)
    assert predict_memory(smollm2_path, 2**30, "f16").kv_bytes == 2**30 * 23_040


def test_the_parts_add_up(smollm2_path):
    need = predict_memory(smollm2_path, 4096, "f16")
    assert need.kv_bytes == 4096 * 23_040
    assert need.new_bytes == need.weights_bytes + need.kv_bytes + need.compute_bytes
    assert need.total_bytes == need.process_bytes + need.new_bytes
    assert need.device_bytes == 0
    assert 90 * MIB < need.mapped_bytes < 100 * MIB
    assert predict_memory(smollm2_path, 4096, "f16", use_mmap=False).mapped_bytes == 0
