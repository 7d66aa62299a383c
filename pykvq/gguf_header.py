"""Reads the header of a GGUF file, and nothing else of it: metadata and where the tensors are.

The file may be hostile or larger than memory. Every length is checked against the rest of the file and against a
limit before anything is read or allocated, long values are skipped, and only one window of the file is held at a time.
The format is described in the GGUF specification of the ggml project.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pykvq.errors import ModelFileError
from pykvq.file_names import part_paths
from pykvq.tensor_types import tensor_type

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 16
MAX_STRINGS = 1 << 21  # of one array; the largest vocabularies have some 300,000 tokens
MAX_DIMS = 4
# longer values are skipped: nobody looks at them, and they could be as long as the file
KEPT_STRING_BYTES = 1 << 20
KEPT_ELEMENTS = 1 << 12
KEPT_STRINGS = 64
_KEPT_TOTAL_BYTES = 1 << 23
_WINDOW_BYTES = 1 << 20

# value types of the metadata by number; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_ALIGNMENT = "general.alignment"

Value = Any  # int, float, bool, str, list of these, or Skipped


@dataclass(frozen=True)
class Skipped:
    """A value that was too long to keep: ``length`` bytes of a string or elements of an array."""

    length: int


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the file: its shape, innermost dimension first, and its place in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    n_bytes: int

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True)
class Header:
    """The header of one GGUF file."""

    path: Path
    version: int
    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    file_bytes: int

    def length(self, key: str) -> int:
        """Elements of an array of the metadata, 0 if there is none."""
        value = self.metadata.get(key)
        return value.length if isinstance(value, Skipped) else len(value) if isinstance(value, list) else 0


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a GGUF file; of a split model, that of this part alone.

    Raises:
        ModelFileError: the file is missing, unreadable, no regular file, damaged, cut short or not a GGUF file.
    """
    path = Path(path)
    try:
        with _open_regular(path) as file:
            return _Parser(path, file).parse()
    except ValueError as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"cannot read {str(path)!r}: {error}") from error
    except OSError as error:
        raise ModelFileError(f"cannot read '{path}': {error.strerror or error}") from error


def read_headers(path: str | os.PathLike[str]) -> list[Header]:
    """The headers of all parts of a model, the one with the metadata first.

    Raises:
        ModelFileError: as ``read_header``, a part is missing, or the parts do not belong together.
    """
    paths = part_paths(path)
    missing = [part.name for part in paths if not part.exists()]
    if missing and len(missing) < len(paths):
        raise ModelFileError(
            f"{len(missing)} of the {len(paths)} files of '{path}' are missing, the first is {missing[0]}: fetch them"
        )
    headers = [read_header(part) for part in paths]
    count = headers[0].metadata.get("split.count", 1)
    if count not in (0, 1, len(headers)) or (count in (0, 1) and len(headers) > 1):
        raise ModelFileError(
            f"'{path}' says that it is one of {count} files, its name says {len(headers)}: give the files their "
            "original names"
        )
    return headers


def _open_regular(path: Path) -> BinaryIO:
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise ModelFileError(f"'{path}' is a directory: give the path of a .gguf file in it")
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(f"'{path}' is no regular file: give the path of a .gguf file")
    return open(path, "rb", buffering=0)


