"""Cache operations on a tiered cache: what may be done to a plain cache may be done to it, at any length."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from native_api import Context, NativeError, kl_divergence, parse_tiers, status_of
from pykvq._cffi import lib
from reference_model import ReferenceModel
from saved_tiers import read_saved_tiers
from tier_context import (
    ALL_F16,
    FIRST_ROWS,
    LOGITS_LIMIT,
    MANY_STREAMS,
    N_CTX,
    N_SINK,
    N_UBATCH,
    TIERS,
    TINY,
    WINDOW,
    assert_unchanged,
    error_of,
    read,
)
from tiny_models import random_tokens

pytest_plugins = ["tier_fixtures"]


# --- removing ---


@pytest.mark.parametrize(("p0", "p1"), [(0, 2), (0, 50), (100, 300), (310, 380), (350, 400), (399, 400), (1, 399)])
def test_remove_and_use_the_cells_again(new_context, reference, p0, p1):
    context = new_context()
    context.prefill(random_tokens(400))
    before = read(context)
    context.remove(0, p0, p1 if p1 < 400 else -1)
    after = read(context)
    kept = [pos for pos in range(400) if not p0 <= pos < p1]
    assert sorted(after.cells) == kept
    assert sum(context.used()) == len(kept)
    assert_unchanged(before, after, kept)

    next_pos = max(kept) + 1
    assert context.pos_range() == (min(kept), max(kept))
    assert error_of(reference, context, 7, next_pos) < LOGITS_LIMIT
    new = random_tokens(N_CTX - len(kept) - 1, seed=2)
    context.prefill(new, next_pos + 1)
    assert sum(context.used()) == N_CTX
    assert all(tier.n_used <= tier.n_capacity for tier in context.tiers())
    filled = read(context)
    assert sorted(filled.cells) == sorted(kept + list(range(next_pos, next_pos + 1 + len(new))))
    newest = sorted(filled.cells)[-WINDOW:]
    assert {filled.tier_of(pos) for pos in newest} == {0}
    assert error_of(reference, context, 9, next_pos + 1 + len(new)) < LOGITS_LIMIT


def test_remove_all_is_like_new(new_context):
    context = new_context()
    tokens = random_tokens(300)
    first = context.prefill(tokens)
    for clear in (context.clear, lambda: context.remove(0), lambda: context.remove(-1)):
        clear()
        assert context.used() == [0, 0, 0]
        assert context.pos_range() == (-1, -1)
        # the cells are taken from another place, so that blocks of 32 are cut elsewhere
        np.testing.assert_allclose(context.prefill(tokens), first, atol=LOGITS_LIMIT * first.std())


# --- several sequences ---


def test_a_copied_sequence_shares_its_cells(new_context, reference):
    context = new_context(n_seq_max=2)
    context.prefill(random_tokens(300))
    used = context.used()
    before = read(context, 0)
    context.copy(0, 1)
    assert context.used() == used
    assert_unchanged(before, read(context, 1), range(300))

    for seq in (0, 1):
        assert error_of(reference, context, 20 + seq, 300, seq) < LOGITS_LIMIT
    context.remove(1, 100, -1)
    assert sorted(read(context, 1).cells) == list(range(100))
    assert error_of(reference, context, 22, 100, 1) < LOGITS_LIMIT
    context.keep(1)
    assert context.pos_range(0) == (-1, -1)
    assert sum(context.used()) == 101
    assert error_of(reference, context, 23, 101, 1) < LOGITS_LIMIT


def test_a_shared_cell_is_as_old_as_for_its_youngest_sequence(new_context, reference):
    context = new_context(n_seq_max=2)
    context.prefill(random_tokens(200))
    context.copy(0, 1)
    context.prefill(random_tokens(200, seed=3), 200, 0)
    state = read(context, 1)
    assert {state.tier_of(pos) for pos in range(200 - WINDOW, 200)} == {0}
    assert read(context, 0).positions(2), "nothing was moved to the last tier"
    for seq, pos in ((1, 200), (0, 400)):
        assert error_of(reference, context, 5, pos, seq) < LOGITS_LIMIT


def test_sequences_in_one_cache(new_context, reference):
    """Three sequences of unlike length, their tokens mixed within batches."""
    n = 180
    context = new_context(n_seq_max=3)
    tokens = [random_tokens(n, seed) for seed in range(3)]
    order = [(seq, pos) for pos in range(n) for seq in range(3) if pos < n - 20 * seq]
    for start in range(0, len(order), N_UBATCH):
        batch = order[start : start + N_UBATCH]
        context.decode([tokens[s][p] for s, p in batch], [p for _, p in batch], [s for s, _ in batch])
    assert all(context.used())
    for seq in range(3):
        length = n - 20 * seq
        state = read(context, seq)
        assert sorted(state.cells) == list(range(length))
        assert {state.tier_of(pos) for pos in [*range(N_SINK), *range(length - WINDOW, length)]} == {0}
        assert error_of(reference, context, 5, length, seq) < LOGITS_LIMIT


def test_streams_are_like_contexts_of_their_own(new_context):
    """Bit for bit, when the sequences take turns in batches of the same shape."""
    context = new_context(n_ctx=3 * N_CTX, n_seq_max=3, kv_unified=False)
    alone = [new_context() for _ in range(3)]
    lengths = [400, 100, 250]
    tokens = [random_tokens(n, seed) for seed, n in enumerate(lengths)]
    for start in range(0, max(lengths), N_UBATCH):
        for seq in range(3):
            batch = tokens[seq][start : start + N_UBATCH]
            if batch:
                found = context.decode(batch, start, seq, want="all")
                assert np.array_equal(found, alone[seq].decode(batch, start, want="all")), (seq, start)
    for seq in range(3):
        (expected,) = read_saved_tiers(alone[seq].save(), TINY, TIERS)
        assert_unchanged(expected, read(context, seq, stream=seq), range(lengths[seq]))


def test_an_idle_stream_is_left_alone(new_context):
    context = new_context(n_ctx=2 * N_CTX, n_seq_max=2, kv_unified=False)
    context.prefill(random_tokens(FIRST_ROWS, seed=1), 0, 1)
    before = read(context, 1, stream=1)
    context.prefill(random_tokens(300), 0, 0)
    assert_unchanged(before, read(context, 1, stream=1), range(FIRST_ROWS))


def test_streams_in_one_batch(new_context, reference):
    context = new_context(n_ctx=2 * N_CTX, n_seq_max=2, kv_unified=False)
    tokens = [random_tokens(300, seed) for seed in range(2)]
    for pos in range(0, 300, 6):
        batch = [(seq, p) for seq in range(2) for p in range(pos, pos + 6)]
        context.decode([tokens[s][p] for s, p in batch], [p for _, p in batch], [s for s, _ in batch])
    for seq in range(2):
        assert error_of(reference, context, 5, 300, seq, stream=seq) < LOGITS_LIMIT


def test_copy_between_streams(new_context, reference):
    context = new_context(n_ctx=2 * N_CTX, n_seq_max=2, kv_unified=False)
    context.prefill(random_tokens(300), 0, 0)
    context.prefill(random_tokens(40, seed=5), 0, 1)
    before = read(context, 0)
    context.copy(0, 1)
    logits = [context.decode([9], 300, seq)[-1] for seq in range(2)]
    assert np.array_equal(*logits)
    assert_unchanged(before, read(context, 1, stream=1), range(300 - FIRST_ROWS))
    assert error_of(reference, context, 5, 301, 1, stream=1) < LOGITS_LIMIT


def test_a_copy_between_streams_is_saved(new_context):
    """llama.cpp copies at the next decode; a state saved before it must hold the copy all the same."""
    context = new_context(n_ctx=2 * N_CTX, n_seq_max=2, kv_unified=False)
    context.prefill(random_tokens(300), 0, 0)
    before = read(context, 0)
    context.copy(0, 1)
    assert_unchanged(before, read(context, 1, stream=1), range(300))


# --- sizes ---


def test_n_ctx_below_the_window(new_context):
    """One tier is left, and it is an ordinary F16 cache."""
    context, plain = new_context("f16:1024+q4_ve", n_ctx=256), new_context(None, n_ctx=256, flash_attn=1)
    assert [tier.type_k for tier in context.tiers()] == ["f16"]
    tokens = random_tokens(256)
    assert np.array_equal(context.prefill(tokens), plain.prefill(tokens))
    for full in (context, plain):
        with pytest.raises(NativeError, match="NO_SPACE"):
            full.decode([5], 256)


@pytest.mark.parametrize("n_ubatch", [1, 16, 100])
@pytest.mark.parametrize("n_sink", [0, 4, 100])
@pytest.mark.parametrize("tiers", [TIERS, "f16:0+q4_ve", "f16:0+q8_0:1+q2_t", "f16:200+q8_0:1000+q2_t"])
def test_prompts_about_n_ctx(new_context, reference, tiers, n_sink, n_ubatch):
    for n in (N_CTX - 1, N_CTX, N_CTX + 1):
        context = new_context(tiers, n_sink=n_sink, n_ubatch=n_ubatch)
        tokens = random_tokens(n)
        if n > N_CTX and status_of(partial(context.prefill, tokens)) == "NO_SPACE":
            continue
        context.clear()
        logits = context.prefill(tokens)
        assert sum(context.used()) == n
        state = read(context, tiers=tiers)
        expected, _ = reference.forward(tokens[-1], n - 1, state.rows(range(n)))
        assert np.abs(logits - expected).max() / expected.std() < LOGITS_LIMIT


@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_a_full_cache_says_so_and_lives_on(new_context, reference, n_seq_max):
    context = new_context(n_seq_max=n_seq_max)
    for seq in range(1, n_seq_max):
        context.prefill(random_tokens(50, seq), 0, seq)
    pos = 0
    while status_of(partial(context.decode, [5], pos)) == "OK":
        pos += 1
    with pytest.raises(NativeError, match="NO_SPACE: the KV cache has no room for 1 more tokens"):
        context.decode([5], pos)
    assert pos >= N_CTX - 50 * (n_seq_max - 1)
    assert context.pos_range() == (0, pos - 1)
    before = read(context)
    for _ in range(3):
        with pytest.raises(NativeError, match="NO_SPACE"):
            context.decode(random_tokens(N_UBATCH), pos)
    assert sorted(read(context).cells) == list(range(pos))
    assert context.used() == [tier.n_used for tier in context.tiers()]
    context.remove(0, 10, 15)
    kept = [p for p in range(pos) if not 10 <= p < 15]
    assert_unchanged(before, read(context), kept)
    # what was asked for in vain is forgotten, also after a part of it was done
    with pytest.raises(NativeError, match="NO_SPACE"):
        context.decode(random_tokens(N_UBATCH), pos)
    context.remove(0, 15, 60)
    context.remove(0, pos - 3, pos)
    n_requantized = [tier.n_requantized for tier in context.tiers()]
    assert error_of(reference, context, 6, pos - 3) < LOGITS_LIMIT
    assert [tier.n_requantized for tier in context.tiers()] == n_requantized
    context.prefill(random_tokens(40), pos - 2)


def test_a_prompt_longer_than_every_tier_but_the_last(new_context, reference):
    tiers = "f16:8+q8_0:16+q4_ve:16+q2_t"
    context = new_context(tiers, n_ubatch=64, n_batch=64)
    tokens = random_tokens(450)
    logits = context.prefill(tokens)
    state = read(context, tiers=tiers)
    assert len(state.positions(3)) > 250
    expected, _ = reference.forward(tokens[-1], 449, state.rows(range(450)))
    assert np.abs(logits - expected).max() / expected.std() < LOGITS_LIMIT


@pytest.mark.parametrize(
    ("tiers", "params"), [("f16:0+q8_0:1+q2_t", {"n_ctx": N_CTX, "n_ubatch": 64}), (TIERS, MANY_STREAMS)]
)
def test_many_moves_at_once(deep, tiers, params):
    tiny, model = deep
    context = Context(model, tiers, **params)
    n_seq = int(context.info.n_seq_max)
    n_new = int(context.info.n_batch) // n_seq
    tokens = random_tokens(192)
    for start in range(0, len(tokens), n_new):
        batch = [(seq, pos) for seq in range(n_seq) for pos in range(start, start + n_new)]
        logits = context.decode([tokens[p] for _, p in batch], [p for _, p in batch], [s for s, _ in batch], "all")
        for seq in range(1, n_seq):
            assert kl_divergence(logits[n_new - 1], logits[n_new * seq + n_new - 1]) < 1e-6
    state = read_saved_tiers(context.save(), tiny, tiers)[0]
    expected, _ = ReferenceModel(tiny).forward(tokens[-1], len(tokens) - 1, state.rows(range(len(tokens))))
    # 30 layers round more often than 2
    assert np.abs(logits[-1] - expected).max() / expected.std() < 10 * LOGITS_LIMIT


def test_a_decode_stopped_while_tokens_move(new_context, reference):
    """What was in the cache is still there, and it can go on."""
    context = new_context()
    context.prefill(random_tokens(FIRST_ROWS))
    before = read(context)
    lib.pykvq_context_abort(context.handle)
    with pytest.raises(NativeError, match="ABORTED"):
        context.decode([5], FIRST_ROWS)
    assert sorted(read(context).cells) == list(range(FIRST_ROWS))
    assert error_of(reference, context, 5, FIRST_ROWS) < LOGITS_LIMIT
    assert_unchanged(before, read(context), [*range(N_SINK), *range(FIRST_ROWS - WINDOW, FIRST_ROWS)])


def test_capacities_are_what_was_asked_for(new_context):
    context = new_context("f16:32+q8_0/q4_ve:64+q2_t", n_sink=5, n_ubatch=20, n_batch=50)
    assert [tier.n_capacity for tier in context.tiers()] == [5 + 32 + 20 + 64, 64, N_CTX - 5 - 32 - 64]
    context.prefill(random_tokens(500))
    assert context.tiers()[1].n_requantized - context.tiers()[2].n_requantized == context.used()[1]


# --- many contexts ---

PRESETS = (
    None,
    TIERS,
    ALL_F16,
    "f16:32+q8_0",
    "f16:64+q4_ve",
    "f16:0+q2_t",
    "f16:16+q8_0:32+q4_ve:64+q2_t",
    "f16:32+q8_0/q4_ve",
    "bf16:32+q4_ve/q2_t:64+q2_t/q4_ve",
    "f16:600+q4_ve",
)


def test_ten_contexts_in_turns(new_context):
    """Each gives bit for bit what it gives alone."""
    tokens = random_tokens(400)

    def run(contexts):
        found = [[] for _ in contexts]
        for start in range(0, len(tokens), N_UBATCH):
            for i, context in enumerate(contexts):
                found[i].append(context.decode(tokens[start : start + N_UBATCH], start)[-1])
        return found

    alone = [run([new_context(tiers)])[0] for tiers in PRESETS]
    together = run([new_context(tiers) for tiers in PRESETS])
    for i, tiers in enumerate(PRESETS):
        assert np.array_equal(alone[i], together[i]), tiers
    # the first and the last preset are both one F16 tier; contexts that mix their caches up must not go unseen
    assert len({np.array(logits).tobytes() for logits in alone}) == len(PRESETS) - 1


# --- parameters ---


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ("f32:64+f16", "first tier"),
        ("q8_0:64+q4_ve", "first tier"),
        ("f16:64+f32", "f32"),
        ("f16:64", "n_tiers is 1"),
        ("f16:1+q8_0:1+q8_0:1+q8_0:1+q8_0", "n_tiers is 5"),
        ("f16:64+q8_0+q4_ve", "n_tokens of a tier is 0"),
        ("f16:64+q9_9", "q9_9"),
        ("f16:64+q4_ve@k99=q8_0", "layer of a tier is 99"),
        ("f16:64+q4_ve@k1=f32", "f32"),
        ("f16@k1=q8_0:64+q4_ve", "n_layers of a tier is 1"),
    ],
)
def test_bad_tiers_are_refused(new_context, tiers, message):
    with pytest.raises(NativeError, match=f"INVALID_ARGUMENT: .*{message}"):
        new_context(tiers)


def test_flash_attention_cannot_be_turned_off(new_context):
    with pytest.raises(NativeError, match="INVALID_ARGUMENT: KV tiers need flash attention"):
        new_context(TIERS, flash_attn=0)
    assert new_context(TIERS).info.flash_attn


def test_tier_sizes_add_up(new_context):
    for tiers in PRESETS[1:]:
        context = new_context(tiers)
        assert sum(tier.n_bytes for tier in context.tiers()) == pytest.approx(context.info.kv_bytes, rel=1e-3)
        assert len(context.tiers()) <= len(parse_tiers(tiers))
