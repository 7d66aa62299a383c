"""GET /health, /metrics and /kv; POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pykvq.server.context import context_of
from pykvq.server.errors import ApiError
from pykvq.server.schemas import DetokenizeBody, TokenizeBody

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"])
@router.api_route("/v1/health", methods=["GET", "HEAD"])
async def health(request: Request) -> Response:
    """200 {"status": "ok"}, or 503 while the first model is being loaded or after that has failed."""
    registry = context_of(request).registry
    states = {name: entry.state for name, entry in registry.entries.items()}
    first = states.get(registry.default_name or "")
    if first in ("loading", "failed") and "loaded" not in states.values():
        return JSONResponse({"status": first, "models": states}, 503, {"Retry-After": "1"})
    return JSONResponse({"status": "ok", "models": states})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counters in Prometheus' text format."""
    return Response(generate_latest(request.app.state.metrics), media_type=CONTENT_TYPE_LATEST)


@router.get("/kv")
async def kv(request: Request) -> dict[str, Any]:
    """The KV caches of the loaded models as they are now: tiers, bytes, and the tokens that each slot holds."""
    return {"models": await context_of(request).registry.kv_report()}


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    """The tokens of a text; with_pieces adds the text of each, or its bytes if it is a part of a code point."""
    async with context_of(request).registry.use(body.model) as (_, llm):
        tokens = llm.tokenize(body.content, add_bos=body.add_special, special=body.parse_special)
        if not body.with_pieces:
            return {"tokens": tokens}
        return {
            "tokens": [{"id": token, "piece": _piece(llm.detokenize([token], [0], special=True))} for token in tokens]
        }


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, Any]:
    """The text of tokens."""
    async with context_of(request).registry.use(body.model) as (_, llm):
        n_vocab = llm.n_vocab()
        if any(not 0 <= token < n_vocab for token in body.tokens):
            raise ApiError(400, f"tokens must be ids from 0 to {n_vocab - 1}", param="tokens")
        return {"content": llm.detokenize(body.tokens, special=True).decode("utf-8", "replace")}


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)
