"""What Llama keeps in the KV cache between calls, and its saved state, on the fake library."""

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
