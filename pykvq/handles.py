"""Helpers for native handles: ownership, struct fields, strings and arrays of the C API."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pykvq import native
from pykvq.errors import ClosedError, InvalidArgumentError, PykvqError, StateError
from pykvq.kv_config import KVConfig

_FLOAT32_MAX = float(np.finfo(np.float32).max)
# called with 0 to 1 while a model loads; returning False stops the load
ProgressCallback = Callable[[float], "bool | None"]
# a value of a field of a parameter struct; None leaves the library's default
FieldValue = int | float | bool | str | None


class Handle:
    """A native pointer that is freed once: after ``close()``, as soon as nobody uses it any more."""

    def __init__(self, name: str, pointer: Any, free: Callable[[Any], None]) -> None:
        self._name = name
        self._pointer = pointer
        self._free = free
        self._users = 0
        self._closed = False
        self._owner = os.getpid()
        # reentrant, because garbage collection may release a handle while this thread holds the lock
        self._lock = threading.RLock()

    def retain(self) -> Any:
        """The pointer, which stays valid until the matching ``release()``; ClosedError after ``close()``."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"this {self._name} is closed: create a new one")
            require_own_process(self._owner, self._name)
            self._users += 1
            return self._pointer

    def release(self) -> None:
        """Ends what ``retain()`` began."""
        with self._lock:
            self._users -= 1
        self._free_if_idle()

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """Holds the pointer valid inside a with block."""
        pointer = self.retain()
        try:
            yield pointer
        finally:
            self.release()

    def close(self) -> None:
        """Frees the pointer now, or when its last user releases it."""
        self._closed = True
        self._free_if_idle()

    def _free_if_idle(self) -> None:
        with self._lock:
            if not self._closed or self._users or self._pointer is None:
                return
            pointer, self._pointer = self._pointer, None
        if self._owner == os.getpid():  # a forked process has the memory, but not the threads
            self._free(pointer)


def require_own_process(owner: int, name: str) -> None:
    """Refuses to compute in a forked process, which has none of the threads of its parent.

    Raises:
        ClosedError: this process is not ``owner``.
    """
    if owner != os.getpid():
        raise ClosedError(f"this {name} was made in another process, before a fork: create a new one here")


_Self = TypeVar("_Self", bound="Closeable")  # typing.Self needs Python 3.11


class Closeable:
    """What owns native memory: freed by ``close()``, at the end of a with block, or by garbage collection.

    ``close`` may be called again, and on an object whose constructor failed.
    """

    def close(self) -> None:
        """Frees what is owned."""
        raise NotImplementedError

    def __del__(self) -> None:
        self.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class HandleOwner(Closeable):
    """An object that is one native handle, ``_handle``."""

    _handle: Handle

    def close(self) -> None:
        """Frees the native object once nobody uses it any more. Calling it again does nothing."""
        if hasattr(self, "_handle"):
            self._handle.close()

    def use(self) -> contextlib.AbstractContextManager[Any]:
        """Holds the native pointer valid inside a with block."""
        return self._handle.use()


class ProgressGuard:
    """Keeps an exception of a progress callback from being lost in native code.

    The native library holds the guard as a bare pointer: it must outlive the call that gets ``arguments()``.
    """

    def __init__(self, callback: ProgressCallback | None) -> None:
        self._callback = callback
        self._handle = native.load()[0].new_handle(self)
        self.error: BaseException | None = None

    def arguments(self) -> tuple[Any, Any]:
        """The function pointer and the user data for the native call."""
        ffi, lib = native.load()
        return (ffi.NULL, ffi.NULL) if self._callback is None else (lib.pykvq_py_progress, self._handle)

    def check(self, status: int, *, format_error: type[PykvqError] = StateError) -> None:
        """Raises what the callback raised, or else the exception of a ``pykvq_status``."""
        if self.error is not None:
            raise self.error
        native.check(status, format_error=format_error)

    def __call__(self, progress: float) -> bool:
        """Whether to go on."""
        assert self._callback is not None
        try:
            return self._callback(progress) is not False
        except BaseException as error:
            self.error = error
            return False


