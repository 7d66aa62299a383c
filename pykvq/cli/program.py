"""The frame of every command-line program: arguments in, one line for any failure, an exit code out."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import typer

from pykvq import __version__
from pykvq.cli.console import drop_stdout, note, write
from pykvq.errors import AbortedError, InvalidArgumentError, PykvqError

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

# typer brings its own click or uses the installed one, depending on its version; this is UsageError of either
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def new_app(**settings: Any) -> typer.Typer:
    """A typer application in the style of all programs, for several commands."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, **settings)


def run_program(name: str, commands: typer.Typer | Callable[..., int], argv: Sequence[str] | None) -> int:
    """Runs a program: an application, or the function of its only command. Commands return an exit code.

    Returns:
        0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C. Any failure is one line on stderr. SIGTERM and SIGHUP
        end it by SystemExit.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    for stream in ("stdin", "stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the caller
            setattr(sys, stream, open(os.devnull, "r" if stream == "stdin" else "w"))  # noqa: SIM115
        # a terminal or locale that cannot show a character must not end an answer
        if hasattr(getattr(sys, stream), "reconfigure"):
            getattr(sys, stream).reconfigure(errors="replace")
    if "--verbose" not in arguments:
        _show_warnings()
    _end_by_exit(signal.SIGTERM, getattr(signal, "SIGHUP", None))
    try:
        if arguments == ["--version"]:
            return print_version(name)
        command = typer.main.get_command(_application(commands))
        code: int | None = command.main(args=arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except (KeyboardInterrupt, typer.Abort, AbortedError):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        drop_stdout()
        return EXIT_FAILURE
    except Exception as error:
        if "--verbose" in arguments:
            traceback.print_exc()
        return _report(name, error)


class _Warnings(logging.Handler):
    """Prints what the Python side warns of, once each, unless the program has a place for its log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.name != "pykvq.native" and not logging.getLogger().handlers and text not in self._shown:
            self._shown.add(text)
            note(f"warning: {text}")


def _show_warnings() -> None:
    """Sends what the logger "pykvq" warns of to stderr, such as a fallback that changes speed or quality."""
    logger = logging.getLogger("pykvq")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Warnings)]:
        logger.removeHandler(handler)
    logger.addHandler(_Warnings())


def _end_by_exit(*signals: signal.Signals | None) -> None:
    """Lets signals that end a process at once end it by SystemExit instead, so that nothing half written is left."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        return
    for each in signals:
        if each is not None and signal.getsignal(each) == signal.SIG_DFL:
            signal.signal(each, leave)


def _application(commands: typer.Typer | Callable[..., int]) -> typer.Typer:
    if isinstance(commands, typer.Typer):
        return commands
    app = new_app()
    app.command()(commands)
    return app


def print_version(name: str) -> int:
    """Prints the version of a program; returns its exit code."""
    write(f"{name} {__version__}\n")
    return 0


def require(valid: bool, option: str, value: Any, rule: str) -> None:
    """Refuses an option's value unless ``valid``; ``rule`` tells what to give."""
    if not valid:
        raise InvalidArgumentError(f"{option} {value} is out of range: give {rule}")


def _report(name: str, error: Exception) -> int:
    """Prints the one line for an error and returns the exit code."""
    if isinstance(error, _UsageError):
        note(f"{name}: error: {error.format_message()} (see {name} --help)")  # type: ignore[attr-defined]
        return EXIT_USAGE
    if isinstance(error, PykvqError):
        note(f"{name}: error: {error}")
        return EXIT_USAGE if isinstance(error, InvalidArgumentError) else EXIT_FAILURE
    note(f"{name}: error: {type(error).__name__}: {error} (--verbose shows where)")
    return EXIT_FAILURE
