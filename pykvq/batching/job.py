"""A request on its way through the scheduler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from pykvq.request import Piece, Request, Result

# a piece of the answer; None when it is complete; or the error that ended it
JobEvent: TypeAlias = "Piece | BaseException | None"
# takes the events of a job; called in the scheduler's thread, so it must return at once
JobSink: TypeAlias = Callable[[JobEvent], None]


class Job:
    """A request, its result so far, and where its events go. The last event is None or an error.

    Args:
        timeout: seconds from now after which the job ends with DeadlineError, None for no limit.
    """

    def __init__(self, request: Request, sink: JobSink, timeout: float | None = None) -> None:
        self.request = request
        self.result = Result()
        self.submitted = time.monotonic()
        self.deadline = None if timeout is None else self.submitted + timeout
        self.cancelled = threading.Event()
        self._sink = sink
        self._ended = False

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def emit(self, piece: Piece) -> None:
        """Hands text on, unless nobody wants it any more."""
        if not self._ended and not self.cancelled.is_set() and (piece.text or piece.logprobs):
            self._sink(piece)

    def end(self, error: BaseException | None = None) -> None:
        """Hands the last event on; only the first call does."""
        if not self._ended:
            self._ended = True
            self._sink(error)