def fill_struct(struct: Any, values: Mapping[str, FieldValue]) -> list[Any]:
    """Sets the given fields of a native struct; returns the strings it points to, which must be kept alive."""
    ffi, _ = native.load()
    keep_alive: list[Any] = []
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, str):
            keep_alive.append(ffi.new("char[]", _encoded(value, name)))
        # NumPy's numbers too; only NaN is not below or above anything
        if isinstance(value, Real) and not isinstance(value, Integral) and not abs(value) <= _FLOAT32_MAX:
            raise InvalidArgumentError(f"{name}={value!r} is out of range: it is no finite 32-bit number")
        try:
            setattr(struct, name, keep_alive[-1] if isinstance(value, str) else value)
        except (TypeError, OverflowError) as error:
            raise InvalidArgumentError(f"{name}={value!r} is not a value for this parameter: {error}") from error
    return keep_alive


def context_params(kv: KVConfig, values: Mapping[str, FieldValue]) -> tuple[Any, list[Any]]:
    """A filled ``pykvq_context_params`` and what it points to, which must be kept alive."""
    ffi, lib = native.load()
    struct = ffi.new("pykvq_context_params *", lib.pykvq_context_default_params())
    return struct, [*fill_struct(struct, values), *_fill_kv_format(struct, kv)]


def _fill_kv_format(struct: Any, kv: KVConfig) -> list[Any]:
    ffi, _ = native.load()
    if not kv.is_tiered:
        return fill_struct(struct, {"type_k": kv.tiers[0].type_k, "type_v": kv.tiers[0].type_v})
    tiers = ffi.new("pykvq_kv_tier[]", len(kv.tiers))
    keep_alive: list[Any] = [tiers]
    for i, tier in enumerate(kv.tiers):
        values = {"type_k": tier.type_k, "type_v": tier.type_v, "n_tokens": tier.n_tokens}
        layers = ffi.new("pykvq_kv_layer[]", len(tier.layers))
        keep_alive += [layers, *fill_struct(tiers[i], values)]
        for j, layer in enumerate(tier.layers):
            keep_alive += fill_struct(layers[j], asdict(layer))
        tiers[i].n_layers = len(tier.layers)
        tiers[i].layers = layers
    struct.n_tiers = len(kv.tiers)
    struct.tiers = tiers
    struct.n_sink = kv.n_sink
    return keep_alive


def encoded_path(path: str | os.PathLike[str]) -> bytes:
    """A path for the native library."""
    return _encoded(os.fspath(path), "the path")


def _encoded(text: str, name: str) -> bytes:
    """A text, which may be a path with bytes that are no UTF-8, for the native library."""
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{name} {text!r} is not valid Unicode: {error.reason}") from error
    if b"\0" in raw:
        raise InvalidArgumentError(f"{name} {text!r} holds a NUL character")
    return raw


def read_string(read: Callable[[Any, int], int]) -> str | None:
    """Calls a C function that copies a string and returns its full length, again if the buffer was too small."""
    ffi, _ = native.load()
    size = 256
    while True:
        buffer = ffi.new("char[]", size)
        length = read(buffer, size)
        if length < 0:
            return None
        if length < size:
            return bytes(ffi.buffer(buffer, length)).decode("utf-8", "replace")
        size = length + 1


def int32_pointer(array: npt.NDArray[np.int32]) -> Any:
    """An array as ``int32_t *``; the pointer keeps the array alive."""
    return native.load()[0].from_buffer("int32_t[]", array)


def int8_pointer(array: npt.NDArray[np.int8]) -> Any:
    """An array as ``int8_t *``; the pointer keeps the array alive."""
    return native.load()[0].from_buffer("int8_t[]", array)
