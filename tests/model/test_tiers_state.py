"""Saved states of a tiered cache: they carry on exactly, and what does not fit leaves the live cache alone."""

from __future__ import annotations

import hashlib
import struct
from functools import partial

import numpy as np
import pytest
from native_api import Context, NativeError, parse_tiers, row_bytes, status_of
from saved_tiers import HEADER_BYTES
from tier_context import LOGITS_LIMIT, N_CTX, N_SINK, TIERS, TINY, WINDOW, assert_unchanged, error_of, read
from tiny_models import random_tokens

pytest_plugins = ["tier_fixtures"]

# where the fields of the header begin, see native/api/pykvq-state.cpp
FIELDS = {"magic": 0, "version": 8, "whole": 12, "layout": 16, "model": 208, "payload_bytes": 272, "checksum": 280}


def reseal(payload: bytes, state: bytes) -> bytes:
    """The payload behind the header of a state, with size and checksum set right."""
    header = state[: FIELDS["payload_bytes"]] + struct.pack("<Q", len(payload))
    of_payload = hashlib.sha256(payload).hexdigest().encode()
    checksum = hashlib.sha256(header + bytes(64) + of_payload).hexdigest().encode()
    return header + checksum + payload


def next_logits(context, pos, seq=0) -> np.ndarray:
    """Logits of the next five tokens; the cache is as before afterwards."""
    return np.array([context.decode([token], pos + i, seq)[-1] for i, token in enumerate(random_tokens(5, seed=9))])


@pytest.fixture
def live(new_context):
    """A context with tokens in every tier, and one that holds the same."""
    pair = [new_context() for _ in range(2)]
    for context in pair:
        context.prefill(random_tokens(300))
    assert all(pair[0].used())
    return pair


def assert_same_logits(live, pos=300) -> None:
    assert np.array_equal(*(next_logits(context, pos) for context in live))


def assert_restored(live, pos=300) -> None:
    """The same rows, in cells that may lie elsewhere: sums are taken in another order."""
    assert_unchanged(read(live[1]), read(live[0]), range(pos))
    found, expected = (next_logits(context, pos) for context in live)
    np.testing.assert_allclose(found, expected, atol=3e-5 * expected.std())


@pytest.mark.parametrize("n", [1, 30, 300, N_CTX - 5])
def test_round_trip(new_context, n):
    """Into the context it came from and into others, bit for bit."""
    context = new_context()
    context.prefill(random_tokens(n))
    state = context.save()
    before = read(context)
    used = context.used()
    expected = next_logits(context, n)
    busy = new_context(n_threads=2)
    busy.prefill(random_tokens(400, seed=5))
    for other in (context, new_context(), busy):
        other.load(state)
        assert other.used() == used
        assert other.pos_range() == (0, n - 1)
        assert_unchanged(before, read(other), range(n))
        np.testing.assert_allclose(next_logits(other, n), expected, atol=LOGITS_LIMIT * expected.std())
    # a state that was loaded is saved the same
    busy.load(state)
    assert busy.save() == new_loaded(new_context, state).save()


def new_loaded(new_context, state, **params):
    context = new_context(**params)
    context.load(state)
    return context


def test_contexts_with_one_state_agree_bit_for_bit(new_context, live):
    state = live[0].save()
    contexts = [new_loaded(new_context, state) for _ in range(3)]
    logits = [next_logits(context, 300) for context in contexts]
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])


def test_one_sequence(new_context, reference):
    """From one sequence to another, beside a third, whose old tokens may have to make room."""
    context = new_context(n_seq_max=3, n_ctx=2 * N_CTX)
    context.prefill(random_tokens(300), 0, 0)
    context.prefill(random_tokens(200, seed=1), 0, 1)
    before = [read(context, seq) for seq in range(2)]
    state = context.save(0)
    context.load(state, 2)
    assert_unchanged(before[0], read(context, 2), range(300))
    assert_unchanged(before[1], read(context, 1), [*range(N_SINK), *range(200 - WINDOW, 200)])
    assert context.pos_range(2) == (0, 299)
    assert error_of(reference, context, 5, 300, 2) < LOGITS_LIMIT
    assert error_of(reference, context, 5, 200, 1) < LOGITS_LIMIT

    # over a sequence that is there already, and into another context
    context.load(state, 1)
    assert_unchanged(before[0], read(context, 1), range(300))
    other = new_context(n_seq_max=3, n_ctx=2 * N_CTX)
    other.load(state, 0)
    assert_unchanged(before[0], read(other), range(300))
    assert error_of(reference, other, 5, 300) < LOGITS_LIMIT


