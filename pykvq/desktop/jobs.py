"""Long work beside the chats: downloads, calibrations and fidelity runs, with progress and an end before the end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from pykvq.errors import AbortedError
from pykvq.server.errors import api_error

DOWNLOAD = "download"
_numbers = itertools.count(1)


class Job:
    """Work in a thread. Make it in a running event loop.

    Args:
        kind: what it is, such as "download".
        title: for people.
        work: is called with this job, whose ``report`` or ``require`` it calls as it goes on.
        on_change: is called in the event loop when the job has ended.
    """

    def __init__(self, kind: str, title: str, work: Callable[[Job], Any], on_change: Callable[[], None]) -> None:
        self.kind = kind
        self.work = work
        self.number = next(_numbers)
        self.title = title
        self.progress = 0.0
        self.state = "running"
        self.error: str | None = None
        self.result: Any = None
        self.is_cancelled = False
        self._on_change = on_change
        self.task = asyncio.create_task(self._run())

    def report(self, done: float) -> bool:
        """Notes what part is done, 0 to 1; False when the work is to end."""
        self.progress = done
        return not self.is_cancelled

    def require(self, done: float) -> None:
        """``report``, for work that ends by an exception.

        Raises:
            AbortedError: the work is to end.
        """
        if not self.report(done):
            raise AbortedError(f"{self.title}: cancelled")

    def cancel(self) -> None:
        """Ends the work at its next report."""
        self.is_cancelled = True
        self._on_change()

    async def _run(self) -> None:
        try:
            self.result = await asyncio.to_thread(self.work, self)
            self.state, self.progress = "done", 1.0
        except AbortedError:
            self.state = "cancelled"
        except Exception as error:
            self.state, self.error = "failed", api_error(error).message
        self._on_change()
