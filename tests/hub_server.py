"""A local HTTP server that speaks as much of the Hugging Face hub's API as a download needs, and can misbehave."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """``files`` are served from every repository of ``repos``; the rest is how to misbehave."""

    repos: tuple[str, ...] = ("org/repo",)
    files: dict[str, bytes] = field(default_factory=dict)
    wrong_hashes: set[str] = field(default_factory=set)
    token: str | None = None  # what a private repository asks for
    gated: bool = False
    drop_after: list[int] = field(default_factory=list)  # bytes after which the next downloads break off
    ignore_ranges: bool = False
    status: int | None = None  # what every request gets
    info: bytes | None = None  # what is answered instead of a repository's description
    sizes: dict[str, int] = field(default_factory=dict)  # what is said of a file's size, if not the truth
    files_at: str | None = None  # another server, which downloads are sent to
    headers: dict[str, str] = field(default_factory=dict)  # of every answer
    hold: threading.Event | None = None  # two thirds of a download come at once, the rest when it is set
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # (method, path, range)
    tokens: list[str | None] = field(default_factory=list)

    def __enter__(self) -> HubServer:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def downloads(self) -> list[str | None]:
        """The ranges of the downloads so far."""
        return [span for method, path, span in self.requests if method == "GET" and "/resolve/" in path]

    def sibling(self, name: str) -> dict[str, object]:
        digest = hashlib.sha256(self.files[name]).hexdigest() if name not in self.wrong_hashes else "0" * 64
        size = self.sizes.get(name, len(self.files[name]))
        return {
            "rfilename": name,
            "size": size,
            "blobId": "0" * 40,
            "lfs": {"sha256": digest, "size": size, "pointerSize": 134},
        }


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        self.hub.tokens.append(self.headers.get("Authorization"))
        if self.hub.status is not None:
            self._send(self.hub.status, b"")
        elif self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._send(401, b"", {"X-Error-Code": "GatedRepo" if self.hub.gated else "RepoNotFound"})
        else:
            self._route(path)

    def _route(self, path: str) -> None:
        for repo in self.hub.repos:
            if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
                info = self._model_info(repo) if self.hub.info is None else self.hub.info
                self._send(200, info, {"Content-Type": "application/json"})
                return
            prefix = f"/{repo}/resolve/{COMMIT}/"
            if path.startswith(prefix) and self.hub.files_at is not None:
                self._send(302, b"", {"Location": self.hub.files_at + self.path})
                return
            if path.startswith(prefix):
                self._send_file(path.removeprefix(prefix))
                return
        self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _model_info(self, repo: str) -> bytes:
        siblings = [self.hub.sibling(name) for name in self.hub.files]
        return json.dumps(
            {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
        ).encode()

    def _send_file(self, name: str) -> None:
        content = self.hub.files.get(name)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        start = 0
        span = self.headers.get("Range")
        if span and not self.hub.ignore_ranges:
            start = int(span.removeprefix("bytes=").rstrip("-"))
        if start >= len(content):
            self._send(416, b"")
            return
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        cut = self.hub.drop_after.pop(0) if self.hub.drop_after and self.command == "GET" else len(body)
        self._send(206 if start else 200, body, headers, cut)

    def _write(self, body: bytes) -> None:
        hold = self.hub.hold if len(body) > 1_000_000 else None  # descriptions are not held
        at_once = len(body) if hold is None else len(body) * 2 // 3
        with contextlib.suppress(ConnectionError):  # the client was killed
            self.wfile.write(body[:at_once])
            if hold is not None:
                hold.wait(60)
                self.wfile.write(body[at_once:])

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**self.hub.headers, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self._write(body[:cut])
        if cut is not None and cut < len(body):
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