def test_one_sequence_between_streams(new_context, reference):
    context = new_context(n_seq_max=2, n_ctx=2 * N_CTX, kv_unified=False)
    context.prefill(random_tokens(300), 0, 0)
    context.prefill(random_tokens(200, seed=1), 0, 1)
    before = [read(context, seq, stream=seq) for seq in range(2)]
    context.load(context.save(0), 1)
    assert_unchanged(before[0], read(context, 1, stream=1), range(300))
    assert_unchanged(before[0], read(context, 0, stream=0), range(300))
    assert error_of(reference, context, 5, 300, 1, stream=1) < LOGITS_LIMIT


def test_whole_context_of_several_sequences(new_context, reference):
    for params in ({"n_seq_max": 2}, {"n_seq_max": 2, "n_ctx": 2 * N_CTX, "kv_unified": False}):
        context = new_context(**params)
        context.prefill(random_tokens(200), 0, 0)
        context.prefill(random_tokens(100, seed=1), 0, 1)
        other = new_loaded(new_context, context.save(), **params)
        assert other.used() == context.used()
        for seq, n in enumerate((200, 100)):
            stream = 0 if params.get("kv_unified", True) else seq
            assert_unchanged(read(context, seq, stream=stream), read(other, seq, stream=stream), range(n))
            assert error_of(reference, other, 5, n, seq, stream=stream) < LOGITS_LIMIT


def test_a_loaded_stream_is_not_overwritten_by_an_earlier_copy(new_context):
    """llama.cpp copies streams at the next decode only."""
    params = {"n_seq_max": 2, "n_ctx": 2 * N_CTX, "kv_unified": False}
    context = new_context(**params)
    context.prefill(random_tokens(300), 0, 1)
    state = context.save(1)
    before = read(context, 1, stream=1)
    context.prefill(random_tokens(250, seed=4), 0, 0)
    context.copy(0, 1)
    context.load(state, 1)
    context.decode([5], 250, 0)
    assert_unchanged(before, read(context, 1, stream=1), range(300))


def test_size_is_that_of_the_tokens(new_context):
    """Whatever n_ctx is: each token takes its position, its sequence and its rows."""
    for n_ctx in (N_CTX, 16 * N_CTX):
        context = new_context(n_ctx=n_ctx)
        empty = context.state_size()
        assert empty < 1000
        for n in range(16, N_CTX, 16):
            context.decode(random_tokens(16, seed=n), n - 16)
            of_tokens = sum(used * size for used, size in zip(context.used(), token_bytes(), strict=True))
            assert context.state_size() == len(context.save()) == empty + of_tokens


def token_bytes() -> list[int]:
    """In each tier of TIERS."""
    n_values = TINY.n_layer * 2 * TINY.n_head_kv * TINY.head_dim_k
    return [12 + row_bytes(spec.type_k, n_values) for spec in parse_tiers(TIERS)]


# --- refusals ---


def refuse(context, data, match, seq=-1) -> None:
    with pytest.raises(NativeError, match=f"FORMAT: cannot load the state: .*{match}.*nothing was changed"):
        context.load(data, seq)


def test_truncated(live):
    state = live[0].save()
    rng = np.random.default_rng(0)
    cuts = {0, 1, 7, 8, *FIELDS.values(), HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, len(state) - 1}
    for n in sorted(cuts | {int(n) for n in rng.integers(HEADER_BYTES, len(state), 200)}):
        refuse(live[0], state[:n], "no state saved by pykvq|should hold")
    refuse(live[0], state + b"\0", "should hold")
    assert_same_logits(live)


def test_flipped_bits(live):
    state = live[0].save()
    rng = np.random.default_rng(1)
    places = [*range(HEADER_BYTES), *(int(i) for i in rng.integers(HEADER_BYTES, len(state), 300))]
    for i in places:
        damaged = bytearray(state)
        damaged[i] ^= 1 << int(rng.integers(8))
        refuse(live[0], bytes(damaged), "")
    assert_same_logits(live)


@pytest.mark.parametrize("data", [b"", b"\0", b"GGUF" * 500, b"PYKVQST\n", b"PYKVQST\n" + b"\xff" * 4096])
def test_foreign_bytes(live, data):
    refuse(live[0], data, "")
    refuse(live[0], data, "", seq=0)
    assert_same_logits(live)


@pytest.mark.parametrize(
    ("tiers", "params"),
    [
        ("bf16:32+q4_ve:64+q2_t", {}),  # rows of the same size
        ("f16:32+q4_ve:65+q2_t", {}),
        ("f16:31+q4_ve:64+q2_t", {}),
        ("f16:32+q2_t:64+q4_ve", {}),
        ("f16:32+q4_ve/q2_t:64+q2_t/q4_ve", {}),
        ("f16:32+q4_ve", {}),
        ("f16:32+q4_ve@k1=q8_0:64+q2_t", {}),
        ("f16:32+q4_ve:64+q4_ve:64+q2_t", {}),
        (TIERS, {"n_sink": 5}),
        (TIERS, {"n_sink": 0}),
        (None, {}),
    ],
)
def test_a_state_of_other_tiers(new_context, live, tiers, params):
    other = new_context(tiers, **params)
    other.prefill(random_tokens(150, seed=3))
    refuse(live[0], other.save(), "KV cache of")
    assert_same_logits(live)


