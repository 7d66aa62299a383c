"""What Llama keeps in the KV cache between calls, and its saved state, on the fake library."""

import json
import struct
import zlib

import fake_native
import pytest
from fake_native import BOS, EOS

from pykvq import ContextFullError, InvalidArgumentError, Llama, StateError


def held(lib):
    return lib.contexts[-1].tokens


# --- the KV cache between calls


def test_a_common_prefix_is_not_computed_again(llm, lib, reply):
    reply("bc")
    llm("a" * 20)
    lib.decoded.clear()
    reply("!")
    llm("a" * 15 + "zz")
    assert lib.decoded[0] == (16, [*b"zz"])
    # the same prompt again: only its last token, for the logits
    lib.decoded.clear()
    reply("!")
    llm("a" * 15 + "zz")
    assert lib.decoded[0] == (17, [*b"z"])


def test_a_state_without_parts_is_computed_afresh(llm, lib, reply):
    lib.can_remove = False
    reply("b")
    llm("aaaa")
    reply("b")
    lib.decoded.clear()
    llm("aabb")
    assert lib.decoded[0] == (0, [BOS, *b"aabb"])


def test_a_sliding_window_that_has_moved_on_is_computed_afresh(lib, model_path, reply):
    lib.n_swa = 8
    with Llama(model_path, n_ctx=64) as llm:
        reply("c")
        llm("a" * 30)
        lib.decoded.clear()
        lib.window_start = 22
        reply("c")
        llm("a" * 20 + "b")
        assert lib.decoded[0][0] == 0
        lib.decoded.clear()
        lib.window_start = 5
        reply("c")
        llm("a" * 15 + "b")
        assert lib.decoded[0][0] == 16


def test_an_interrupted_prompt_leaves_the_model_usable(llm, lib, reply):
    def interrupt():
        if len(lib.decoded) == 1:
            lib.before_decode = lambda: None
            raise KeyboardInterrupt

    lib.before_decode = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm("a" * 40)
    assert llm.n_tokens == 16 == len(held(lib))
    reply("b")
    assert llm("a" * 40)["choices"][0]["text"] == "b"


def test_eval_sample_and_reset(llm, lib, reply):
    with pytest.raises(InvalidArgumentError, match="no logits"):
        llm.sample()
    reply("q", end=None)
    llm.eval([*b"abc"])
    assert llm.n_tokens == 3
    assert llm.sample(temp=0) == ord("q")
    with pytest.raises(ContextFullError, match="254 more tokens do not fit: 3 of 256 are in use"):
        llm.eval([1] * 254)
    llm.reset()
    assert llm.n_tokens == 0 == len(held(lib))


def test_generate_yields_tokens_until_the_context_is_full(llm, lib, reply):
    reply("a" * 4, end=EOS)
    tokens = []
    for token in llm.generate([*b"xy"], temp=0):
        tokens.append(token)
        if token == EOS:
            break
    assert tokens == [*b"aaaa", EOS]
    reply("b" * 300)
    assert len(list(llm.generate([*b"x" * 250]))) == 7


def test_generate_can_go_on_after_what_is_held(llm, lib, reply):
    llm.eval([*b"abc"])
    reply("z")
    assert next(llm.generate([*b"de"], reset=False)) == ord("z")
    assert held(lib) == [*b"abcde"]


# --- state


def test_a_state_brings_tokens_and_cache_back(llm, lib, reply):
    reply("bc")
    llm("aaaa")
    state = llm.save_state()
    llm.reset()
    llm.load_state(state)
    assert held(lib)[:5] == [BOS, *b"aaaa"]
    lib.decoded.clear()
    reply("!")
    llm("aaaab")
    assert lib.decoded[0] == (5, [*b"b"])


def test_a_damaged_or_foreign_state_is_refused_and_changes_nothing(llm, lib, reply):
    reply("bc")
    llm("aaaa")
    state = llm.save_state()
    before = list(held(lib))
    flipped = bytearray(state)
    flipped[-1] ^= 1
    for wrong in (b"", b"hello", state[:-1], bytes(flipped), state + b"x"):
        with pytest.raises(StateError):
            llm.load_state(wrong)
    assert held(lib) == before
    lib.pykvq_state_load = lambda *args: lib._fail(fake_native.FORMAT, "the state is of another model")
    with pytest.raises(StateError, match="of another model"):
        llm.load_state(state)
    assert held(lib) == before


def resealed(state, header, native=None):
    """The state with another JSON part, and another native state, behind a right checksum."""
    start = len(b"PYKVQ-STATE-1\n")
    (n_header,) = struct.unpack_from("<I", state, start + 4)
    body = header + (state[start + 8 + n_header :] if native is None else native)
    return state[:start] + struct.pack("<II", zlib.crc32(body), len(header)) + body


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"{}",
        b"[" * 100_000,
        b'{"tokens": 3}',
        b'{"tokens": ["a"]}',
        b'{"tokens": [1.5]}',
        b'{"tokens": [true]}',
        b'{"tokens": [-1]}',
        b'{"tokens": [100000]}',
        b'{"tokens": [1, 2, 3]}',  # fewer than the cache holds
    ],
)
def test_a_damaged_token_list_behind_a_right_checksum_changes_nothing(llm, lib, reply, header):
    reply("bc")
    llm("aaaa")
    state = llm.save_state()
    llm.eval([*b"more"])
    before = list(held(lib))
    with pytest.raises(StateError):
        llm.load_state(resealed(state, header))
    assert held(lib) == before
    assert llm._engine.tokens == before


def test_a_header_longer_than_the_state_is_refused(llm):
    llm.eval([*b"abc"])
    header = json.dumps({"tokens": [*b"abc"]}).encode()
    whole = resealed(llm.save_state(), header, native=b"")
    longer = whole[:18] + struct.pack("<I", 2**32 - 1) + whole[22:]
    for state in (whole, longer):
        with pytest.raises(StateError):
            llm.load_state(state)
    assert llm.n_tokens == 3


@pytest.mark.parametrize("view", [memoryview, bytearray, lambda state: memoryview(bytearray(state))])
def test_a_state_may_be_any_buffer(llm, lib, view):
    llm.eval([*b"abc"])
    state = llm.save_state()
    llm.reset()
    llm.load_state(view(state))
    assert held(lib) == [*b"abc"]


@pytest.mark.parametrize("value", ["text", None, 3, [1, 2], memoryview(b"abcdef")[::2]])
def test_a_state_that_is_no_buffer_is_refused(llm, value):
    llm.eval([*b"abc"])
    with pytest.raises(InvalidArgumentError, match="a state is contiguous bytes"):
        llm.load_state(value)
    assert llm.n_tokens == 3
