"""What every request to the desktop app passes: who may talk to it, and the switch and the log of the server."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pykvq.server.errors import ApiError
from pykvq.server.middleware import key_error
from pykvq.server.serve import is_loopback

_LOGGED = 200
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)
_PAGE_HEADERS = (
    (b"content-security-policy", _POLICY.encode("ascii")),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


@dataclass(frozen=True)
class LoggedRequest:
    """A request to the server: never what it contained."""

    time: float
    method: str
    path: str
    status: int
    seconds: float


@dataclass
class ServerSwitch:
    """Whether the API answers, with which key, and what it was asked."""

    is_on: bool = True
    api_keys: tuple[str, ...] = ()
    requests: deque[LoggedRequest] = field(default_factory=lambda: deque(maxlen=_LOGGED))


class Guard:
    """ASGI middleware: refuses other hosts and web sites, and pages without the session's token.

    Args:
        host: the address that is listened on.
        port: called for the port, which names the cookie, since cookies of all ports go to all ports.
        api_routes: the routes of the server; all others are the app's pages, which need the token.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: Callable[[], int], api_routes: Sequence[BaseRoute], switch: ServerSwitch
    ) -> None:
        self.app = app  # NiceGUI looks for its server by this name
        self._host = host
        self._port = port
        self._api_routes = api_routes
        self._switch = switch
        self.token = secrets.token_urlsafe(32)
        self._tickets: set[str] = set()

    def ticket(self) -> str:
        """A token that opens a page once. It is for command lines, which other users of the machine can read."""
        ticket = secrets.token_urlsafe(32)
        self._tickets.add(ticket)
        return ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or refuses it."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        is_api = scope["type"] == "http" and self._is_api(scope)
        refusal = self._foreign(headers)
        if refusal is None:
            refusal = self._api_refusal(scope) if is_api else self._page_refusal(scope, headers)
        if refusal is not None and scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        send = self._logged(scope, send) if is_api else _with_headers(send)
        await (self.app if refusal is None else refusal)(scope, receive, send)

    def _is_api(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] != Match.NONE for route in self._api_routes)

    def _foreign(self, headers: dict[str, str]) -> Response | None:
        """Names that lead here by a trick (DNS rebinding), and scripts of other web sites."""
        host = headers.get("host", "")
        if not self._is_own(host):
            return PlainTextResponse(
                f"refused: the address {host[:100]!r} is not this app's; open it by the address that it prints\n", 403
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return PlainTextResponse(f"refused: web pages of {origin[:100]!r} may not use this app\n", 403)
        return None

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in ("localhost", self._host):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not is_loopback(self._host)

    def _api_refusal(self, scope: Scope) -> Response | None:
        if not self._switch.is_on:
            text = "the server is switched off: switch it on at the app's Server page"
            return ApiError(503, text, kind="service_unavailable_error", code="server_off").response()
        error = key_error(scope, self._switch.api_keys) if self._switch.api_keys else None
        return None if error is None else error.response()

    def _page_refusal(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        name = f"pykvq_session_{self._port()}"
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(name)
        except CookieError:
            cookie = None
        if cookie is not None and self._is_token(cookie.value):
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["type"] == "http" and scope["method"] == "GET" and (self._is_token(given) or given in self._tickets):
            self._tickets.discard(given)
            response = RedirectResponse(scope["path"], 303)
            response.set_cookie(name, self.token, httponly=True, samesite="strict")
            return response
        return PlainTextResponse(
            "this window does not belong to the running pykvq-desktop: open the address that it printed\n", 403
        )

    def _is_token(self, value: str) -> bool:
        return hmac.compare_digest(value.encode("utf-8"), self.token.encode("utf-8"))

    def _logged(self, scope: Scope, send: Send) -> Send:
        started = time.time()

        async def logged(message: Message) -> None:
            if message["type"] == "http.response.start":
                seconds = time.time() - started
                entry = LoggedRequest(started, scope["method"], scope["path"], message["status"], seconds)
                self._switch.requests.append(entry)
            await send(message)

        return logged


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_PAGE_HEADERS]}
        await send(message)

    return sending
