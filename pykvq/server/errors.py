"""Errors as the OpenAI API reports them: a body, a type, a code, and the HTTP status."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pykvq.errors import (
    ChatTemplateError,
    ClosedError,
    ContextFullError,
    DeadlineError,
    InvalidArgumentError,
    OutOfMemoryError,
    PykvqError,
    QueueFullError,
)

_logger = logging.getLogger("pykvq.server")


class ApiError(Exception):
    """An error with everything that the response needs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after is not None else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def api_error(error: BaseException) -> ApiError:
    """The API's error for an exception of pykvq."""
    text = str(error)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextFullError):
        return ApiError(400, text, code="context_length_exceeded", param="messages")
    if isinstance(error, (InvalidArgumentError, ChatTemplateError)):
        return ApiError(400, text)
    if isinstance(error, QueueFullError):
        return ApiError(429, text, kind="rate_limit_error", code="queue_full", retry_after=1)
    if isinstance(error, DeadlineError):
        return ApiError(504, text, kind="timeout_error", code="deadline_exceeded")
    if isinstance(error, ClosedError):
        return ApiError(503, text, kind="service_unavailable_error", code="model_unloaded", retry_after=1)
    if isinstance(error, OutOfMemoryError):
        return ApiError(503, text, kind="service_unavailable_error", code="out_of_memory")
    if isinstance(error, PykvqError):
        return ApiError(500, text, kind="server_error")
    _logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log tells more", kind="server_error")


def _says_json(request: Request) -> bool:
    """Whether the Content-Type is JSON's, by which FastAPI decides to parse a body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind.startswith("application/") and (kind == "application/json" or kind.endswith("+json"))


def add_error_handlers(app: FastAPI) -> None:
    """Makes every failure of a request an OpenAI error."""

    async def on_error(_request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()

    async def on_invalid_body(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        if first["type"] == "model_attributes_type" and not _says_json(request):
            found = request.headers.get("content-type") or "missing"
            return ApiError(400, f"the header Content-Type is {found}: send JSON with application/json").response()
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{where}: {first['msg']}" if where else first["msg"]
        return ApiError(400, message, param=where or None).response()

    async def on_http_error(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail)).response()

    for kind in (ApiError, PykvqError, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_error)
