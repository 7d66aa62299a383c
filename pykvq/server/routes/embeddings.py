"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request

from pykvq import responses
from pykvq.server.context import context_of
from pykvq.server.errors import ApiError
from pykvq.server.schemas import EmbeddingBody

router = APIRouter()


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingBody, request: Request) -> dict[str, Any]:
    """Embeddings of one text or several, each of length 1."""
    texts: Any = body.input
    if isinstance(texts, str) or (texts and isinstance(texts[0], int)):
        texts = [texts]
    if not texts:
        raise ApiError(400, "the input is empty", param="input")
    async with context_of(request).registry.use(body.model) as (name, llm):
        if body.dimensions not in (None, llm.n_embd()):
            raise ApiError(
                400, f"dimensions must be left out or {llm.n_embd()}, the model's own number", param="dimensions"
            )
        vectors, n_tokens = await llm.embed(texts, normalize=True, truncate=False, return_count=True)
    if np.ndim(vectors[0]) != 1:
        raise ApiError(400, f"the model {name!r} pools no embeddings: use one made for them", param="model")
    if body.encoding_format == "base64":
        vectors = [base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode("ascii") for vector in vectors]
    return responses.embeddings(vectors, n_tokens, name)
