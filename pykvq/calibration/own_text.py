"""Text that a model writes itself: without any text at hand, the nearest to what it will be used on.

What a model samples follows the distribution of what it was trained on (Williams et al. 2025, "Self-calibration for
language model quantization and pruning", use the same for weights).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pykvq.errors import AbortedError
from pykvq.kv_config import parse_kv_config
from pykvq.runtime import Context, Model

_SEED = 0


def write_texts(
    model: Model,
    n_texts: int,
    n_tokens: int,
    *,
    n_threads: int | None = None,
    progress: Callable[[float], bool | None] | None = None,
) -> list[list[int]]:
    """Texts of n_tokens tokens, sampled at temperature 1 from the beginning of a text, all at once.

    The same model gives the same texts, up to rounding. No text ends early: tokens that end one are not sampled.

    Raises:
        AbortedError: ``progress``, called with 0 to 1, returned False. OutOfMemoryError.
    """
    rng = np.random.default_rng(_SEED)
    start = model.info.token_bos if model.info.token_bos >= 0 else model.info.token_eos
    texts = [[max(start, 0)] for _ in range(n_texts)]
    sequences = range(n_texts)
    ending = model.eog_tokens()
    context = Context(
        model,
        parse_kv_config("f16"),
        n_ctx=n_texts * n_tokens,
        n_batch=n_texts,
        n_ubatch=n_texts,
        n_seq_max=n_texts,
        kv_unified=True,
        n_threads=n_threads,
        n_threads_batch=n_threads,
    )
    with contextlib.closing(context):
        for position in range(n_tokens - 1):
            if progress is not None and progress(position / n_tokens) is False:
                raise AbortedError("stopped by its progress callback")
            tokens = [text[-1] for text in texts]
            context.decode_batch(tokens, [position] * n_texts, sequences, [True] * n_texts)
            for i, text in enumerate(texts):
                text.append(_sample(context.logits(i), ending, rng))
    return texts


def _sample(logits: npt.NDArray[np.float32], ending: list[int], rng: np.random.Generator) -> int:
    """By the Gumbel-max trick: one pass over the vocabulary. A model that computes no numbers gets token 0."""
    logits[ending] = -np.inf
    return int(np.argmax(np.nan_to_num(logits, nan=-np.inf) + rng.gumbel(size=len(logits)).astype(np.float32)))
