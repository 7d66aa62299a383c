"""What the command-line programs share: lines on stderr, progress bars, answers that Ctrl-C can stop."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pykvq.generation import Generation
    from pykvq.request import Piece, Result

_MIB = 1024 * 1024
# a wait without a limit cannot be interrupted on Windows
_WAIT_SECONDS = 0.1


def note(text: str) -> None:
    """Prints one line to stderr."""
    print(" ".join(text.split()), file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Prints a piece of an answer to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def drop_stdout() -> None:
    """Sends what is still buffered for a closed pipe to nowhere, so that the interpreter's exit stays silent."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def answer_summary(result: Result, kv: dict[str, Any]) -> str:
    """The line after an answer, such as "42 tokens, 31.2 tokens/s; KV 23.9 MiB, 0.27x of F16"."""
    return f"{result.gen_n} tokens, {rate(result.gen_n, result.gen_s):.1f} tokens/s; {kv_summary(kv)}"


def kv_summary(kv: dict[str, Any]) -> str:
    """The size of a KV cache against that of F16."""
    return f"KV {kv['kv_bytes'] / _MIB:.1f} MiB, {kv['ratio']:.2f}x of F16"


def rate(n: int, seconds: float) -> float:
    """Tokens a second, 0 where nothing was computed."""
    return n / seconds if seconds > 0 else 0.0


@contextlib.contextmanager
def progress_bar(label: str, *, is_bytes: bool = False) -> Iterator[Callable[[float, float], None]]:
    """Yields a function (done, total) that moves a bar on stderr, which is only drawn on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn

    amount = DownloadColumn() if is_bytes else TaskProgressColumn()
    with Progress(TextColumn(label), BarColumn(), amount, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextlib.contextmanager
def progress_bars(*labels: str) -> Iterator[list[Callable[[float], None]]]:
    """Yields a function (share done) for each label, which moves its bar on stderr; a bar is shown from its first move
    on.

    The time left is shown too. Bars are only drawn on a terminal.
    """
    if not sys.stderr.isatty():
        yield [lambda _done: None for _ in labels]
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def mover(task: TaskID) -> Callable[[float], None]:
            return lambda done: progress.update(task, completed=done, visible=True)

        yield [mover(progress.add_task(label, total=1, visible=False)) for label in labels]


def interruptible(generation: Generation, abort: Callable[[], None]) -> Generator[Piece, None, None]:
    """The pieces of a generation that runs in a thread of its own, so that Ctrl-C is served inside a long computation.

    Ending the iteration early, by KeyboardInterrupt or otherwise, stops the computation. Wrap it in
    ``contextlib.closing`` so that this happens at once.
    """
    items: queue.SimpleQueue[Piece | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()

    def generate() -> None:
        try:
            with generation:
                for piece in generation:
                    items.put(piece)
                    if stop.is_set():
                        break
            items.put(None)
        except BaseException as error:
            items.put(error)

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    try:
        while (item := _get(items)) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    except BaseException:
        stop.set()
        abort()
        raise
    finally:
        thread.join()


def _get(items: queue.SimpleQueue[Any]) -> Any:
    while True:
        with contextlib.suppress(queue.Empty):
            return items.get(timeout=_WAIT_SECONDS)
