"""Who may talk to the app."""

import asyncio

import httpx
import pytest

pytest.importorskip("nicegui")

from starlette.responses import PlainTextResponse
from starlette.routing import Route

from pykvq.desktop.guard import Guard, ServerSwitch


async def page(scope, receive, send):
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
    else:
        await PlainTextResponse("page")(scope, receive, send)


def guard(host="127.0.0.1", **switch):
    return Guard(page, host, lambda: 1234, [Route("/v1/models", page)], ServerSwitch(**switch))


def get(app, path="/", host="127.0.0.1:1234", method="GET", **headers):
    async def request():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(request())


def cookie(app):
    return f"pykvq_session_1234={app.token}"


def test_a_page_needs_the_token_once_and_the_cookie_afterwards():
    app = guard()
    assert get(app).status_code == 403
    assert get(app, "/?token=wrong").status_code == 403
    assert get(app, f"/?token={app.token}", method="POST").status_code == 403
    first = get(app, f"/models?token={app.token}")
    assert (first.status_code, first.headers["location"]) == (303, "/models")
    assert "httponly" in first.headers["set-cookie"].lower()
    assert "samesite=strict" in first.headers["set-cookie"].lower()
    assert get(app, cookie=cookie(app)).text == "page"
    assert get(app, cookie="pykvq_session_1234=wrong").status_code == 403
    assert get(app, cookie=f"pykvq_session_9={app.token}").status_code == 403
    assert "default-src 'self'" in get(app, cookie=cookie(app)).headers["content-security-policy"]


def test_a_ticket_opens_a_page_once():
    app = guard()
    ticket = app.ticket()
    assert get(app, f"/?token={ticket}", method="POST").status_code == 403
    assert get(app, cookie=f"pykvq_session_1234={ticket}").status_code == 403
    first = get(app, f"/?token={ticket}")
    assert first.status_code == 303
    assert ticket not in first.headers["set-cookie"]
    assert get(app, f"/?token={ticket}").status_code == 403


@pytest.mark.parametrize("path", ["/", "/v1/models"])
@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:1234", True),
        ("localhost:1234", True),
        ("[::1]:1234", True),
        ("evil.example:1234", False),
        ("127.0.0.1.evil.example", False),
        ("192.168.0.7:1234", False),
    ],
)
def test_other_hosts_are_refused(path, host, allowed):
    app = guard()
    assert (get(app, path, host, cookie=cookie(app)).status_code == 200) is allowed


@pytest.mark.parametrize("host", ["", "[::1", "127.0.0.1:1234@evil.example", "localhost."])
def test_hosts_that_are_none_are_refused(host):
    app = guard()
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [(b"host", host.encode())]}
    scope["headers"].append((b"cookie", cookie(app).encode()))
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, None, send))
    assert sent[0]["status"] == 403


def test_when_listening_to_the_network_addresses_are_allowed_and_names_are_not():
    app = guard("0.0.0.0")
    assert get(app, "/v1/models", "192.168.0.7:1234").status_code == 200
    assert get(app, "/v1/models", "evil.example:1234").status_code == 403


@pytest.mark.parametrize("path", ["/", "/v1/models"])
@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:1234", "http://[", "", "://"],
)
def test_scripts_of_other_sites_are_refused(path, origin):
    app = guard()
    for method in ("GET", "POST"):
        assert get(app, path, method=method, origin=origin, cookie=cookie(app)).status_code == 403
    assert get(app, path, origin="http://127.0.0.1:1234", cookie=cookie(app)).status_code == 200


def test_the_api_needs_no_token_but_its_key_and_its_switch():
    assert get(guard(), "/v1/models").status_code == 200
    assert get(guard(api_keys=("k",)), "/v1/models").status_code == 401
    assert get(guard(api_keys=("k",)), "/v1/models", authorization="Bearer k").status_code == 200
    off = get(guard(is_on=False), "/v1/models")
    assert (off.status_code, off.json()["error"]["code"]) == (503, "server_off")


def test_requests_to_the_api_are_logged_without_their_content():
    app = guard()
    get(app, "/v1/models?secret=1")
    get(app, cookie=cookie(app))
    (entry,) = app._switch.requests
    assert (entry.method, entry.path, entry.status) == ("GET", "/v1/models", 200)
    assert "secret" not in repr(entry)


@pytest.mark.parametrize(("origin", "is_open"), [("http://127.0.0.1:1234", True), ("http://evil.example", False)])
def test_websockets_of_other_sites_are_refused(origin, is_open):
    app = guard()
    headers = [(b"host", b"127.0.0.1:1234"), (b"origin", origin.encode()), (b"cookie", cookie(app).encode())]
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message["type"])

    scope = {"type": "websocket", "path": "/_nicegui_ws/socket.io/", "headers": headers, "query_string": b""}
    asyncio.run(app(scope, receive, send))
    assert sent == ["websocket.accept" if is_open else "websocket.close"]
    sent.clear()
    asyncio.run(app({**scope, "headers": headers[:2]}, receive, send))
    assert sent == ["websocket.close"]
