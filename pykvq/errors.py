"""The exceptions of pykvq: one base class, one subclass for each kind of failure.

Every message is one line that says what went wrong, what was found and what to do.
"""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "BusyError",
    "CalibrationError",
    "ChatFileError",
    "ChatTemplateError",
    "ClosedError",
    "ContextFullError",
    "DeadlineError",
    "DownloadError",
    "InternalError",
    "InvalidArgumentError",
    "LibraryError",
    "ModelFileError",
    "OutOfMemoryError",
    "PykvqError",
    "QueueFullError",
    "StateError",
    "StorageError",
    "UnsupportedArgumentError",
    "UnsupportedModelError",
]


class PykvqError(Exception):
    """Base class of every error that pykvq raises on purpose."""


class LibraryError(PykvqError, ImportError):
    """The native library is missing, or is of another version than the Python package."""


class InvalidArgumentError(PykvqError, ValueError):
    """An argument has a value that the caller can correct."""


class UnsupportedArgumentError(InvalidArgumentError, TypeError):
    """An argument that llama-cpp-python has and pykvq has not."""


class ModelFileError(PykvqError, ValueError):
    """A model file is missing, unreadable, damaged, cut short or not a GGUF file."""


class OutOfMemoryError(PykvqError, MemoryError):
    """An allocation failed: the model or the KV cache does not fit."""


class UnsupportedModelError(PykvqError):
    """The model cannot be run this way (its architecture, or its head size with this KV type)."""


class ContextFullError(PykvqError, ValueError):
    """More tokens than the context holds."""


class AbortedError(PykvqError):
    """The computation was stopped by ``Llama.abort()`` or by a callback."""


class QueueFullError(PykvqError, RuntimeError):
    """More requests at once than may wait."""


class DeadlineError(PykvqError, TimeoutError):
    """A request took longer than its time limit."""


class StateError(PykvqError, ValueError):
    """A saved state or chat is damaged, cut short, or belongs to another model or KV type."""


class CalibrationError(PykvqError, ValueError):
    """A calibration is missing, damaged, of another format or of another model, or cannot be made or stored."""


class InternalError(PykvqError, RuntimeError):
    """A check inside the native runtime failed. This is a defect of pykvq: please report it."""


class ClosedError(PykvqError, RuntimeError):
    """The object was used after ``close()``."""


class BusyError(PykvqError, RuntimeError):
    """A stream was overtaken by a later call, or a call was made from inside a running generation."""


class ChatTemplateError(PykvqError, ValueError):
    """There is no chat template, or it cannot be parsed or refuses the messages."""


class DownloadError(PykvqError, OSError):
    """A model could not be fetched or stored."""


class ChatFileError(StateError):
    """A file given to load a chat from is not one that pykvq saved, or cannot be read."""


class StorageError(PykvqError, OSError):
    """The desktop app's data cannot be read or written, or is damaged."""
