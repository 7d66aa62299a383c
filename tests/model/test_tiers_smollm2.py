"""The tiered cache of SmolLM2 through the Python package: long prompts, real memory, chats from the cache."""

import numpy as np
import pytest

from pykvq import Llama, predict_kv

WORDS = "The quick brown fox jumps over the lazy dog near the old stone bridge while the river keeps flowing east. "


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def kld(reference, other):
    p, q = log_softmax(reference), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum())


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
    predicted = predict_kv(smollm2_path, 131072, kv)["kv_bytes"]
    assert info["kv_bytes"] == pytest.approx(predicted, rel=0.01)


def test_turns_of_a_chat_from_the_cache(smollm2_path):
    """Each turn goes on from the cache; the same tokens evaluated at once are the reference.

    Where no token changed its tier between, rows and types agree; the two differ as micro-batches round, and in which
    tokens were still F16 when later ones read them.
    """
    with (
        Llama(smollm2_path, kv_quant="f16:64+q4_ve", n_ctx=2048, n_ubatch=64) as cached,
        Llama(smollm2_path, kv_quant="f16:64+q4_ve", n_ctx=2048, n_ubatch=64) as fresh,
    ):
        messages = []
        for turn in range(5):
            messages.append({"role": "user", "content": f"Question {turn}: {WORDS * 2}"})
            tokens = cached.tokenize(cached.chat_prompt(messages), add_bos=False, special=True)
            n_reused = cached.n_tokens
            cached.create_completion(tokens, max_tokens=24, temperature=0)
            continued = cached._engine.tokens[:]
            fresh.reset()
            fresh.eval(continued)
            cached.eval([198])
            fresh.eval([198])
            assert turn == 0 or cached.n_tokens > n_reused > 0
            assert kld(fresh._engine.context.logits(), cached._engine.context.logits()) < 0.1
            text = cached.detokenize(continued[len(tokens) :]).decode("utf-8", "replace")
            messages.append({"role": "assistant", "content": text})
