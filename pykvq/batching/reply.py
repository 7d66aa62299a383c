"""The answers to a plan as they come out of a scheduler, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from pykvq.batching.job import Job, JobEvent
from pykvq.batching.scheduler import Scheduler
from pykvq.errors import InvalidArgumentError
from pykvq.request import Piece
from pykvq.responses import ChoiceWriter, Plan, Response


class Reply:
    """A plan that a scheduler works on. Use one of ``response()`` and ``chunks()``, once.

    Args:
        timeout: seconds that the answers may take, None for no limit.

    Leaving ``response()`` or ``chunks()`` early, also because the task is cancelled, cancels the requests; so does
    dropping what was never begun.

    Raises:
        QueueFullError: too many requests are waiting. ClosedError.
        InvalidArgumentError: there are more answers than ever fit the slots and the queue.
    """

    def __init__(self, scheduler: Scheduler, plan: Plan, timeout: float | None = None) -> None:
        self.jobs: list[Job] = []
        self._scheduler = scheduler
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, JobEvent]] = asyncio.Queue()
        n_slots = scheduler.stats().n_slots
        if len(plan.requests) > n_slots + scheduler.max_queue:
            raise InvalidArgumentError(
                f"{len(plan.requests)} answers at once are more than {n_slots} slots and {scheduler.max_queue} places "
                "in the queue take: ask in several requests"
            )
        try:
            for i in range(len(plan.requests)):
                self.jobs.append(self._submit(i, timeout))
        except BaseException:
            self.cancel()
            raise
        self._writers = [plan.make_writer(job.request, job.result, i) for i, job in enumerate(self.jobs)]

    def __del__(self) -> None:
        self.cancel()

    def _submit(self, i: int, timeout: float | None) -> Job:
        loop, events = self._loop, self._events  # the scheduler must not keep this object alive

        def sink(event: JobEvent) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, (i, event))
            except RuntimeError:  # the event loop is closed: nobody is there to read it
                job.cancelled.set()

        job = self._scheduler.submit(self._plan.requests[i], sink, timeout=timeout)
        return job

    async def response(self) -> Response:
        """The whole response.

        Raises:
            AbortedError, DeadlineError, ClosedError, and what a callback of the request raises.
        """
        async for _ in self._steps():
            pass
        return self._plan.response(self._writers)

    async def chunks(self) -> AsyncGenerator[Response, None]:
        """The chunks of the response as they come; the same errors."""
        for writer in self._writers:
            for chunk in writer.start():
                yield chunk
        async for chunks in self._steps():
            for chunk in chunks:
                yield chunk
        for chunk in self._plan.last_chunks(self._writers):
            yield chunk

    def cancel(self) -> None:
        """Ends the requests that are not complete."""
        for job in self.jobs:
            self._scheduler.cancel(job)

    async def _steps(self) -> AsyncIterator[list[Response]]:
        n_open = len(self.jobs)
        try:
            while n_open:
                i, event = await self._events.get()
                writer: ChoiceWriter = self._writers[i]
                if isinstance(event, Piece):
                    yield writer.push(event)
                elif event is None:
                    n_open -= 1
                    yield writer.finish()
                else:
                    raise event
        finally:
            if n_open:
                self.cancel()
