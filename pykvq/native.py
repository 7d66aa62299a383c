"""Access to the native library: loading it, its error statuses, and its log lines."""

from __future__ import annotations

import atexit
import functools
import logging
import sys
from typing import Any

from pykvq.errors import (
    AbortedError,
    ContextFullError,
    InternalError,
    InvalidArgumentError,
    LibraryError,
    ModelFileError,
    OutOfMemoryError,
    PykvqError,
    StateError,
    UnsupportedModelError,
)

# PYKVQ_ABI_VERSION of native/api/pykvq.h that this package is written for
ABI_VERSION = 5

logger = logging.getLogger("pykvq")
logger.addHandler(logging.NullHandler())
native_logger = logging.getLogger("pykvq.native")

# pykvq_log_level, and pykvq_status except for FORMAT, whose class depends on what was read
_LOG_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_STATUS_ERRORS: dict[int, type[PykvqError]] = {
    1: InvalidArgumentError,
    2: ModelFileError,
    4: OutOfMemoryError,
    5: UnsupportedModelError,
    6: ContextFullError,
    7: AbortedError,
    8: InternalError,
}
_STATUS_FORMAT = 3


@functools.cache
def load() -> tuple[Any, Any]:
    """The cffi pair ``(ffi, lib)`` of the native library.

    Raises:
        LibraryError: the library is not built, does not load, or has another ABI version.
    """
    try:
        from pykvq._cffi import ffi, lib
    except ImportError as error:
        raise LibraryError(
            f"the native library of pykvq does not load ({error}): reinstall pykvq, "
            "or run `pip install -e .` in a source checkout to build it"
        ) from error
    check_abi(lib)
    _define_callbacks(ffi, lib)
    return ffi, lib


def check_abi(lib: Any) -> None:
    """Refuses a library whose ABI version is not the one of this package."""
    found = lib.pykvq_abi_version()
    if found != ABI_VERSION:
        raise LibraryError(
            f"the native library has ABI version {found}, this package needs {ABI_VERSION}: "
            "reinstall pykvq so that both come from one build"
        )


def check(status: int, *, format_error: type[PykvqError] = StateError) -> None:
    """Raises the exception of a ``pykvq_status``; does nothing for PYKVQ_STATUS_OK.

    ``format_error`` is the class for PYKVQ_STATUS_FORMAT: a model file or a saved state.
    """
    if status == 0:
        return
    ffi, lib = load()
    text = ffi.string(lib.pykvq_last_error()).decode("utf-8", "replace")
    line = " ".join(text.split()) or f"native call failed with status {status} and gave no reason"
    error_class = format_error if status == _STATUS_FORMAT else _STATUS_ERRORS.get(status, InternalError)
    raise error_class(line)


def set_verbose(verbose: bool) -> None:
    """Sends native log lines to the logger "pykvq.native" (process-wide): all of them, or warnings and errors only.

    With ``verbose`` they also go to stderr, unless the program has configured the logger "pykvq" itself.
    """
    ffi, lib = load()
    lib.pykvq_log_set(lib.pykvq_py_log, ffi.NULL, 1 if verbose else 3)
    if not verbose:
        return
    logger.setLevel(logging.DEBUG)
    if all(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


def _define_callbacks(ffi: Any, lib: Any) -> None:
    """Binds the extern "Python" functions that native/api/build_ffi.py declares."""

    @ffi.def_extern()  # type: ignore[untyped-decorator, unused-ignore]
    def pykvq_py_log(level: int, text: Any, _user_data: Any) -> None:
        line = ffi.string(text).decode("utf-8", "replace")
        native_logger.log(_LOG_LEVELS.get(level, logging.INFO), "%s", line)

    def keep_error(_kind: Any, error: BaseException, traceback: Any) -> bool:
        """Gives the guard what a signal's handler raised before the guard was called; the computation stops."""
        if traceback is not None:
            ffi.from_handle(traceback.tb_frame.f_locals["user_data"]).error = error
        return False

    @ffi.def_extern(error=False, onerror=keep_error)  # type: ignore[untyped-decorator, unused-ignore]
    def pykvq_py_progress(progress: float, user_data: Any) -> bool:
        keep_going: bool = ffi.from_handle(user_data)(progress)
        return keep_going

    # a log line from a thread that outlives the interpreter must not call into it
    atexit.register(lambda: lib.pykvq_log_set(ffi.NULL, ffi.NULL, 4))
