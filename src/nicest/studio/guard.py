"""What stands before every request: host, origin and size are checked, and every answer has its headers."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

Scope = dict[str, Any]

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PATIENCE = 8  # times as many bytes as are taken are read, and thrown away


class Refused(Exception):
    def __init__(self, status: int, error: str) -> None:
        self.status, self.error = status, error


class Guard:
    """An ASGI application around another.

    `hosts` are the names the server may be called by, which keeps a page elsewhere from reaching it under a name of
    its own; none stands for any. A request that changes or computes something must come from a page of this server,
    or from a program, which names no origin. Bodies are read whole before anything is done with them.
    """

    def __init__(self, app: Any, *, hosts: tuple[str, ...] = LOOPBACK, body: int) -> None:
        self.app, self.hosts, self.body = app, hosts, body

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        try:
            self.check(scope)
            whole = await self.read(scope, receive)
        except Refused as refused:
            await answer(guarded, refused.status, refused.error)
            return
        await self.app(scope, replay(whole, receive), guarded)

    def check(self, scope: Scope) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        name = _name(f"//{host}")
        if self.hosts and name not in self.hosts:
            raise Refused(400, f"expected to be called by {' or '.join(self.hosts)}, got {name!r}")
        if scope["method"] in ("GET", "HEAD"):
            return
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"{scope['scheme']}://{host}".lower():
            raise Refused(403, f"a page of {origin[:100]} may not ask this server for anything")
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Refused(403, "a page of another site may not ask this server for anything")
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > self.body:
            raise Refused(413, self.too_large())

    async def read(self, scope: Scope, receive: Any) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise Refused(400, "the request was broken off")
            part, more = message.get("body", b""), message.get("more_body")
            size += len(part)
            if size <= self.body:
                parts.append(part)
            elif not more or size > PATIENCE * self.body:  # a client hears no answer while it sends
                raise Refused(413, self.too_large())
            if not more:
                return b"".join(parts)

    def too_large(self) -> str:
        return f"expected at most {self.body / 2**20:g} MB, got more: send a smaller file"


def replay(body: bytes, receive: Any) -> Any:
    """A `receive` that gives the whole body, then waits for what comes: that the client leaves."""
    given = False

    async def again() -> dict[str, Any]:
        nonlocal given
        if given:
            message: dict[str, Any] = await receive()
            return message
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def answer(send: Any, status: int, error: str) -> None:
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


def _name(address: str) -> str:
    try:
        return "" if "@" in address else urlsplit(address).hostname or ""
    except ValueError:
        return ""
