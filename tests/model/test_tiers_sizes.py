"""Bytes of a tiered cache, foretold and real, and models of which only some layers have tiers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from native_api import Context, Model, NativeError, kl_divergence, parse_tiers, row_bytes
from saved_tiers import padded_dim
from tiny_models import TinyModel, random_tokens

TIERS = "f16:32+q4_ve:64+q2_t"
MODELS = {
    "llama": TinyModel(),
    "llama 80": TinyModel(head_dim_k=80, n_layer=3, n_head=3, n_head_kv=3),
    "llama 128 one KV head": TinyModel(head_dim_k=128, n_head=8, n_head_kv=1),
    "plamo3 128/64": TinyModel(arch="plamo3", head_dim_k=128, head_dim_v=64),
    "gemma2": TinyModel(arch="gemma2", window=48, n_layer=4),
    "mimo2 96/64": TinyModel(arch="mimo2", window=48, head_dim_k=96, head_dim_v=64, n_layer=3),
}
WINDOWED = [name for name, tiny in MODELS.items() if tiny.window]
# n_ctx is a multiple of 256, to which llama.cpp rounds it up
SETTINGS = [
    (TIERS, {"n_ctx": 1024, "n_ubatch": 16}),
    ("f16:128+q4_ve", {"n_ctx": 8192, "n_ubatch": 64}),
    ("f16:128+q4_ve@k0=q8_0,v1=q2_t", {"n_ctx": 2048, "n_ubatch": 64}),
    ("f16:128+q8_0:512+q4_ve/q2_t:1024+q2_t", {"n_ctx": 4096, "n_ubatch": 32, "n_sink": 0}),
    (TIERS, {"n_ctx": 2048, "n_ubatch": 16, "n_seq_max": 2}),
    (TIERS, {"n_ctx": 2048, "n_ubatch": 16, "n_seq_max": 2, "kv_unified": False}),
    (TIERS, {"n_ctx": 1024, "n_ubatch": 16, "swa_full": True}),
    ("f16:5000+q2_t", {"n_ctx": 1024, "n_ubatch": 16}),
    (None, {"n_ctx": 1024}),
]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory, request):
    """The file of a tiny model, of SmolLM2, or of a model that an environment variable names."""
    folder = tmp_path_factory.mktemp("tiny")

    def path(name: str) -> Path:
        if name == "smollm2":
            return request.getfixturevalue("smollm2_path")
        if name not in MODELS:
            variable = f"PYKVQ_TEST_MODEL_{name.upper()}"
            if variable not in os.environ:
                pytest.skip(f"{variable} names no file")
            return Path(os.environ[variable])
        file = folder / f"{name.replace('/', '-')}.gguf"
        return file if file.exists() else MODELS[name].write(file)

    return path


@pytest.mark.parametrize(("tiers", "params"), SETTINGS)
@pytest.mark.parametrize("name", [*MODELS, "smollm2", "qwen", "gemma3"])
def test_prediction(path_of, name, tiers, params):
    """Within 1 % of what is allocated, from the metadata alone."""
    metadata = Model(path_of(name), metadata_only=True)
    context = Context(Model(path_of(name)), tiers, **params)
    n_bytes, n_bytes_f16 = metadata.predict(tiers, **params)
    assert n_bytes == pytest.approx(context.info.kv_bytes, rel=0.01)
    assert n_bytes_f16 == pytest.approx(context.info.kv_bytes_f16, rel=0.01)
    plain = Context(context.model, None, **params)
    assert n_bytes_f16 == pytest.approx(plain.info.kv_bytes, rel=0.01)
    with pytest.raises(NativeError, match="INVALID_ARGUMENT"):
        Context(metadata, tiers, **params)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_each_tier(path_of, name):
    """Only the layers without a window are in the tiers; the others keep an F16 cache of their own."""
    tiny = MODELS[name]
    context = Context(Model(path_of(name)), TIERS, n_ctx=1024, n_ubatch=16)
    n_layers = sum(not tiny.is_windowed(il) for il in range(tiny.n_layer))
    total = 0
    for tier, spec in zip(context.tiers(), parse_tiers(TIERS), strict=True):
        row = sum(
            row_bytes(kv_type, tiny.n_head_kv * padded_dim(kv_type, dim))
            for kv_type, dim in ((spec.type_k, tiny.head_dim_k), (spec.type_v, tiny.dim_v))
        )
        assert tier.n_bytes == n_layers * tier.n_capacity * row
        total += tier.n_bytes
    n_windowed = tiny.n_layer - n_layers
    window_cells = 256  # window and micro-batch, rounded up
    windowed_bytes = n_windowed * window_cells * tiny.n_head_kv * (tiny.head_dim_k + tiny.dim_v) * 2
    assert context.info.kv_bytes == pytest.approx(total + windowed_bytes, rel=1e-3)


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("kv_unified", [True, False])
def test_sliding_window_models(path_of, name, kv_unified):
    """F16 tiers give what an untiered cache gives, also with soft-capped scores and sink logits."""
    model = Model(path_of(name))
    params = {"n_ctx": 1024, "n_ubatch": 16, "n_seq_max": 2, "kv_unified": kv_unified}
    plain = Context(model, None, flash_attn=1, n_batch=16, **params)
    tiered = {tiers: Context(model, tiers, **params) for tiers in ("f16:32+f16:64+f16", "f16:32+q8_0", TIERS)}
    tokens = random_tokens(400)
    divergences = {tiers: [] for tiers in tiered}
    for start in range(0, len(tokens), 16):
        expected = plain.decode(tokens[start : start + 16], start)[-1]
        for tiers, context in tiered.items():
            divergences[tiers].append(kl_divergence(expected, context.decode(tokens[start : start + 16], start)[-1]))
    mean = {tiers: float(np.mean(values)) for tiers, values in divergences.items()}
    print(name, mean)
    exact, fine, coarse = mean.values()
    assert exact < 1e-5
    assert fine < 1e-3
    assert coarse < 0.3
    for context in tiered.values():
        assert all(context.used())


@pytest.mark.parametrize("name", WINDOWED)
def test_operations_of_sliding_window_models(path_of, name):
    model = Model(path_of(name))
    params = {"n_ctx": 1024, "n_ubatch": 16}
    context, other = Context(model, TIERS, **params), Context(model, TIERS, **params)
    tokens = random_tokens(400)
    context.prefill(tokens)
    other.load(context.save())
    assert other.used() == context.used()
    # the layers with a window go through llama.cpp's attention, which sums in F16 in the order of the cells
    assert kl_divergence(context.decode([5], 400)[-1], other.decode([5], 400)[-1]) < 1e-4
    context.remove(0, 380, -1)
    assert sum(context.used()) == 380
    context.clear()
    assert context.used() == [0, 0, 0]
    fresh = Context(model, TIERS, **params)
    assert kl_divergence(fresh.prefill(tokens), context.prefill(tokens)) < 1e-4


@pytest.mark.parametrize("name", WINDOWED)
def test_a_full_size_window_cache_shifts(path_of, name):
    """Where llama.cpp can shift without tiers it can with them."""
    model = Model(path_of(name))
    params = {"n_ctx": 1024, "n_ubatch": 16, "swa_full": True}
    contexts = [Context(model, None, flash_attn=1, n_batch=16, **params), Context(model, "f16:32+f16", **params)]
    assert [bool(context.info.can_shift) for context in contexts] == [True, True]
    for context in contexts:
        context.prefill(random_tokens(400))
        context.remove(0, 4, 204)
        context.shift(0, 204, -1, -200)
    assert kl_divergence(*(context.decode([5], 200)[-1] for context in contexts)) < 1e-5


@pytest.mark.slow
def test_tensors_of_more_than_2_gib(tmp_path):
    """The last of eight streams lies behind byte 2^31 of the K tensor, and gives what it gives in a small cache."""
    tiny = TinyModel(
        arch="plamo3", head_dim_k=256, head_dim_v=64, n_head=64, n_head_kv=64, n_layer=1, n_embd=32, n_ff=32
    )
    model = Model(tiny.write(tmp_path / "wide.gguf"))
    tokens = random_tokens(300)
    row = row_bytes("q4_ve", tiny.n_head_kv * tiny.head_dim_k)
    n_streams, last = 8, 7
    logits = []
    for n_ctx_seq in (1024, 37 * 1024):
        params = {"n_ctx": n_streams * n_ctx_seq, "n_seq_max": n_streams, "kv_unified": False}
        context = Context(model, "f16:32+q4_ve", n_ubatch=16, n_batch=16, **params)
        logits.append([context.decode(tokens[i : i + 16], i, last, want="all") for i in range(0, len(tokens), 16)])
        assert all(context.used())
        n_rows = context.tiers()[1].n_capacity // n_streams
    assert last * n_rows * row > 2**31
    for small, large in zip(*logits, strict=True):
        assert np.array_equal(small, large)
