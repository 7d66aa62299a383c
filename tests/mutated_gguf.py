"""Damaged copies of a GGUF file: each field of its header with wild values, cut short, and with lengths that lie."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SCALAR_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
WILD_VALUES = {"0": 0, "-1": -1, "2^31": 2**31, "2^63": 2**63}
KEPT_TENSORS = 3
N_TYPES = 44  # above the number of value types and of tensor types


@dataclass(frozen=True)
class Field:
    """A number in the header: what it is, and where it stands."""

    name: str
    offset: int
    size: int


class Walk:
    """The fields of a sound GGUF file, in order."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 4
        self.fields: list[Field] = []
        self._number("version", 4)
        n_tensors, n_keys = self._number("n_tensors", 8), self._number("n_keys", 8)
        for i in range(n_keys):
            self._value(self._string(f"key {i}"))
        for i in range(n_tensors):
            self._tensor(i, i < KEPT_TENSORS or i == n_tensors - 1)

    def _number(self, name: str, size: int, keep: bool = True) -> int:
        if keep:
            self.fields.append(Field(name, self.at, size))
        self.at += size
        return int.from_bytes(self.data[self.at - size : self.at], "little")

    def _string(self, name: str, keep: bool = True) -> str:
        length = self._number(f"{name} length", 8, keep)
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def _value(self, key: str) -> None:
        kind = self._number(f"{key} type", 4)
        if kind == STRING:
            self._string(key)
        elif kind == ARRAY:
            element, count = self._number(f"{key} element type", 4), self._number(f"{key} count", 8)
            for i in range(count):
                if element == STRING:
                    self._string(f"{key}[{i}]", keep=i in (0, count - 1))
                else:
                    self.at += SCALAR_SIZES[element]
        else:
            self._number(key, SCALAR_SIZES[kind])

    def _tensor(self, i: int, keep: bool) -> None:
        name = self._string(f"tensor {i} name", keep)
        n_dims = self._number(f"{name} n_dims", 4, keep)
        for i in range(n_dims):
            self._number(f"{name} dim {i}", 8, keep)
        self._number(f"{name} type", 4, keep)
        self._number(f"{name} offset", 8, keep)


def mutations(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Pairs (what was done, the damaged file)."""
    walk = Walk(data)
    for field in walk.fields:
        for label, value in WILD_VALUES.items():
            wild = (value % 2 ** (8 * field.size)).to_bytes(field.size, "little")
            if wild != data[field.offset : field.offset + field.size]:
                yield f"{field.name} = {label}", _replaced(data, field.offset, wild)
        if field.name.endswith(" type"):
            for kind in range(1, N_TYPES):
                yield f"{field.name} = {kind}", _replaced(data, field.offset, struct.pack("<I", kind))
        if field.name.endswith((" length", " count")):
            for extra in (1, len(data), 2**40):
                old = int.from_bytes(data[field.offset : field.offset + 8], "little")
                yield f"{field.name} + {extra}", _replaced(data, field.offset, struct.pack("<Q", old + extra))
    for size in (0, 1, 4, 8, 23, *range(1024, len(data), 1024)):
        yield f"cut after {size} bytes", data[:size]


def _replaced(data: bytes, offset: int, new: bytes) -> bytes:
    return data[:offset] + new + data[offset + len(new) :]


def write_mutations(source: Path, folder: Path) -> dict[str, Path]:
    """Writes all mutations of a file into a folder; returns their paths by what was done."""
    folder.mkdir(exist_ok=True)
    paths = {}
    for i, (name, data) in enumerate(mutations(source.read_bytes())):
        paths[name] = folder / f"{i:04d}.gguf"
        paths[name].write_bytes(data)
    return paths
