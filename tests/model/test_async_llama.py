"""AsyncLlama with SmolLM2: answers are those of a single request, slots are shared, freed and reused."""

import asyncio
import time

import pytest
from greedy import TIE_LOGITS, worst_gap

from pykvq import AbortedError, AsyncLlama, ClosedError, InvalidArgumentError, Llama, QueueFullError

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time", "The largest planet is"]
STORY = "A short story about a fox and a crow, who met on a hill one day. " * 12
GREEDY = {"temperature": 0, "max_tokens": 16}


def text_of(response):
    return response["choices"][0]["text"]


def run(path, test, **values):
    async def body():
        async with AsyncLlama(
            path, **{"n_slots": 4, "n_ctx": 1024, "n_threads": 2, "kv_quant": "f16", **values}
        ) as llm:
            await test(llm)

    asyncio.run(body())


async def tokens_of(llm, prompt, **values):
    """Prompt and answer as tokens."""
    reply = llm.reply(llm.plan_completion(prompt, **{**GREEDY, **values}))
    await reply.response()
    (job,) = reply.jobs
    return job.request.prompt, job.result.tokens, job.result.n_reused


@pytest.mark.parametrize("kv", ["f16", "ultra4"])
def test_answers_at_once_are_those_of_one_at_a_time(smollm2_path, kv):
    async def test(llm):
        answers = await asyncio.gather(*(tokens_of(llm, prompt) for prompt in PROMPTS))
        assert llm.stats().decode_calls < 2 * 16
        with Llama(smollm2_path, kv_quant=kv, n_ctx=1024) as alone:
            assert max(worst_gap(alone, prompt, answer) for prompt, answer, _ in answers) < TIE_LOGITS
            texts = [alone.detokenize(answer[:6]).decode() for _, answer, _ in answers]
            assert texts == [text_of(alone(prompt, temperature=0, max_tokens=6)) for prompt in PROMPTS]

    run(smollm2_path, test, kv_quant=kv)


@pytest.mark.parametrize("kv", ["f16", "f16:200+q8_0"])
def test_a_prefix_copied_from_another_slot_gives_the_same_answer(smollm2_path, kv):
    async def test(llm):
        stream = await llm.create_completion(STORY, max_tokens=300, stream=True, logit_bias={2: -100, 0: -100})
        await anext(stream)  # the slot that holds the story stays busy
        answers = [await tokens_of(llm, STORY + end) for end in ("The fox said:", "The crow said:", "The hill was")]
        await stream.aclose()
        assert all(n_reused > 150 for _, _, n_reused in answers)
        with Llama(smollm2_path, kv_quant=kv, n_ctx=1024) as alone:
            assert max(worst_gap(alone, prompt, answer) for prompt, answer, _ in answers) < TIE_LOGITS

    run(smollm2_path, test, kv_quant=kv)


def test_streams_are_the_whole_answer(smollm2_path):
    async def test(llm):
        wholes = [text_of(await llm.create_completion(prompt, **GREEDY)) for prompt in PROMPTS]

        async def read(prompt):
            stream = await llm.create_completion(prompt, stream=True, **GREEDY)
            return "".join([text_of(chunk) async for chunk in stream])

        assert [await read(prompt) for prompt in PROMPTS] == wholes
        messages = [{"role": "user", "content": "Name three colours."}]
        whole = await llm.create_chat_completion(messages, **GREEDY)
        stream = await llm.create_chat_completion(messages, stream=True, n=2, temperature=0, max_tokens=4)
        texts = ["", ""]
        async for chunk in stream:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts[0] == texts[1]
        assert whole["choices"][0]["message"]["content"].startswith(texts[0])

    run(smollm2_path, test)


def test_cancelling_during_a_4k_prompt_frees_the_slot_at_once(smollm2_path):
    async def test(llm):
        expected = text_of(await llm.create_completion(PROMPTS[0], **GREEDY))
        for delay in (0.05, 0.3, 0.6):
            task = asyncio.create_task(llm.create_completion("word " * 4000, max_tokens=1))
            await asyncio.sleep(delay)
            assert llm.stats().n_busy == 1
            started = time.perf_counter()
            task.cancel()
            while llm.stats().n_busy:
                await asyncio.sleep(0.002)
            assert time.perf_counter() - started < 0.5
            assert text_of(await llm.create_completion(PROMPTS[0], **GREEDY)) == expected

    run(smollm2_path, test, n_ctx=4352)


