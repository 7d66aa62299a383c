"""Shifting positions in a tiered cache: the keys of every tier are turned, and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from native_api import Context, Model, NativeError, kl_divergence
from reference_model import ReferenceModel
from saved_tiers import read_saved_tiers
from tier_context import (
    ALL_F16,
    LOGITS_LIMIT,
    MANY_STREAMS,
    N_CTX,
    N_SINK,
    N_UBATCH,
    TIERS,
    TINY,
    assert_unchanged,
    error_of,
    read,
)
from tiny_models import TinyModel, random_tokens

pytest_plugins = ["tier_fixtures"]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("tiny", "rotations"),
    [
        (TINY, None),
        (TINY, (64, 64)),
        (TinyModel(head_dim_k=80), None),
        (TinyModel(head_dim_k=112), None),
        (TinyModel(arch="plamo3", head_dim_k=128, head_dim_v=64), (128, 64)),
    ],
)
def test_shift_turns_the_keys_of_every_tier(tmp_path, monkeypatch, tiny, rotations):
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "0" if rotations else "1")
    reference = ReferenceModel(tiny)
    context = Context(Model(tiny.write(tmp_path / "tiny.gguf")), TIERS, n_ctx=N_CTX, n_ubatch=N_UBATCH)
    context.prefill(random_tokens(400))
    (before,) = read_saved_tiers(context.save(), tiny, TIERS)
    context.remove(0, N_SINK, 204)
    context.shift(0, 204, -1, -200)
    assert context.pos_range() == (0, 199)
    logits = context.decode([5], 200)[-1]
    (after,) = read_saved_tiers(context.save(), tiny, TIERS)
    assert sorted(after.cells) == list(range(201))
    expected, _ = reference.forward(5, 200, after.rows(range(201), rotations or (1, 1)))
    assert np.abs(logits - expected).max() / expected.std() < LOGITS_LIMIT

    # requantizing what was turned costs the codec's error once more: F16, 4.25 bits, 2.25 bits
    for tier, limit in enumerate((1e-3, 0.12, 0.45)):
        old = [pos for pos in before.positions(tier) if pos >= 204 and after.tier_of(pos - 200) == tier]
        assert old, f"nothing to check in tier {tier}"
        rows_before = before.rows(old, rotations or (1, 1))
        rows_after = after.rows([pos - 200 for pos in old], rotations or (1, 1))
        for (k, v), (found_k, found_v) in zip(rows_before, rows_after, strict=True):
            assert np.array_equal(found_v, v)
            for delta, is_right in ((-200, True), (-150, False)):
                turned = reference.rope(k.reshape(-1, tiny.head_dim_k), delta).reshape(k.shape)
                assert (relative_error(found_k, turned) < limit) == is_right
    for pos in range(N_SINK):
        assert after.bytes_at(pos, 0)[1] == before.bytes_at(pos, 0)[1]
        assert relative_error(after.rows([pos])[0][0], before.rows([pos])[0][0]) < 1e-3


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("tiers", "limit"), [(ALL_F16, 1e-5), ("f16:32+q8_0", 2e-4), ("f16:32+q4_ve", 2e-2)])
def test_shift_costs_what_the_types_cost(new_context, monkeypatch, tiers, limit, rotated):
    """KL divergence from an untiered F16 cache that was shifted in the same way, over the next 50 tokens."""
    if rotated:
        monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "0")
    divergences = []
    contexts = [new_context(None, flash_attn=1), new_context(tiers)]
    for context in contexts:
        context.prefill(random_tokens(400))
        context.remove(0, N_SINK, 204)
        context.shift(0, 204, -1, -200)
    for i, token in enumerate(random_tokens(50, seed=8)):
        divergences.append(kl_divergence(*(context.decode([token], 200 + i)[-1] for context in contexts)))
    print(f"{tiers}: mean {np.mean(divergences):.2e}, largest {np.max(divergences):.2e}")
    assert np.mean(divergences) < limit


def test_shift_of_one_sequence_and_upwards(new_context, reference):
    context = new_context(n_seq_max=2)
    context.prefill(random_tokens(200), 0, 0)
    context.prefill(random_tokens(150, seed=1), 0, 1)
    before = read(context, 0)
    context.shift(1, 100, -1, 30)
    assert context.pos_range(1) == (0, 179)
    assert error_of(reference, context, 5, 180, 1) < LOGITS_LIMIT
    # requantized with the shift's graph, by an angle of 0
    for layer in range(TINY.n_layer):
        for found, expected in zip(
            read(context, 0).rows(range(200))[layer], before.rows(range(200))[layer], strict=True
        ):
            assert relative_error(found, expected) < 0.01
    assert error_of(reference, context, 5, 200, 0) < LOGITS_LIMIT


def test_shift_of_one_stream(new_context, reference):
    context = new_context(n_ctx=2 * N_CTX, n_seq_max=2, kv_unified=False)
    for seq in range(2):
        context.prefill(random_tokens(400, seed=seq), 0, seq)
    before = read(context, 0)
    context.remove(1, N_SINK, 204)
    context.shift(1, 204, -1, -200)
    # what the keys are, not only that attention reads them: a shift of the wrong stream would agree with itself
    expected = new_context()
    expected.prefill(random_tokens(400, seed=1))
    expected.remove(0, N_SINK, 204)
    expected.shift(0, 204, -1, -200)
    assert_unchanged(read(expected), read(context, 1, stream=1), range(200))
    for layer in range(TINY.n_layer):
        for found, rows in zip(read(context, 0).rows(range(400))[layer], before.rows(range(400))[layer], strict=True):
            assert relative_error(found, rows) < 0.01
    assert error_of(reference, context, 5, 200, 1, stream=1) < LOGITS_LIMIT


def test_context_shift_of_a_full_cache(new_context):
    """NO_SPACE, remove, shift, go on, many times over: as an untiered F16 cache does, and exactly so with F16 tiers."""
    contexts = [new_context(None, flash_attn=1, n_ctx=256), new_context(ALL_F16, n_ctx=256)]
    tokens = random_tokens(700)
    # brought to the same length, so that both shift at once
    pos = 0
    for i, token in enumerate(tokens):
        if pos == 256:
            with pytest.raises(NativeError, match="NO_SPACE"):
                contexts[0].decode([token], pos)
            with pytest.raises(NativeError, match="NO_SPACE"):
                contexts[1].prefill([token] * 400, pos)
            contexts[1].remove(0, 256, -1)
            for context in contexts:
                context.remove(0, N_SINK, N_SINK + 120)
                context.shift(0, N_SINK + 120, -1, -120)
            pos -= 120
        logits = [context.decode([token], pos)[-1] for context in contexts]
        assert kl_divergence(*logits) < 1e-3, i
        pos += 1


def test_a_shift_is_saved(new_context):
    """llama.cpp turns keys at the next decode; a state saved before it must hold them turned all the same."""
    for tiers in (TIERS, None):
        context, other = new_context(tiers), new_context(tiers)
        context.prefill(random_tokens(300))
        context.remove(0, N_SINK, 104)
        context.shift(0, 104, -1, -100)
        other.load(context.save())
        expected = context.decode([5], 200)[-1]
        assert kl_divergence(expected, other.decode([5], 200)[-1]) < 1e-6, tiers


def test_shift_of_many_streams_of_a_deep_model(deep):
    tiny, model = deep
    context = Context(model, TIERS, **MANY_STREAMS)
    for seq in range(8):
        context.prefill(random_tokens(250), 0, seq)
        context.remove(seq, N_SINK, 104)
        context.shift(seq, 104, -1, -100)
    for seq in range(8):
        logits = context.decode([5], 150, seq)[-1]
        state = read_saved_tiers(context.save(), tiny, TIERS, seq)[seq]
        expected, _ = ReferenceModel(tiny).forward(5, 150, state.rows(range(151)))
        assert np.abs(logits - expected).max() / expected.std() < 10 * LOGITS_LIMIT
