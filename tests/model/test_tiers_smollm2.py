"""The tiered cache of SmolLM2 through the Python package: long prompts, real memory, chats from the cache."""

import numpy as np
import pytest
from native_api import Context, Model, kl_divergence

from pykvq import Llama, predict_kv

WORDS = "The quick brown fox jumps over the lazy dog near the old stone bridge while the river keeps flowing east. "

# Chats from the cache against from scratch: of a standard deviation of the logits, measured at most 7.3e-3;
# and of the next token in nats, measured at most 6e-4. On float32 weights: Q4_1's int8 activations alone give 0.03.
CHAT_ERROR_LIMIT = 0.015
CHAT_KLD_LIMIT = 0.002


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


@pytest.mark.slow
def test_a_long_prompt_fills_every_tier_and_memory_agrees(smollm2_path):
    with Llama(smollm2_path, kv_quant="f16", n_ctx=256) as small:
        tokens = small.tokenize(WORDS * 400)[:6000]
        small_kv = small.kv_info()["kv_bytes"]
        before = resident_bytes()
    with Llama(smollm2_path, kv_quant="f16:128+q4_ve:1024+q2_t", n_ctx=8192) as llm:
        generated = [token for token, _ in zip(llm.generate(tokens, temp=0.0), range(500), strict=False)]
        info = llm.kv_info()
        grown = resident_bytes() - before
    assert len(generated) == 500
    used = [tier["n_used"] for tier in info["tiers"]]
    assert info["n_tokens"] == sum(used) >= 6499
    assert all(used)
    assert used[1] == 1024
    assert info["kv_bytes"] == pytest.approx(sum(tier["n_bytes"] for tier in info["tiers"]), rel=0.01)
    # the process holds the tiers and not an F16 cache besides
    assert grown < info["kv_bytes"] - small_kv + 0.25 * info["kv_bytes_f16"]


@pytest.mark.parametrize(("kv", "limit"), [("ultra4", 0.29), ("ultra2", 0.18)])
def test_bytes_of_a_long_context(smollm2_path, kv, limit):
    with Llama(smollm2_path, kv_quant=kv, n_ctx=131072) as llm:
        info = llm.kv_info()
    assert info["ratio"] <= limit
    assert predict_kv(smollm2_path, 131072, kv)["ratio"] <= limit  # with a calibration
    predicted = predict_kv(smollm2_path, 131072, kv, calibrated=False)["kv_bytes"]
    assert info["kv_bytes"] == pytest.approx(predicted, rel=0.01)


class GreedySteps:
    """Tokens that an untiered F16 cache picks, and what F16 tiers make of the same tokens."""

    def __init__(self, path, prompt, n_tokens, flash_attn):
        params = {"n_ctx": 1024, "n_ubatch": 32, "n_batch": 32}
        model = Model(path)
        plain = Context(model, None, type_k="f16", type_v="f16", flash_attn=flash_attn, **params)
        tiered = Context(model, "f16:64+f16:128+f16", **params)
        expected, found = plain.prefill(prompt), tiered.prefill(prompt)
        self.gaps, self.errors, self.divergences, self.lost = [], [], [], []
        for pos in range(len(prompt), len(prompt) + n_tokens):
            first, second = np.argsort(expected)[-1:-3:-1]
            self.gaps.append(float(expected[first] - expected[second]))
            self.errors.append(float(np.abs(found - expected).max()))
            self.divergences.append(kl_divergence(expected, found))
            if found.argmax() != first:
                # by how much the untiered cache likes its own token better
                self.lost.append(float(expected[first] - expected[found.argmax()]))
            expected, found = (context.decode([first], pos)[-1] for context in (plain, tiered))
        self.n_used = tiered.used()
        print(f"{len(self.lost)} of {n_tokens} tokens differ, by {self.lost}; mean KLD {np.mean(self.divergences):.1e}")
        print(f"largest error {max(self.errors):.3f}, smallest gap of the two likeliest {min(self.gaps):.3f}")


