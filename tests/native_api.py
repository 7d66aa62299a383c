"""Thin wrappers over the C API for tests that look below the Python package.

A failed call raises NativeError with the status and the message of the library. Tiers are written
``"f16:64+q8_0/q4_ve:128+q2_t"``: TYPE[/VTYPE][:TOKENS], youngest first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pykvq._cffi import ffi, lib


class NativeError(Exception):
    """A failed call; ``status`` is the name of its pykvq_status without the prefix, such as NO_SPACE."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def check(status: int) -> None:
    if status:
        name = ffi.typeof("pykvq_status").elements[status]
        raise NativeError(name.removeprefix("PYKVQ_STATUS_"), ffi.string(lib.pykvq_last_error()).decode())


def status_of(call: Callable[[], object]) -> str:
    """OK, or the status that a call fails with."""
    try:
        call()
    except NativeError as error:
        return error.status
    return "OK"


@dataclass(frozen=True)
class TierSpec:
    """A tier as asked for; ``n_tokens`` 0 means the rest."""

    type_k: str
    type_v: str
    n_tokens: int
    layers: dict[int, tuple[str, str]]  # types of K and V where they are others


@dataclass(frozen=True)
class TierUse:
    """A tier as it is."""

    type_k: str
    type_v: str
    n_capacity: int
    n_used: int
    n_bytes: int
    n_requantized: int


def parse_tiers(text: str) -> list[TierSpec]:
    tiers = []
    for part in text.split("+"):
        match = re.fullmatch(r"(\w+)(?:/(\w+))?(?:@([^:]+))?(?::(\d+))?", part)
        assert match, part
        type_k, type_v = match[1], match[2] or match[1]
        layers: dict[int, tuple[str, str]] = {}
        for own in match[3].split(",") if match[3] else ():
            name, own_type = own.split("=")
            k, v = layers.get(int(name[1:]), (type_k, type_v))
            layers[int(name[1:])] = (own_type, v) if name[0] == "k" else (k, own_type)
        tiers.append(TierSpec(type_k, type_v, int(match[4] or 0), layers))
    return tiers


def block_size(kv_type: str) -> int:
    return int(lib.pykvq_kv_type_block_size(kv_type.encode()))


def row_bytes(kv_type: str, n: int) -> int:
    """Bytes of n values, n a multiple of the block size."""
    return n // block_size(kv_type) * int(lib.pykvq_kv_type_block_bytes(kv_type.encode()))


def encode(kv_type: str, x: NDArray[Any]) -> bytes:
    """The reference encoder over all values of x."""
    values = np.ascontiguousarray(x, dtype=np.float32)
    data = bytearray(row_bytes(kv_type, values.size))
    source = ffi.cast("float *", ffi.from_buffer(values))
    check(lib.pykvq_kv_type_encode(kv_type.encode(), source, values.size, ffi.from_buffer(data)))
    return bytes(data)


def decode(kv_type: str, data: bytes, n: int) -> NDArray[np.float32]:
    assert len(data) == row_bytes(kv_type, n)
    values = np.empty(n, dtype=np.float32)
    target = ffi.cast("float *", ffi.from_buffer(values))
    check(lib.pykvq_kv_type_decode(kv_type.encode(), ffi.from_buffer(data), n, target))
    return values


class Model:
    def __init__(self, path: Path | str, **params: Any) -> None:
        native_params = ffi.new("pykvq_model_params *", lib.pykvq_model_default_params())
        for name, value in params.items():
            setattr(native_params, name, value)
        handle = ffi.new("pykvq_model **")
        check(lib.pykvq_model_load(str(path).encode(), native_params, handle))
        self.handle = ffi.gc(handle[0], lib.pykvq_model_free)
        self.info = ffi.new("pykvq_model_info *")
        lib.pykvq_model_get_info(self.handle, self.info)

    @property
    def n_vocab(self) -> int:
        return int(self.info.n_vocab)

    def predict(self, tiers: str | None = None, **params: Any) -> tuple[int, int]:
        """Bytes of the KV cache of such a context, and of the same in F16."""
        native_params, _keep = context_params(tiers, **params)
        n_bytes, n_bytes_f16 = ffi.new("int64_t *"), ffi.new("int64_t *")
        check(lib.pykvq_predict_kv(self.handle, native_params, n_bytes, n_bytes_f16))
        return int(n_bytes[0]), int(n_bytes_f16[0])


def context_params(tiers: str | None, **params: Any) -> tuple[Any, list[Any]]:
    """The native struct, and what must live as long as it."""
    native_params = ffi.new("pykvq_context_params *", lib.pykvq_context_default_params())
    native_params.n_threads = 1
    keep: list[Any] = []

    def text(value: str) -> Any:
        keep.append(ffi.new("char[]", value.encode()))
        return keep[-1]

    for name, value in params.items():
        setattr(native_params, name, text(value) if isinstance(value, str) else value)
    if tiers:
        specs = parse_tiers(tiers)
        array = ffi.new("pykvq_kv_tier[]", len(specs))
        for native_tier, spec in zip(array, specs, strict=True):
            native_tier.type_k, native_tier.type_v = text(spec.type_k), text(spec.type_v)
            native_tier.n_tokens = spec.n_tokens
            layers = [(i, text(k), text(v)) for i, (k, v) in spec.layers.items()]
            keep.append(ffi.new("pykvq_kv_layer[]", layers))
            native_tier.layers, native_tier.n_layers = keep[-1], len(layers)
        keep.append(array)
        native_params.tiers, native_params.n_tiers = array, len(specs)
    return native_params, keep


