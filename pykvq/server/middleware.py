"""What every request passes before its route: the API key and the limit of its size."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pykvq.server.errors import ApiError

# load balancers ask without a key
_OPEN_PATHS = ("/health", "/v1/health")


class ApiKeyMiddleware:
    """Refuses requests without one of the keys."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 401."""
        error = key_error(scope, self._keys) if scope["type"] == "http" else None
        await (self._app if error is None else error.response())(scope, receive, send)


def key_error(scope: Scope, api_keys: Sequence[str]) -> ApiError | None:
    """The error for an HTTP request that needs a key and has none of these; None if it may pass."""
    if scope["path"] in _OPEN_PATHS:
        return None
    header = dict(scope["headers"]).get(b"authorization", b"")
    scheme, _, key = header.partition(b" ")
    # all keys are compared, so that the time says nothing about which one was close
    matches = [hmac.compare_digest(key.strip(), known.encode("utf-8")) for known in api_keys]
    if scheme.lower() == b"bearer" and any(matches):
        return None
    return ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")


class BodyLimitMiddleware:
    """Refuses requests of more than a number of bytes, by their header or once they have come that far."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._error().response()(scope, receive, send)
            return
        n_received, is_too_large, has_started = 0, False, False

        async def limited() -> Message:
            nonlocal n_received, is_too_large
            message = await receive()
            n_received += len(message.get("body", b""))
            is_too_large = n_received > self._max_bytes
            return {"type": "http.disconnect"} if is_too_large else message

        async def checked(message: Message) -> None:
            nonlocal has_started
            if not is_too_large:
                has_started = True
                await send(message)

        try:
            await self._app(scope, limited, checked)
        except ClientDisconnect:
            if not is_too_large:
                raise
        if is_too_large and not has_started:
            await self._error().response()(scope, receive, send)

    def _error(self) -> ApiError:
        return ApiError(413, f"the request is larger than {self._max_bytes} bytes", code="request_too_large")