def test_a_state_of_other_types_in_the_last_of_many_layers(deep):
    """In words the types of so many layers do not fit the header."""
    tiny, model = deep
    own = ",".join(f"k{layer}=q8_0" for layer in range(tiny.n_layer))
    all_but_one = own.rpartition(",")[0]
    first, second = (Context(model, f"f16:32+q4_ve@{keys}", n_ctx=N_CTX, n_ubatch=16) for keys in (all_but_one, own))
    state = first.save()
    second.prefill(random_tokens(150))
    before = second.save()
    refuse(second, state, "KV cache of")
    assert second.save() == before
    first.load(state)


def test_a_state_of_one_sequence_is_no_whole_one(live):
    refuse(live[0], live[0].save(0), "holds one sequence")
    refuse(live[0], live[0].save(), "holds a whole context", seq=0)
    assert_same_logits(live)


def test_a_state_that_does_not_fit(new_context, live):
    big = new_context(n_ctx=4 * N_CTX)
    big.prefill(random_tokens(3 * N_CTX))
    for seq in (-1, 0):
        refuse(live[0], big.save(seq), "room", seq)
    assert live[0].pos_range() == (0, 299)
    assert_restored(live)


def test_a_sequence_that_does_not_fit_ages_no_other(new_context):
    context = new_context(n_seq_max=2)
    context.prefill(random_tokens(200), 0, 0)
    before = read(context, 0)
    big = new_context(n_seq_max=2, n_ctx=4 * N_CTX)
    big.prefill(random_tokens(3 * N_CTX))
    refuse(context, big.save(0), "", seq=1)
    assert sorted(read(context, 0).cells) == list(range(200))
    assert_unchanged(before, read(context, 0), range(200))


def test_saving_leaves_the_logits_of_the_last_decode(live):
    expected = live[0].decode([5], 300)[-1]
    live[0].save()
    live[0].save(0)
    assert np.array_equal(live[0].logits(), expected)


def test_a_state_of_more_sequences(new_context, live):
    many = new_context(n_seq_max=4)
    many.prefill(random_tokens(40), 0, 3)
    refuse(live[0], many.save(), "sequence|damaged")
    streams = new_context(n_seq_max=2, n_ctx=2 * N_CTX, kv_unified=False)
    streams.prefill(random_tokens(40), 0, 1)
    refuse(live[0], streams.save(), "streams")
    assert_restored(live)


def test_damage_behind_a_right_checksum(live):
    """A state that was written wrong, not damaged later: refused or taken, and never harm to the live cache."""
    state = live[0].save()
    payload = state[HEADER_BYTES:]
    rng = np.random.default_rng(2)
    n_refused = 0
    for n in [0, 1, 3, 4, 8, *(int(n) for n in rng.integers(0, len(payload), 100))]:
        refuse(live[0], reseal(payload[:n], state), "")
    # architecture, numbers of streams, tiers and layers, types of three tiers
    n_fixed = 4 + len(TINY.arch) + 3 * 4 + 3 * 2 * 4
    for i in range(n_fixed):
        damaged = bytearray(payload)
        damaged[i] ^= 1 << int(rng.integers(8))
        refuse(live[0], reseal(bytes(damaged), state), "")
    # the first tier's cells, then anywhere
    places = [*range(n_fixed, 600), *(int(i) for i in rng.integers(600, len(payload), 200))]
    for i in places:
        damaged = bytearray(payload)
        damaged[i] ^= 1 << int(rng.integers(8))
        status = status_of(partial(live[0].load, reseal(bytes(damaged), state)))
        if status == "OK":
            live[0].load(state)
            continue
        assert status == "FORMAT"
        n_refused += 1
        assert live[0].pos_range() == (0, 299)
        assert live[0].used() == live[1].used()
    assert n_refused > 50
    assert_restored(live)


def test_refusals_of_one_sequence_leave_the_others_alone(new_context):
    pair = [new_context(n_seq_max=2) for _ in range(2)]
    for context in pair:
        context.prefill(random_tokens(200), 0, 0)
        context.prefill(random_tokens(120, seed=1), 0, 1)
    state = pair[0].save(0)
    payload = state[HEADER_BYTES:]
    for n in np.random.default_rng(3).integers(8, len(payload), 100):
        refuse(pair[0], reseal(payload[: int(n)], state), "", seq=1)
    assert [pair[0].pos_range(seq) for seq in range(2)] == [(0, 199), (0, 119)]
    for seq, pos in ((0, 200), (1, 120)):
        expected, found = (next_logits(context, pos, seq) for context in reversed(pair))
        np.testing.assert_allclose(found, expected, atol=LOGITS_LIMIT * expected.std())