def _free_context(_model: Any, context: Any) -> None:
    lib.pykvq_context_free(context)


class Context:
    """A native context. ``tiers`` None is a plain cache of type_k and type_v; other parameters are the C ones."""

    def __init__(self, model: Model, tiers: str | None = None, **params: Any) -> None:
        self.model = model
        native_params, _keep = context_params(tiers, **params)
        handle = ffi.new("pykvq_context **")
        check(lib.pykvq_context_create(model.handle, native_params, handle))
        # holds the model's handle, which must be freed after it whatever is collected first
        self.handle = ffi.gc(handle[0], partial(_free_context, model.handle))
        self.info = ffi.new("pykvq_context_info *")
        lib.pykvq_context_get_info(self.handle, self.info)

    def close(self) -> None:
        ffi.release(self.handle)

    def decode(
        self, tokens: Iterable[int], pos: int | Sequence[int], seq: int | Sequence[int] = 0, want: str = "last"
    ) -> NDArray[np.float32]:
        """Computes the tokens, the first one at ``pos`` if that is a number.

        Returns the logits asked for, [n, n_vocab]: those of the "last" token, of "all" or of "none".
        """
        tokens = [int(token) for token in tokens]
        n = len(tokens)
        positions = list(range(pos, pos + n)) if isinstance(pos, int) else list(pos)
        sequences = [seq] * n if isinstance(seq, int) else list(seq)
        wanted = [want == "all"] * (n - 1) + [want != "none"]
        check(lib.pykvq_decode(self.handle, tokens, positions, sequences, wanted, n))
        return np.array([self.logits(i) for i in range(n) if wanted[i]]).reshape(-1, self.model.n_vocab)

    def prefill(self, tokens: Sequence[int], pos: int = 0, seq: int = 0) -> NDArray[np.float32]:
        """Decodes any number of tokens in batches; the last one's logits, [n_vocab]."""
        n_batch = int(self.info.n_batch)
        for start in range(0, len(tokens), n_batch):
            last = self.decode(tokens[start : start + n_batch], pos + start, seq)
        return last[-1]

    def logits(self, i: int = -1) -> NDArray[np.float32]:
        pointer = lib.pykvq_logits(self.handle, i)
        assert pointer != ffi.NULL, f"no logits of token {i}"
        return np.frombuffer(ffi.buffer(pointer, 4 * self.model.n_vocab), dtype=np.float32).copy()

    def tiers(self) -> list[TierUse]:
        result = []
        info = ffi.new("pykvq_tier_info *")
        for i in range(lib.pykvq_context_tier_count(self.handle)):
            check(lib.pykvq_context_get_tier(self.handle, i, info))
            types = (ffi.string(info.type_k).decode(), ffi.string(info.type_v).decode())
            result.append(TierUse(*types, info.n_capacity, info.n_used, info.n_bytes, info.n_requantized))
        return result

    def used(self) -> list[int]:
        """Tokens in each tier."""
        return [tier.n_used for tier in self.tiers()]

    def clear(self) -> None:
        lib.pykvq_kv_clear(self.handle)

    def remove(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        check(lib.pykvq_kv_remove(self.handle, seq, p0, p1))

    def copy(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        check(lib.pykvq_kv_copy(self.handle, src, dst, p0, p1))

    def keep(self, seq: int) -> None:
        check(lib.pykvq_kv_keep(self.handle, seq))

    def shift(self, seq: int, p0: int, p1: int, delta: int) -> None:
        check(lib.pykvq_kv_shift(self.handle, seq, p0, p1, delta))

    def pos_range(self, seq: int = 0) -> tuple[int, int]:
        return lib.pykvq_kv_pos_min(self.handle, seq), lib.pykvq_kv_pos_max(self.handle, seq)

    def state_size(self, seq: int = -1) -> int:
        n_bytes = ffi.new("size_t *")
        check(lib.pykvq_state_size(self.handle, seq, n_bytes))
        return int(n_bytes[0])

    def save(self, seq: int = -1) -> bytes:
        data = bytearray(self.state_size(seq))
        written = ffi.new("size_t *")
        check(lib.pykvq_state_save(self.handle, seq, ffi.from_buffer(data), len(data), written))
        return bytes(data[: written[0]])

    def load(self, data: bytes, seq: int = -1) -> None:
        check(lib.pykvq_state_load(self.handle, seq, ffi.from_buffer(data or b"\0"), len(data)))


def kl_divergence(reference: NDArray[Any], other: NDArray[Any]) -> float:
    """KL(reference || other) in nats of two rows of logits."""

    def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
        shifted = logits.astype(np.float64) - logits.max()
        return shifted - np.log(np.exp(shifted).sum())

    p, q = log_softmax(reference), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum())
