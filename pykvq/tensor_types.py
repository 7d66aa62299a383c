"""The types that tensors of a model file have, as the native library knows them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from pykvq import native


@dataclass(frozen=True)
class TensorType:
    """A ggml type: elements a block, and bytes a block."""

    name: str
    block_size: int
    block_bytes: int


@functools.cache
def tensor_type(number: int) -> TensorType | None:
    """The type with this number in a GGUF file, None if there is none."""
    ffi, lib = native.load()
    if not 0 <= number < 1 << 31:
        return None
    name = lib.pykvq_tensor_type_name(number)
    if name == ffi.NULL:
        return None
    text = ffi.string(name).decode("ascii")
    return TensorType(text, lib.pykvq_tensor_type_block_size(number), lib.pykvq_tensor_type_block_bytes(number))
