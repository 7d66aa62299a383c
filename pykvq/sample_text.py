"""The text that calibrates and measures where none is given, and pieces of a text."""

from __future__ import annotations

from pydoc_data.topics import topics


def sample_text() -> str:
    """The help topics that every CPython carries, about half a million characters of prose, tables and code."""
    return "\n".join(topics.values())


def spread_starts(n_all: int, n_piece: int, n_pieces: int) -> list[int]:
    """Where pieces of length n_piece start that are evenly spread over n_all, from its start to its end."""
    step = (n_all - n_piece) // max(1, n_pieces - 1)
    return [i * step for i in range(n_pieces)]
