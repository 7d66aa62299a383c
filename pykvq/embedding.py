"""Embeddings of texts, several texts in a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pykvq.errors import InvalidArgumentError
from pykvq.runtime import Context, FloatArray

# a vector of n_embd values, or one such vector a token where the model pools nothing
Embedding = list[float] | list[list[float]]

# sequences of a context for embeddings: texts that are computed together
MAX_BATCH_TEXTS = 16


def embed_texts(context: Context, texts: Sequence[Sequence[int]], *, normalize: bool) -> list[Embedding]:
    """The embeddings of texts, given by their tokens; the KV cache is empty afterwards.

    Raises:
        InvalidArgumentError: a text has no tokens, or more than a batch takes.
    """
    limit = min(context.info.n_batch, context.info.n_ctx_seq)
    for tokens in texts:
        if not 1 <= len(tokens) <= limit:
            raise InvalidArgumentError(f"a text to embed must have 1 to {limit} tokens (n_batch), got {len(tokens)}")
    result: list[Embedding] = []
    try:
        for batch in _batches(texts, limit, context.info.n_seq_max):
            context.kv_clear()
            result += _embed_batch(context, batch, normalize)
    finally:
        context.kv_clear()
    return result


def _batches(texts: Sequence[Sequence[int]], max_tokens: int, max_texts: int) -> Iterator[Sequence[Sequence[int]]]:
    start, n_tokens = 0, 0
    for i, tokens in enumerate(texts):
        if i > start and (n_tokens + len(tokens) > max_tokens or i - start == max_texts):
            yield texts[start:i]
            start, n_tokens = i, 0
        n_tokens += len(tokens)
    if start < len(texts):
        yield texts[start:]


def _embed_batch(context: Context, texts: Sequence[Sequence[int]], normalize: bool) -> list[Embedding]:
    tokens = [token for text in texts for token in text]
    positions = [i for text in texts for i in range(len(text))]
    sequences = [seq for seq, text in enumerate(texts) for _ in text]
    context.decode_batch(tokens, positions, sequences, [True] * len(tokens))
    result: list[Embedding] = []
    first = 0
    for seq, text in enumerate(texts):
        pooled = context.pooled_embedding(seq)
        if pooled is not None:
            result.append(_values(pooled, normalize))
        else:
            result.append([_values(context.embeddings(first + i), normalize) for i in range(len(text))])
        first += len(text)
    return result


def _values(vector: FloatArray, normalize: bool) -> list[float]:
    norm = float(np.linalg.norm(vector)) if normalize else 1.0
    return [float(value) for value in vector / (norm or 1.0)]
