"""The thread that owns a context and serves many requests on it at once."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial

from pykvq.batching.batch import Batch, Share, plan_batch
from pykvq.batching.job import Job, JobSink
from pykvq.batching.slot import Slot, Work, take_slot
from pykvq.errors import AbortedError, ClosedError, DeadlineError, QueueFullError
from pykvq.request import Request
from pykvq.runtime import Context, Model

DEFAULT_MAX_QUEUE = 64
# prompt tokens computed in a step beside slots that generate: at 200 tokens/s, these wait 0.6 s
_SHARED_PROMPT_TOKENS = 128

_logger = logging.getLogger("pykvq")


@dataclass(frozen=True)
class SchedulerStats:
    """What a scheduler has done and has to do. Counters only grow."""

    n_slots: int
    n_busy: int = 0
    n_queued: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    decode_calls: int = 0
    decode_seconds: float = 0.0


class Scheduler:
    """Serves requests on a context with one sequence a slot: first come, first served, all slots in one batch.

    Args:
        context: a context with separate sequences. Only this scheduler's thread may compute with it.
        n_ctx: tokens that each slot may hold.
        max_queue: requests that may wait for a slot.

    A prompt is computed in pieces, so that other slots go on meanwhile; what a slot holds of it, or can copy from
    another, is not computed again. Any thread may call any method.
    """

    def __init__(self, model: Model, context: Context, n_ctx: int, *, max_queue: int = DEFAULT_MAX_QUEUE) -> None:
        info = context.info
        self.n_ctx = n_ctx
        self.max_queue = max_queue
        self._model = model
        self._context = context
        self._n_batch = min(info.n_batch, info.n_ubatch)
        self._slots = [Slot(context, seq) for seq in range(info.n_seq_max)]
        self._stats = SchedulerStats(n_slots=len(self._slots))
        self._can_copy = not (model.info.is_recurrent or model.info.is_hybrid)
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._computing: list[Job] = []  # jobs with tokens in the decode call that is running
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pykvq-scheduler", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: JobSink, *, timeout: float | None = None) -> Job:
        """Queues a request; its events go to ``sink``, in this scheduler's thread.

        Raises:
            QueueFullError: too many requests are waiting. ClosedError.
        """
        job = Job(request, sink, timeout)
        with self._changed:
            if self._closed:
                raise ClosedError("this model is closed: load it again")
            n_free = sum(1 for slot in self._slots if slot.work is None)
            if len(self._queue) - n_free >= self.max_queue:
                raise QueueFullError(
                    f"all {len(self._slots)} slots are busy and {len(self._queue)} requests are waiting, the most that "
                    "may: try again later"
                )
            self._queue.append(job)
            self._changed.notify_all()
        return job

    def cancel(self, job: Job) -> None:
        """Ends a job: at once if it is waiting, else within a part of a micro-batch."""
        with self._changed:
            job.cancelled.set()
            if job in self._queue:
                self._queue.remove(job)
                self._end_cancelled(job)
            elif job in self._computing:
                self._context.abort()
            self._changed.notify_all()

    def stats(self) -> SchedulerStats:
        """What was done so far, and what is to do."""
        with self._changed:
            n_busy = sum(1 for slot in self._slots if slot.work is not None)
            return replace(self._stats, n_busy=n_busy, n_queued=len(self._queue))

    def slot_tokens(self) -> list[int]:
        """Tokens that each slot holds."""
        return [len(slot.tokens) for slot in self._slots]

    def close(self) -> None:
        """Ends all jobs with ClosedError and the thread; the context may be freed then. Again does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._context.abort()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- everything below runs in the scheduler's thread

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._step()
            except Exception as error:  # a defect; every caller must hear of it, and the thread must live on
                _logger.exception("the scheduler failed")
                self._fail_all(error)
        self._fail_all(ClosedError("this model was closed before the answer was complete"))

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._closed or self._queue or any(slot.work for slot in self._slots)):
                self._changed.wait()
            return not self._closed

    def _step(self) -> None:
        self._context.clear_abort()
        self._drop_unwanted()
        self._fill_slots()
        batch = plan_batch(self._slots, self._n_batch, _SHARED_PROMPT_TOKENS)
        if batch.tokens and self._compute(batch):
            for share in batch.shares:
                self._advance(share)

    def _drop_unwanted(self) -> None:
        with self._changed:
            for job in [job for job in self._queue if job.expired]:
                self._queue.remove(job)
                self._count(failed=1)
                job.end(DeadlineError("the request waited longer for a slot than its time limit"))
        for slot in self._slots:
            if slot.work is None:
                continue
            if slot.work.job.cancelled.is_set():
                self._end_cancelled(self._vacate(slot).job)
            elif slot.work.job.expired:
                self._fail(slot, DeadlineError("the answer took longer than its time limit"))

    def _fill_slots(self) -> None:
        while True:
            with self._changed:
                if not self._queue or all(slot.work is not None for slot in self._slots):
                    return
                job = self._queue.popleft()
            try:
                self._start(job)
            except Exception as error:
                self._count(failed=1)
                job.end(error)

    def _start(self, job: Job) -> None:
        prompt = job.request.prompt
        work = Work(self._model, job, self.n_ctx)
        slot = take_slot(self._slots, prompt, can_copy=self._can_copy)
        assert slot is not None  # only this thread takes slots, and it has seen a free one
        if work.prompt_reader is not None:
            slot.truncate(0)
        job.result.n_reused = len(slot.tokens)
        job.result.prompt_n = len(prompt) - len(slot.tokens)
        self._count(reused_tokens=job.result.n_reused)
        slot.work = work

    def _compute(self, batch: Batch) -> bool:
        """Decodes a batch. After a failure, the slots are as before and the jobs concerned have ended."""
        jobs = [share.slot.work.job for share in batch.shares if share.slot.work is not None]
        with self._changed:
            self._computing = jobs
            if any(job.cancelled.is_set() for job in jobs) or self._closed:
                return False
        started = time.perf_counter()
        try:
            self._context.decode_batch(batch.tokens, batch.positions, batch.sequences, batch.want_logits)
        except AbortedError:
            self._restore(batch)
            return False
        except Exception as error:
            self._restore(batch)
            for share in batch.shares:
                self._fail(share.slot, error)
            return False
        finally:
            with self._changed:
                self._computing = []
        self._count(decode_calls=1, decode_seconds=time.perf_counter() - started)
        return True

    @staticmethod
    def _restore(batch: Batch) -> None:
        for share in batch.shares:
            share.slot.sync()

    def _advance(self, share: Share) -> None:
        """Takes in that a slot's share was computed, and draws a token if it was the last one pending."""
        slot, work = share.slot, share.slot.work
        assert work is not None
        slot.tokens += work.tokens[len(slot.tokens) : len(slot.tokens) + share.n]
        try:
            if work.in_prompt:
                self._count(prompt_tokens=share.n)
                if work.prompt_reader is not None:
                    for i in range(share.first, share.first + share.n):
                        work.prompt_reader.read(self._context.logits(i))
            if len(slot.tokens) == len(work.tokens):
                self._draw(slot, work, share.first + share.n - 1)
        except Exception as error:  # of a callback of the request, or logits that are no numbers
            self._fail(slot, error)

    def _draw(self, slot: Slot, work: Work, i: int) -> None:
        result = work.job.result
        if work.in_prompt:
            result.prompt_s = time.perf_counter() - work.started
            result.prompt_logprobs = work.prompt_reader.entries if work.prompt_reader is not None else []
        token = work.chooser.choose(self._context, i, work.tokens)
        if work.chooser.should_stop(self._context, i, work.tokens):
            result.finish_reason = "stop"
        else:
            self._count(generated_tokens=1)
            work.job.emit(work.answer.push(token, partial(self._context.logits, i)))
            work.tokens.append(token)
        result.gen_s = time.perf_counter() - work.started - result.prompt_s
        if work.answer.ended:
            self._vacate(slot)
            self._count(finished=1)
            work.job.emit(work.answer.finish())
            work.job.end()

    def _vacate(self, slot: Slot) -> Work:
        work = slot.work
        assert work is not None
        slot.last_used = time.monotonic()
        slot.work = None
        work.chooser.close()
        return work

    def _end_cancelled(self, job: Job) -> None:
        self._count(cancelled=1)
        job.end(AbortedError("the request was cancelled"))

    def _fail(self, slot: Slot, error: Exception) -> None:
        self._count(failed=1)
        self._vacate(slot).job.end(error)

    def _fail_all(self, error: Exception) -> None:
        with self._changed:
            queued, self._queue = list(self._queue), deque()
        for job in queued:
            self._count(failed=1)
            job.end(error)
        for slot in self._slots:
            if slot.work is not None:
                self._fail(slot, error)
            if not self._closed:
                slot.sync()

    def _count(self, **more: float) -> None:
        with self._changed:
            values = {name: getattr(self._stats, name) + n for name, n in more.items()}
            self._stats = replace(self._stats, **values)
