"""The text that calibrates where none is given."""

from __future__ import annotations

from pydoc_data.topics import topics

# characters of one piece; enough for a text's tokens in languages and tokenizers that need most
_PIECE = 2048


def default_text_pieces(n: int) -> list[str]:
    """n pieces, evenly spread over the help topics that every CPython carries: prose, tables and code."""
    text = "\n".join(topics.values())
    step = max(1, (len(text) - _PIECE) // max(1, n))
    return [text[i * step : i * step + _PIECE] for i in range(n)]
