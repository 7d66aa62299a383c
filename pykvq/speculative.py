"""Drafts: tokens that are guessed cheaply and checked together, which gives the same answer in fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pykvq.errors import InvalidArgumentError

# all token ids so far -> the ids that may come next
Draft: TypeAlias = Callable[[npt.NDArray[np.int32]], Any]


class PromptLookup:
    """Guesses that what followed the last occurrence of the newest tokens follows again.

    Good where the answer repeats the prompt: summaries, edits, code (Saxena 2023, "Prompt Lookup Decoding").

    Args:
        max_ngram_size: most tokens to look for; longer matches are tried first.
        num_pred_tokens: tokens to guess.
    """

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        if max_ngram_size < 1 or num_pred_tokens < 1:
            raise InvalidArgumentError(
                f"max_ngram_size and num_pred_tokens must be 1 or more, got {max_ngram_size} and {num_pred_tokens}"
            )
        self.max_ngram_size = max_ngram_size
        self.num_pred_tokens = num_pred_tokens

    def __call__(self, input_ids: npt.NDArray[np.int32], /, **_unused: Any) -> npt.NDArray[np.int32]:
        """The guess, empty if the newest tokens never came before."""
        ids = np.asarray(input_ids, dtype=np.int32)
        for n in range(min(self.max_ngram_size, len(ids) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], n)
            found = np.flatnonzero((windows == ids[-n:]).all(axis=1))
            if len(found):
                start = int(found[-1]) + n
                return ids[start : start + self.num_pred_tokens]
        return ids[:0]


# the name that llama-cpp-python gives it
LlamaPromptLookupDecoding = PromptLookup
