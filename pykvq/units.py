"""Sizes as people write them."""

from __future__ import annotations

import re

from pykvq.errors import InvalidArgumentError

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str, what: str) -> int:
    """Bytes of a size such as "8G", "512 MiB" or "1.5g"; units are powers of 1024.

    Raises:
        InvalidArgumentError: it is no size; ``what`` names it.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or len(text) > 32:
        raise InvalidArgumentError(f"{what} {text!r} is no size: give a number with K, M, G or T, as in 8G")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def size_text(n_bytes: float) -> str:
    """A size in the largest unit that keeps it above 1."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"