class _Parser:
    """A cursor over the header."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._position = 0
        self._window = b""
        self._window_start = 0
        self._kept_bytes = 0

    def parse(self) -> Header:
        self._read_magic()
        version = self._number("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = "it is for machines of the other byte order" if swapped in (2, 3) else "convert the model anew"
            raise self._damage(f"GGUF version {version} is not supported, 2 and 3 are: {hint}")
        n_tensors = self._count("tensors", MAX_TENSORS)
        n_keys = self._count("metadata keys", MAX_KEYS)
        metadata = dict(self._read_metadata(n_keys))
        places = [self._read_tensor() for _ in range(n_tensors)]
        if len({place[0] for place in places}) != len(places):
            raise self._damage("two tensors have the same name")
        alignment = metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._damage(f"{_ALIGNMENT} is {alignment!r}, it must be a power of 2")
        data = -(-self._position // alignment) * alignment
        tensors = tuple(self._place(data, alignment, *place) for place in places)
        return Header(self._path, version, metadata, tensors, self._size)

    def _read_magic(self) -> None:
        magic = self._window_at(0, min(4, self._size))[:4]
        if len(magic) < 4:
            raise ModelFileError(f"'{self._path}' is no GGUF model: it is only {self._size} bytes long")
        if magic != b"GGUF":
            found = magic.hex(" ")
            raise ModelFileError(
                f"'{self._path}' is no GGUF model: it starts with bytes {found}, not with 'GGUF'; convert it first"
            )
        self._position = 4

    def _read_metadata(self, n_keys: int) -> Iterator[tuple[str, Value]]:
        seen: set[str] = set()
        for _ in range(n_keys):
            key = self._string(f"the key after {len(seen)} others")
            if not key or key in seen:
                raise self._damage(f"the metadata key {key!r} is empty or stands twice")
            seen.add(key)
            yield key, self._value(key, self._number("I"))

    def _value(self, key: str, kind: int) -> Value:
        if kind == _STRING:
            return self._kept_string(key)
        if kind == _ARRAY:
            return self._array(key)
        return self._scalars(key, kind, 1)[0]

    def _array(self, key: str) -> Value:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            if count > MAX_STRINGS or 8 * count > self._left():
                raise self._damage(f"{key} has {count} strings, more than the file holds or than {MAX_STRINGS}")
            if count <= KEPT_STRINGS:
                return [self._kept_string(key) for _ in range(count)]
            self._skip_strings(key, count)
            return Skipped(count)
        if count <= KEPT_ELEMENTS:
            return self._scalars(key, kind, count)
        self._skip(key, self._scalar_size(key, kind) * count)
        return Skipped(count)

    def _scalar_size(self, key: str, kind: int) -> int:
        if kind not in _SCALARS:
            raise self._damage(f"{key} has the unknown value type {kind}")
        return struct.calcsize("<" + _SCALARS[kind])

    def _scalars(self, key: str, kind: int, count: int) -> list[Value]:
        size = self._scalar_size(key, kind) * count
        values = list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(key, size)))
        if kind == _BOOL:
            if any(value > 1 for value in values):
                raise self._damage(f"{key} is {max(values)}, it must be true or false")
            return [bool(value) for value in values]
        return values

    def _kept_string(self, key: str) -> Value:
        length = self._number("Q")
        if length <= KEPT_STRING_BYTES and self._kept_bytes + length <= _KEPT_TOTAL_BYTES:
            self._kept_bytes += length
            return self._take(key, length).decode("utf-8", "replace")
        self._skip(key, length)
        return Skipped(length)

    def _string(self, what: str) -> str:
        length = self._number("Q")
        if length > MAX_NAME_BYTES:
            raise self._damage(f"{what} has a name of {length} bytes")
        return self._take(what, length).decode("utf-8", "replace")

    def _skip_strings(self, key: str, count: int) -> None:
        """Passes over ``count`` strings; written for speed, since vocabularies are long."""
        position, size, unpack = self._position, self._size, struct.Struct("<Q").unpack_from
        window, start = self._window, self._window_start
        for _ in range(count):
            at = position - start
            if at + 8 > len(window):
                window = self._window_at(position, 8)
                start = self._window_start
                at = position - start
            position += 8 + unpack(window, at)[0]
            if position + 8 > size:
                raise self._cut(key)
        self._position = position

    def _read_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor")
        n_dims = self._number("I")
        if not name or not 1 <= n_dims <= MAX_DIMS:
            raise self._damage(f"tensor {name!r} has {n_dims} dimensions, it must have a name and 1 to {MAX_DIMS}")
        shape = struct.unpack(f"<{n_dims}Q", self._take(name, 8 * n_dims))
        return name, shape, self._number("I"), self._number("Q")

    def _place(
        self, data: int, alignment: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> TensorInfo:
        found = tensor_type(kind)
        if found is None:
            raise self._damage(f"tensor {name!r} has the unknown type {kind}: it may need a newer pykvq")
        if any(not 1 <= size < 1 << 40 for size in shape) or shape[0] % found.block_size:
            raise self._damage(
                f"tensor {name!r} has the shape {list(shape)}, which cannot be {found.name} "
                f"(blocks of {found.block_size})"
            )
        n_bytes = found.block_bytes
        for size in (shape[0] // found.block_size, *shape[1:]):
            n_bytes *= size
        if offset % alignment or data + offset + n_bytes > self._size:
            raise self._damage(
                f"tensor {name!r} lies at bytes {data + offset} to {data + offset + n_bytes} of {self._size}: "
                "the file is cut short or damaged, fetch it again"
            )
        return TensorInfo(name, shape, found.name, data + offset, n_bytes)

    # --- the cursor

    def _count(self, what: str, limit: int) -> int:
        count: int = self._number("Q")
        # the smallest entry, an empty name and its type, has 12 bytes
        if count > limit or 12 * count > self._left():
            raise self._damage(f"it claims {count} {what}, more than the file holds or than {limit}")
        return count

    def _number(self, code: str) -> int:
        value: int = struct.unpack("<" + code, self._take("the header", struct.calcsize("<" + code)))[0]
        return value

    def _left(self) -> int:
        return self._size - self._position

    def _take(self, what: str, size: int) -> bytes:
        if size > self._left():
            raise self._cut(what)
        at = self._position - self._window_start
        if at < 0 or at + size > len(self._window):
            self._window_at(self._position, size)
            at = 0
        self._position += size
        return self._window[at : at + size]

    def _skip(self, what: str, size: int) -> None:
        if size > self._left():
            raise self._cut(what)
        self._position += size

    def _window_at(self, position: int, size: int) -> bytes:
        """Moves the window so that it holds ``size`` bytes from ``position`` on."""
        self._file.seek(position)
        window = b""
        wanted = max(size, _WINDOW_BYTES)
        while len(window) < size:
            block = self._file.read(wanted - len(window))
            if not block:  # it shrank while we read
                raise self._cut("the header")
            window += block
        self._window, self._window_start = window, position
        return window

    def _damage(self, what: str) -> ModelFileError:
        return ModelFileError(f"'{self._path}' is damaged: {what}")

    def _cut(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"'{self._path}' is damaged: the file ends within {what}, after {self._size} bytes; fetch it again"
        )
