"""Who may use a context: one caller, or one unfinished stream, at a time."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from pykvq.errors import BusyError, ClosedError

T = TypeVar("T")


class Turn:
    """The right to use a context, which passes from caller to caller.

    A call in another thread waits for its turn. A call in the thread that holds an unfinished stream ends that stream:
    going on with it raises BusyError, so it is never mixed up with the newer call nor silently cut short.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        # weak, so that a stream that its user dropped is collected and gives its turn back
        self._stream: weakref.ref[TurnIterator[Any]] | None = None
        self._closed = False

    def acquire(self, stream: TurnIterator[Any] | None = None) -> None:
        """Waits for the turn and takes it, for a stream or for one call.

        Raises:
            BusyError: called from inside the call or the stream step that has the turn.
            ClosedError: the context is closed.
        """
        me = threading.get_ident()
        self._end_own_stream(me)
        with self._changed:
            while self._owner is not None and not self._closed:
                self._changed.wait()
            if self._closed:
                raise ClosedError("this model is closed: create a new Llama")
            self._owner = me
            self._stream = weakref.ref(stream) if stream is not None else None

    def release(self) -> None:
        """Passes the turn on."""
        with self._changed:
            self._owner = None
            self._stream = None
            self._changed.notify()

    def move_to_this_thread(self) -> None:
        """Notes that the stream which has the turn goes on in the calling thread."""
        with self._changed:
            self._owner = threading.get_ident()

    def close(self) -> None:
        """Makes every present and later wait for a turn end with ClosedError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> Turn:
        self.acquire()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()

    def _end_own_stream(self, me: int) -> None:
        with self._changed:
            if self._owner != me:
                return
            stream = self._stream() if self._stream is not None else None
        if stream is None:
            raise BusyError("this model is in use by the calling thread: a callback must not call the model again")
        stream.overtake()


class TurnIterator(Generic[T]):
    """An iterator whose steps use a context: it takes the turn at its first step and holds it until it ends.

    ``close()``, leaving a with block and garbage collection end it early and leave the context usable.
    """

    def __init__(self, turn: Turn, steps: Generator[T, None, None]) -> None:
        self._turn = turn
        self._steps = steps
        self._has_turn = False
        self._ended = False
        self._overtaken = False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._overtaken:
            raise BusyError("a later call on the same model has ended this stream: finish one before the next call")
        if self._ended:
            raise StopIteration
        try:
            if self._has_turn:
                self._turn.move_to_this_thread()
            else:
                self._turn.acquire(self)
                self._has_turn = True
            return next(self._steps)
        except BaseException:
            # still running means that another thread is inside a step: this one may not take the turn from it
            if inspect.getgeneratorstate(self._steps) != inspect.GEN_RUNNING:
                self._end()
            raise

    def overtake(self) -> None:
        """Ends the stream in favour of a later call.

        Raises:
            BusyError: the stream is inside a step (the call comes from a callback).
        """
        try:
            self._steps.close()
        except ValueError as error:  # a generator that is executing
            raise BusyError("this model is generating: a callback must not call the model again") from error
        self._overtaken = True
        self._end()

    def close(self) -> None:
        """Ends the stream. Calling it again does nothing."""
        self._steps.close()
        self._end()

    def _end(self) -> None:
        self._ended = True
        if self._has_turn:
            self._has_turn = False
            self._turn.release()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_has_turn", False):
            self.close()


_Self = TypeVar("_Self", bound=TurnIterator[Any])
