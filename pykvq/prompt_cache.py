"""Caches of saved states, for ``Llama.set_cache``: a prompt that begins like an earlier one is not computed again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pykvq.engine import common_prefix, state_tokens
from pykvq.errors import InvalidArgumentError, StateError

_DEFAULT_CAPACITY = 2 << 30


class PromptCache(ABC):
    """States by the tokens that they hold. The least recently used ones go when ``capacity_bytes`` are exceeded."""

    def __init__(self, capacity_bytes: int = _DEFAULT_CAPACITY) -> None:
        if capacity_bytes < 0:
            raise InvalidArgumentError(f"capacity_bytes must be 0 or more, got {capacity_bytes}")
        self.capacity_bytes = capacity_bytes

    @property
    @abstractmethod
    def cache_size(self) -> int:
        """Bytes of all states."""

    @abstractmethod
    def find(self, tokens: Sequence[int], min_tokens: int) -> bytes | None:
        """The state with the longest common prefix with ``tokens``, if that is longer than ``min_tokens``."""

    @abstractmethod
    def store(self, tokens: Sequence[int], state: bytes) -> None:
        """Keeps a state."""


class RamCache(PromptCache):
    """States in memory."""

    def __init__(self, capacity_bytes: int = _DEFAULT_CAPACITY) -> None:
        super().__init__(capacity_bytes)
        self._states: OrderedDict[tuple[int, ...], bytes] = OrderedDict()

    @property
    def cache_size(self) -> int:
        """Bytes of all states."""
        return sum(map(len, self._states.values()))

    def find(self, tokens: Sequence[int], min_tokens: int) -> bytes | None:
        """The state with the longest common prefix with ``tokens``, if that is longer than ``min_tokens``."""
        best = max(self._states, key=lambda held: common_prefix(held, tokens), default=None)
        if best is None or common_prefix(best, tokens) <= min_tokens:
            return None
        self._states.move_to_end(best)
        return self._states[best]

    def store(self, tokens: Sequence[int], state: bytes) -> None:
        """Keeps a state, and drops the least recently used ones if there is no room."""
        self._states.pop(tuple(tokens), None)
        self._states[tuple(tokens)] = state
        while self._states and self.cache_size > self.capacity_bytes:
            self._states.popitem(last=False)


class DiskCache(PromptCache):
    """States as files in a folder, which several processes may share. Damaged files are removed and not used."""

    _PATTERN = "*.kvqstate"

    def __init__(self, cache_dir: str | os.PathLike[str] = ".cache/pykvq", capacity_bytes: int = _DEFAULT_CAPACITY):
        super().__init__(capacity_bytes)
        self._folder = Path(cache_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tokens: dict[Path, list[int]] = {}

    @property
    def cache_size(self) -> int:
        """Bytes of all states."""
        return sum(path.stat().st_size for path in self._folder.glob(self._PATTERN))

    def find(self, tokens: Sequence[int], min_tokens: int) -> bytes | None:
        """The state with the longest common prefix with ``tokens``, if that is longer than ``min_tokens``."""
        lengths = {path: common_prefix(self._read_tokens(path), tokens) for path in self._folder.glob(self._PATTERN)}
        best = max(lengths, key=lambda path: lengths[path], default=None)
        if best is None or lengths[best] <= min_tokens:
            return None
        with contextlib.suppress(OSError):
            os.utime(best)
            return best.read_bytes()
        return None

    def store(self, tokens: Sequence[int], state: bytes) -> None:
        """Keeps a state, and removes the least recently used ones if there is no room."""
        name = hashlib.sha256(np.asarray(tokens, dtype=np.int32).tobytes()).hexdigest()
        # a reader of another process never sees half a file
        handle, part = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(handle, "wb") as file:
            file.write(state)
        os.replace(part, self._folder / f"{name}.kvqstate")
        paths = sorted(self._folder.glob(self._PATTERN), key=lambda path: path.stat().st_mtime_ns)
        while paths and self.cache_size > self.capacity_bytes:
            paths.pop(0).unlink(missing_ok=True)

    def _read_tokens(self, path: Path) -> list[int]:
        if path not in self._tokens:
            try:
                self._tokens[path] = state_tokens(path.read_bytes())
            except (StateError, OSError):
                path.unlink(missing_ok=True)
                return []
        return self._tokens[path]


# the names that llama-cpp-python gives them
LlamaRAMCache = LlamaCache = RamCache
LlamaDiskCache = DiskCache
