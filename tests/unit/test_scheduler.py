"""The scheduler on the fake library: who is computed when, what is reused, and how jobs end."""

import queue
import threading
import time

import pytest
from fake_native import BOS, EOS

from pykvq import AbortedError, ClosedError, DeadlineError, InvalidArgumentError, QueueFullError
from pykvq.batching.scheduler import Scheduler
from pykvq.kv_config import kv_presets
from pykvq.request import Piece, Request
from pykvq.runtime import Context, Model
from pykvq.sampling import SamplingParams

N_CTX = 300


class Caller:
    """Submits requests and collects what comes back."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def start(self, prompt, max_tokens=None, timeout=None, **values):
        events = queue.Queue()
        ids = (BOS, *prompt.encode())
        job = self.scheduler.submit(Request(prompt=ids, max_tokens=max_tokens, **values), events.put, timeout=timeout)
        job.events = events
        return job

    @staticmethod
    def text(job):
        texts = []
        while isinstance(event := job.events.get(timeout=10), Piece):
            texts.append(event.text)
        if event is not None:
            raise event
        return "".join(texts)


@pytest.fixture
def make(lib, model_path):
    made = []

    def build(n_slots=2, n_batch=16, **values):
        # the answer repeats the first letter of the prompt
        lib.next_token = lambda held: held[1]
        model = Model(model_path)
        params = {"n_ctx": N_CTX * n_slots, "n_batch": n_batch, "n_ubatch": n_batch, "n_seq_max": n_slots}
        context = Context(model, kv_presets()["f16"], kv_unified=False, **params)
        made.append((Scheduler(model, context, N_CTX, **values), context, model))
        return Caller(made[-1][0])

    yield build
    for scheduler, context, model in made:
        scheduler.close()
        context.close()
        model.close()


@pytest.fixture
def gate(lib):
    """Holds every decode while it is closed, as it is at first."""
    opened, entered = threading.Event(), threading.Event()

    def wait():
        entered.set()
        assert opened.wait(10)

    lib.before_decode = wait
    gate = type("Gate", (), {"open": opened.set, "close": opened.clear, "entered": entered})()
    yield gate
    opened.set()


def test_answers_do_not_mix(make, lib, gate):
    caller = make(n_slots=3)
    jobs = [caller.start(letter * 5, max_tokens=6) for letter in "abcde"]
    gate.open()
    assert [caller.text(job) for job in jobs] == [letter * 6 for letter in "abcde"]
    assert max(len({seq for seq, _ in batch}) for batch in lib.batches) == 3


def test_a_long_prompt_does_not_stall_the_others(make, lib, gate):
    caller = make(n_batch=16)
    short = caller.start("s", max_tokens=200)
    assert gate.entered.wait(10)
    long = caller.start("l" * 200, max_tokens=1)
    gate.open()
    assert caller.text(long) == "l"
    mixed = [batch for batch in lib.batches if {seq for seq, _ in batch} == {0, 1}]
    assert len(mixed) >= 200 // 16
    assert all(sum(seq == 0 for seq, _ in batch) == 1 for batch in mixed)
    caller.text(short)


def test_two_prompts_share_the_batch_and_the_short_one_is_done_first(make, lib, gate):
    caller = make(n_batch=16)
    jobs = [caller.start("x", max_tokens=1)]
    assert gate.entered.wait(10)
    long, short = caller.start("l" * 200, max_tokens=1), caller.start("s" * 20, max_tokens=1)
    gate.open()
    assert [caller.text(job) for job in (*jobs, short, long)] == ["x", "s", "l"]
    last = {
        letter: max(i for i, batch in enumerate(lib.batches) if letter in [t for _, t in batch]) for letter in b"sl"
    }
    assert last[ord("s")] < last[ord("l")]


def test_a_prefix_is_taken_over_from_the_own_slot_and_copied_from_others(make, lib, gate):
    caller = make(n_slots=2)
    story = "once upon a time " * 8
    gate.open()
    first = caller.start(story, max_tokens=2)
    caller.text(first)
    again = caller.start(story + "more", max_tokens=2)
    caller.text(again)
    assert again.result.n_reused == len(story) + 1
    # the slot that holds it is busy
    gate.close()
    gate.entered.clear()
    running = caller.start(story + "more and more", max_tokens=100)
    assert gate.entered.wait(10)
    other = caller.start(story + "or less", max_tokens=2)
    gate.open()
    assert caller.text(other) == "oo"
    assert other.result.n_reused == len(story) + 1
    assert lib.contexts[-1].sequences[1][: len(story) + 1] == [BOS, *story.encode()]
    caller.text(running)


def test_a_cache_that_cannot_be_cut_is_computed_again(make, lib):
    caller = make(n_slots=1)
    caller.text(caller.start("abcdef", max_tokens=2))
    lib.can_remove = False
    job = caller.start("abcxyz", max_tokens=2)
    assert caller.text(job) == "aa"
    assert job.result.n_reused == 0


def test_prompt_log_probabilities_come_with_the_answer(make):
    caller = make(n_batch=4)
    job = caller.start("abcdefgh", max_tokens=1, n_logprobs=1, prompt_logprobs=True)
    assert caller.text(job) == "a"
    assert [entry.raw for entry in job.result.prompt_logprobs] == [bytes([each]) for each in b"abcdefgh"]


def test_cancelling_frees_the_slot_wherever_the_job_is(make, lib, gate):
    caller = make(n_slots=1)
    running, waiting = caller.start("a" * 100), caller.start("b" * 5, max_tokens=3)
    assert gate.entered.wait(10)
    queued = caller.start("c", max_tokens=1)
    caller.scheduler.cancel(queued)
    with pytest.raises(AbortedError):
        caller.text(queued)  # at once, while the decode still runs
    caller.scheduler.cancel(running)
    gate.open()
    with pytest.raises(AbortedError):
        caller.text(running)
    assert caller.text(waiting) == "bbb"
    stats = caller.scheduler.stats()
    assert (stats.cancelled, stats.finished, stats.n_busy, stats.n_queued) == (2, 1, 0, 0)


def test_a_cancelled_neighbour_does_not_change_an_answer(make, lib):
    caller = make(n_slots=2)
    keeps = caller.start("k" * 30, max_tokens=100)
    for _ in range(5):
        leaves = caller.start("x" * 60)
        time.sleep(0.01)
        caller.scheduler.cancel(leaves)
    assert caller.text(keeps) == "k" * 100


def test_the_queue_is_bounded(make, gate):
    caller = make(n_slots=1, max_queue=1)
    first = caller.start("a", max_tokens=1)
    assert gate.entered.wait(10)
    second = caller.start("b", max_tokens=1)
    with pytest.raises(QueueFullError, match="all 1 slots are busy and 1 requests are waiting"):
        caller.start("c")
    gate.open()
    assert [caller.text(job) for job in (first, second)] == ["a", "b"]


def test_a_deadline_ends_waiting_and_running_jobs(make, lib):
    lib.before_decode = lambda: time.sleep(0.02)
    caller = make(n_slots=1)
    running = caller.start("a", timeout=0.2)
    waiting = caller.start("b", timeout=0.1)
    with pytest.raises(DeadlineError, match="waited longer"):
        caller.text(waiting)
    with pytest.raises(DeadlineError, match="took longer"):
        caller.text(running)
    lib.before_decode = lambda: None
    assert caller.text(caller.start("c", max_tokens=2)) == "cc"


def test_a_request_that_fails_leaves_the_others_alone(make, lib):
    def wrong(ids, logits):
        raise ZeroDivisionError("of a callback")

    caller = make(n_slots=2)
    good = caller.start("g", max_tokens=50)
    bad = caller.start("b", logits_processors=(wrong,))
    unknown = caller.start("u", sampling=SamplingParams(logit_bias={7: 1e38}), max_tokens=1)
    with pytest.raises(ZeroDivisionError):
        caller.text(bad)
    assert caller.text(good) == "g" * 50
    caller.text(unknown)


def test_an_error_of_the_decode_ends_the_jobs_in_it_and_no_others(make, lib, gate):
    caller = make(n_slots=1)
    job, later = caller.start("a" * 20), caller.start("b" * 20, max_tokens=2)
    assert gate.entered.wait(10)

    def fail_once():
        lib.before_decode = lambda: None
        raise InvalidArgumentError("out of order")

    lib.before_decode = fail_once
    gate.open()
    with pytest.raises(InvalidArgumentError, match="out of order"):
        caller.text(job)
    assert caller.text(later) == "bb"


def test_the_answer_ends_with_the_context(make):
    caller = make(n_slots=2)
    job = caller.start("a" * 289)
    assert caller.text(job) == "a" * 10
    assert job.result.finish_reason == "length"


def test_closing_ends_all_jobs(make, lib, gate):
    caller = make(n_slots=1)
    running, waiting = caller.start("a"), caller.start("b")
    assert gate.entered.wait(10)
    closer = threading.Thread(target=caller.scheduler.close)
    closer.start()
    gate.open()
    closer.join(10)
    for job in (running, waiting):
        with pytest.raises(ClosedError):
            caller.text(job)
    with pytest.raises(ClosedError):
        caller.start("c")


def test_end_tokens_end_the_answer(make, lib):
    caller = make()
    lib.next_token = lambda held: EOS if len(held) > 5 else ord("z")
    job = caller.start("abc")
    assert caller.text(job) == "zz"
    assert (job.result.finish_reason, job.result.gen_n) == ("stop", 2)
