"""Embeddings of texts, one text at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykvq.engine import Engine
from pykvq.errors import InvalidArgumentError
from pykvq.runtime import FloatArray

# a vector of n_embd values, or one such vector a token where the model pools nothing
Embedding = list[float] | list[list[float]]


def embed_tokens(engine: Engine, tokens: Sequence[int], *, normalize: bool) -> Embedding:
    """The embedding of a text's tokens; the KV cache is empty afterwards.

    Raises:
        InvalidArgumentError: no tokens, or more than a batch takes.
    """
    limit = min(engine.context.info.n_batch, engine.n_ctx)
    if not 1 <= len(tokens) <= limit:
        raise InvalidArgumentError(f"a text to embed must have 1 to {limit} tokens (n_batch), got {len(tokens)}")
    engine.reset()
    try:
        engine.context.decode(tokens, 0, [True] * len(tokens))
        pooled = engine.context.pooled_embedding()
        if pooled is not None:
            return _values(pooled, normalize)
        return [_values(engine.context.embeddings(i), normalize) for i in range(len(tokens))]
    finally:
        engine.reset()


def _values(vector: FloatArray, normalize: bool) -> list[float]:
    norm = float(np.linalg.norm(vector)) if normalize else 1.0
    return [float(value) for value in vector / (norm or 1.0)]
