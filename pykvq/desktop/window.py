"""The app's own window, in a process of its own: a toolkit for windows that fails may end its process."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

_WIDTH, _HEIGHT, _MIN_SIZE = 1200, 800, (400, 500)
_CLOSE_SECONDS = 5.0


def window_problem() -> str | None:
    """Why there can be no window, None if one can be tried."""
    if importlib.util.find_spec("webview") is None:
        return "pywebview is not installed"
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return "there is no display"
    return None


class Window:
    """An open window, or one that fails to open.

    Args:
        address: what it shows. It goes through a pipe: other users of the machine can read command lines.
        on_closed: called from another thread when the user has closed it.
        on_failed: called from another thread with the reason when it has ended otherwise.
    """

    def __init__(self, address: str, on_closed: Callable[[], None], on_failed: Callable[[str], None]) -> None:
        self._on_closed = on_closed
        self._on_failed = on_failed
        self._is_unwanted = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the server, which closes the window
        )
        assert self._process.stdin is not None
        self._process.stdin.write(f"{address}\n")
        self._process.stdin.flush()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Closes it; again does nothing."""
        self._is_unwanted = True
        assert self._process.stdin is not None
        self._process.stdin.close()  # which the window waits for
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _watch(self) -> None:
        assert self._process.stderr is not None
        lines = [line.strip() for line in self._process.stderr if line.strip()]
        code = self._process.wait()
        if self._is_unwanted:
            return
        if code == 0:
            self._on_closed()
        else:
            self._on_failed(_reason(code, lines))


def _reason(code: int, lines: list[str]) -> str:
    if lines:
        return lines[-1] if code == 1 else lines[0]  # our own error, or a toolkit's first complaint
    return signal.Signals(-code).name if code < 0 else f"it ended with {code}"


def _main() -> int:
    address = sys.stdin.readline().strip()
    try:
        import webview

        logging.getLogger("pywebview").setLevel(logging.CRITICAL)  # it logs a traceback for each toolkit that it tries
        webview.settings["ALLOW_DOWNLOADS"] = True  # chats are exported so
        window = webview.create_window(
            "pykvq", address, width=_WIDTH, height=_HEIGHT, min_size=_MIN_SIZE, text_select=True
        )
        webview.start(_close_with_the_app, (window,))
    except Exception as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def _close_with_the_app(window: object) -> None:
    sys.stdin.read()
    window.destroy()  # type: ignore[attr-defined]


if __name__ == "__main__":
    code = _main()
    sys.stderr.flush()
    os._exit(code)  # a thread may still wait for the end of stdin