def test_a_cancelled_neighbour_leaves_an_answer_alone(smollm2_path):
    async def test(llm):
        task = asyncio.create_task(tokens_of(llm, PROMPTS[2], max_tokens=60))
        for _ in range(6):
            other = asyncio.create_task(llm.create_completion(STORY, max_tokens=40))
            await asyncio.sleep(0.05)
            other.cancel()
        prompt, answer, _ = await task
        with Llama(smollm2_path, kv_quant="f16", n_ctx=1024) as alone:
            assert worst_gap(alone, prompt, answer) < TIE_LOGITS

    run(smollm2_path, test)


def test_a_full_queue_and_wrong_arguments(smollm2_path):
    async def test(llm):
        running = asyncio.create_task(llm.create_completion("Once", max_tokens=200, logit_bias={2: -100, 0: -100}))
        await asyncio.sleep(0.1)
        with pytest.raises(QueueFullError):
            await llm.create_completion("x")
        with pytest.raises(InvalidArgumentError, match="top_p"):
            llm.create_completion("x", top_p=2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(smollm2_path, test, n_slots=1, max_queue=0)
    for values in ({"n_slots": 0}, {"n_slots": 65}, {"max_queue": -1}, {"embedding": True}):
        with pytest.raises(InvalidArgumentError):
            AsyncLlama(smollm2_path, **values)


def test_embeddings_beside_text(smollm2_path):
    async def test(llm):
        text, vectors = await asyncio.gather(
            llm.create_completion(PROMPTS[0], **GREEDY),
            llm.embed(["A cat sat on the mat.", "A kitten sat on the rug.", "Rates rose by two percent."], True),
        )
        assert text_of(text).startswith(" Paris")
        a, b, c = vectors
        assert sum(x * y for x, y in zip(a, b, strict=True)) > sum(x * y for x, y in zip(a, c, strict=True))
        alone = await llm.embed("A cat sat on the mat.", normalize=True)
        assert alone == pytest.approx(a, abs=2e-3)
        with pytest.raises(InvalidArgumentError, match="1 to 512 tokens"):
            await llm.embed("word " * 600, truncate=False)

    run(smollm2_path, test)


@pytest.mark.parametrize("leave", ["drop", "close"])
def test_a_stream_that_is_never_read_frees_its_slot(smollm2_path, leave):
    async def test(llm):
        stream = await llm.create_completion(STORY, max_tokens=900, stream=True, logit_bias={2: -100, 0: -100})
        if leave == "close":
            await stream.aclose()
        del stream
        for _ in range(100):
            if llm.stats().n_busy == 0:
                break
            await asyncio.sleep(0.02)
        assert (llm.stats().n_busy, llm.stats().cancelled) == (0, 1)

    run(smollm2_path, test)


def test_more_answers_than_ever_fit(smollm2_path):
    async def test(llm):
        with pytest.raises(InvalidArgumentError, match="6 answers at once are more than 4 slots and 1 places"):
            await llm.create_completion("x", n=6)
        assert llm.stats().n_busy == 0

    run(smollm2_path, test, max_queue=1)


def test_closing_ends_what_runs(smollm2_path):
    async def test(llm):
        task = asyncio.create_task(llm.create_completion("Once", max_tokens=900, logit_bias={2: -100, 0: -100}))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(llm.close)
        with pytest.raises((ClosedError, AbortedError)):
            await task
        with pytest.raises(ClosedError):
            await llm.create_completion("x")

    run(smollm2_path, test)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["f16", "ultra4"])
def test_four_slots_give_twice_the_tokens_of_one(smollm2_path, kv):
    """Both ways in turns, the best of each, since other programs come in between."""

    async def test(llm):
        async def timed(together):
            calls = [llm.create_completion(prompt, temperature=0, max_tokens=64) for prompt in PROMPTS]
            started, before = time.perf_counter(), llm.stats().generated_tokens
            if together:
                await asyncio.gather(*calls)
            else:
                for call in calls:
                    await call
            return (llm.stats().generated_tokens - before) / (time.perf_counter() - started)

        rates = {together: max([await timed(together) for _ in range(4)]) for together in (False, True)}
        print(f"\n{kv}: one slot {rates[False]:.1f} tokens/s, four {rates[True]:.1f}")
        assert rates[True] >= 2 * rates[False]

    run(smollm2_path, test, kv_quant=kv)