def prompt_tokens(path, text):
    with Llama(path, vocab_only=True) as vocabulary:
        return vocabulary.tokenize(text)


@pytest.mark.slow
def test_f16_tiers_give_the_tokens_of_an_f16_cache(smollm2_f32):
    """512 greedy tokens. Measured: errors up to 0.04, and one step at which the two likeliest are 0.006 apart."""
    steps = GreedySteps(smollm2_f32.path, prompt_tokens(smollm2_f32.path, WORDS * 3), 512, flash_attn=0)
    assert all(steps.n_used)
    assert steps.lost == []
    assert max(steps.errors) < 0.1


@pytest.mark.slow
def test_f16_tiers_on_quantized_weights_differ_at_near_ties_only(smollm2_path):
    """Activations are rounded to 8 bits here, and rounding in attention moves them to other values."""
    steps = GreedySteps(smollm2_path, prompt_tokens(smollm2_path, "Once upon a time, there was"), 512, flash_attn=1)
    assert all(steps.n_used)
    assert max(steps.lost, default=0.0) < 0.5
    assert len(steps.lost) < 0.03 * 512
    assert np.mean(steps.divergences) < 0.01


def turns_of_a_chat(path, kv):
    """Answers five turns, each from the cache of those before.

    Yields that Llama, an empty one, and the prompt and the answer of the turn, as tokens.
    """
    params = {"kv_quant": kv, "n_ctx": 2048, "n_ubatch": 64}
    with Llama(path, **params) as cached, Llama(path, **params) as fresh:
        messages = []
        for turn in range(5):
            messages.append({"role": "user", "content": f"Question {turn}: {WORDS * 2}"})
            prompt = cached.tokenize(cached.chat_prompt(messages), add_bos=False, special=True)
            answer, text, n_reused = greedy_answer(cached, prompt)
            assert turn == 0 or n_reused > 0
            fresh.reset()
            yield cached, fresh, prompt, answer
            messages.append({"role": "assistant", "content": text})


def greedy_answer(llm, prompt):
    """At most 24 tokens, their text, and how many of the prompt's were in the cache."""
    generation = llm.start_generation(prompt, max_tokens=24, sampling=llm.sampling_params(temperature=0))
    text = "".join(piece.text for piece in generation)
    return generation.result.tokens, text, generation.result.n_reused


def last_logits(llm):
    return llm._engine.context.logits()


def test_turns_of_a_chat_equal_those_from_scratch(smollm2_f32):
    """While no token changes its tier: the same answers, and logits that differ as micro-batches round."""
    for cached, fresh, prompt, answer in turns_of_a_chat(smollm2_f32.path, "f16:1024+q4_ve"):
        again, _, n_reused = greedy_answer(fresh, prompt)
        assert n_reused == 0
        assert again == answer
        expected = last_logits(fresh)
        error = np.abs(last_logits(cached) - expected).max() / expected.std()
        print(f"{cached.n_tokens} tokens, largest error {error:.1e} of a standard deviation")
        assert error < CHAT_ERROR_LIMIT
        assert [tier["n_requantized"] for tier in cached.kv_info()["tiers"]] == [0, 0]


def test_turns_of_a_chat_of_aged_tokens(smollm2_f32):
    """What was still F16 when later tokens read it differs between the two ways, and so do their rows."""
    for cached, fresh, _, _ in turns_of_a_chat(smollm2_f32.path, "f16:64+q4_ve"):
        fresh.eval(cached._engine.tokens)
        for llm in (cached, fresh):
            llm.eval([198])
        divergence = kl_divergence(last_logits(fresh), last_logits(cached))
        print(f"{cached.n_tokens} tokens, KLD {divergence:.4f}")
        assert divergence < CHAT_KLD_LIMIT
        n_aged = cached.kv_info()["tiers"][1]["n_requantized"]
    assert n_aged > 200
