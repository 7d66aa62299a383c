"""From the bytes of tokens to text that can be shown at once: whole code points, and no part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from pykvq.errors import InvalidArgumentError


class Utf8Stream:
    """Decodes UTF-8 piece by piece and never splits a code point.

    Bytes that cannot become a code point turn into U+FFFD. Joining all results gives what decoding all bytes at once
    with errors="replace" gives.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """The text that ``data`` completes."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """U+FFFD if the bytes end inside a code point, else nothing."""
        return self._decoder.decode(b"", True)

    @property
    def is_inside_code_point(self) -> bool:
        """Whether bytes of an unfinished code point are held back."""
        return bool(self._decoder.getstate()[0])


_ZERO_WIDTH_JOINER = "\u200d"
# a longer run of joined characters is no character any more
_MAX_CLUSTER = 32


class GraphemeStream:
    """Holds an emoji at the end of a text back until it is known that nothing joins it.

    Families, flags, skin tones and the like are several code points, which come in tokens of their own but are one
    character to a reader (Unicode Standard Annex 29). Text without them passes at once.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """The text up to the last character that may still grow."""
        text = self._held + text
        start = _open_cluster(text)
        self._held = text[start:]
        return text[:start]

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


def _open_cluster(text: str) -> int:
    """Where the emoji begins that a text ends in; the text's length if it ends in none."""
    n_halves = len(text) - len(text.rstrip(_FLAG_HALVES))
    if n_halves:
        return len(text) - n_halves % 2  # two halves make a flag
    for start in range(len(text) - 1, max(-1, len(text) - 1 - _MAX_CLUSTER), -1):
        joined = start > 0 and text[start - 1] == _ZERO_WIDTH_JOINER
        if not (_extends(text[start]) or _is_emoji(text[start]) or joined):
            # a letter or sign with a joiner or a selector after it
            return start if start < len(text) - 1 else len(text)
        if _is_emoji(text[start]) and not _extends(text[start]) and not joined:
            return start
    return len(text)


_FLAG_HALVES = "".join(map(chr, range(0x1F1E6, 0x1F200)))


def _is_emoji(character: str) -> bool:
    return "\U0001f300" <= character <= "\U0001faff" or "\u2600" <= character <= "\u27bf"


def _extends(character: str) -> bool:
    """Joiners, variation selectors, skin tones, and the tags of regional flags."""
    return (
        character == _ZERO_WIDTH_JOINER
        or "\ufe00" <= character <= "\ufe0f"
        or "\U0001f3fb" <= character <= "\U0001f3ff"
        or "\U000e0020" <= character <= "\U000e007f"
    )


class StopMatcher:
    """Finds the first stop string to be completed in a text that arrives in pieces.

    Text that may be the start of a stop string is held back until it is known. If two stop strings end at the same
    character, the longer one wins.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """The text that is now sure to be before any stop string. Nothing comes after a match."""
        if self.matched:
            return ""
        text = self._held + text
        start = self._match_start(text)
        if start is not None:
            self.matched = True
            self._held = ""
            return text[:start]
        n_held = self._n_undecided(text)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def finish(self) -> str:
        """What was held back, as no stop string can follow any more."""
        held, self._held = self._held, ""
        return held

    def _match_start(self, text: str) -> int | None:
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stops if stop in text]
        return min(found)[1] if found else None

    def _n_undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string starts with."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for n in range(min(longest, len(text)), 0, -1):
            end = text[len(text) - n :]
            if any(stop.startswith(end) for stop in self._stops):
                return n
        return 0


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The stop strings of a request: None, one string or several.

    Raises:
        InvalidArgumentError: one is empty or not a string.
    """
    if stop is not None and not isinstance(stop, (str, list, tuple)):
        raise InvalidArgumentError(f"stop must be a string or a list of strings, got {stop!r}")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not isinstance(text, str) or not text:
            raise InvalidArgumentError(f"a stop string must be a string of at least one character, got {text!r}")
    return stops
