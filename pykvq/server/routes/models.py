"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from pykvq.server.context import context_of
from pykvq.server.registry import ModelEntry

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """All models, loaded or not."""
    return {"object": "list", "data": [_describe(entry) for entry in context_of(request).registry.entries.values()]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """One model."""
    return _describe(context_of(request).registry.find(name))


def _describe(entry: ModelEntry) -> dict[str, Any]:
    fields = {
        "id": entry.spec.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "pykvq",
        "state": entry.state,
    }
    llm = entry.llm
    if llm is None:
        return {**fields, "error": entry.error} if entry.error else fields
    details = {
        "description": llm.description(),
        "n_ctx": llm.n_ctx(),  # of one slot
        "n_ctx_train": llm.n_ctx_train(),
        "n_slots": llm.stats().n_slots,
        "n_embd": llm.n_embd(),
        "n_embed_tokens": llm.n_embed_tokens,
        "n_vocab": llm.n_vocab(),
        "tool_format": llm.tool_format.name,
    }
    return {**fields, "meta": details}
