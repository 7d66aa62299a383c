"""``pykvq-desktop``: the command."""

from __future__ import annotations

import socket
import sys
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import platformdirs
import typer

from pykvq.cli.console import note
from pykvq.cli.program import print_version, require, run_program
from pykvq.desktop.window import Window, window_problem
from pykvq.errors import LibraryError
from pykvq.server.serve import base_url, is_loopback, listening_server
from pykvq.server.settings import DEFAULT_HOST, DEFAULT_PORT, ServerSettings

if TYPE_CHECKING:
    import uvicorn

    from pykvq.desktop.guard import Guard

PROGRAM = "pykvq-desktop"


def _desktop(
    host: Annotated[
        str,
        typer.Option("--host", metavar="ADDRESS", help="Address to listen on; others than this machine's warn."),
    ] = DEFAULT_HOST,
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="Port of the app and of its API; 0: any free one.")
    ] = DEFAULT_PORT,
    no_window: Annotated[
        bool, typer.Option("--no-window", help="Open nothing: print the address for a browser.")
    ] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", metavar="FOLDER", help="Where conversations are kept. [default: the user's]"),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print requests and the native log to stderr.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> int:
    """Chat with GGUF models in a window, see what their KV cache holds, and serve them to other programs."""
    if version:
        return print_version(PROGRAM)
    require(0 <= port < 2**16, "--port", port, "0 to 65535")
    try:
        from pykvq.desktop.app import create_desktop_app
        from pykvq.desktop.desk import Desk
    except ImportError as error:
        raise LibraryError(f"the app needs more packages ({error}): pip install 'pykvq[desktop]'") from error
    desk = Desk(data_dir or Path(platformdirs.user_data_dir("pykvq", appauthor=False)))
    guard = create_desktop_app(desk, ServerSettings(models=(), verbose=verbose), host)
    server, listener = listening_server(guard, host, port, verbose=verbose)
    desk.host, desk.port = host, listener.getsockname()[1]
    desk.url = base_url(host, desk.port)
    address = f"{base_url(_reachable(host), desk.port)}/?token={guard.token}"
    note(f"pykvq-desktop: {address}")
    if not is_loopback(host):
        note("warning: anyone who can reach this address can use the API: set a key at the Server page")
    if no_window:
        server.run([listener])
    else:
        _serve_with_window(server, listener, address, guard)
    return 0 if server.started else 1


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _serve_with_window(server: uvicorn.Server, listener: socket.socket, address: str, guard: Guard) -> None:
    """Serves until the window is closed; where there can be none, a browser is opened."""

    def open_browser(problem: str) -> None:
        note(f"no window ({problem}): opening the browser")
        target = address.replace(guard.token, guard.ticket())
        threading.Thread(target=webbrowser.open, args=(target,), daemon=True).start()  # one in a terminal may block

    def end() -> None:
        server.should_exit = True

    problem = window_problem()
    if problem is not None:
        open_browser(problem)
        server.run([listener])
        return
    window = Window(address, on_closed=end, on_failed=open_browser)
    try:
        server.run([listener])
    finally:
        window.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 for a failure, 2 for wrong usage."""
    return run_program(PROGRAM, _desktop, argv)


if __name__ == "__main__":
    sys.exit(main())
