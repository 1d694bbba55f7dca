"""What stands before every request: host, origin and size are checked, and every answer has its headers."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any
from urllib.parse import parse_qs, urlsplit

from nicest.studio import limits

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
PAGES = ("/", "/docs")
PATIENCE = 8  # times as many bytes as are taken are read, and thrown away


class Refused(Exception):
    def __init__(self, status: int, error: str) -> None:
        self.status, self.error = status, error


class Guard:
    """An ASGI application around another.

    `hosts` are the names the server may be called by, which keeps a page elsewhere from reaching it under a name of
    its own. A request that computes something must come from a page of this server, or from a program, which names no
    origin. With a `token`, a browser must have opened the page with it once, and a program must send it as a bearer.
    Bodies are read whole before anything is done with them.
    """

    def __init__(self, app: Any, *, hosts: tuple[str, ...] = LOOPBACK, body: int, token: str = "") -> None:
        self.app, self.hosts, self.body, self.token = app, hosts, body, token

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self.check(scope, headers)
            if self.token and (cookie := self.admit(scope, headers)):
                await redirect(guarded, cookie)
                return
            try:
                whole = await asyncio.wait_for(self.read(receive), limits.BODY_SECONDS)
            except TimeoutError as error:
                raise Refused(
                    408, f"expected the whole request within {limits.BODY_SECONDS} s: send it again"
                ) from error
        except Refused as refused:
            await answer(guarded, refused.status, refused.error)
            return
        await self.app(scope, replay(whole, receive), guarded)

    def check(self, scope: Scope, headers: dict[str, str]) -> None:
        host = headers.get("host", "")
        name = _name(f"//{host}")
        if name not in self.hosts:
            wanted = " or ".join(self.hosts)
            raise Refused(400, f"expected to be called by {wanted}, got {name!r}: --allow-host adds a name")
        reads = scope["method"] in ("GET", "HEAD")
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not (
            reads and scope["path"] in PAGES  # a link from elsewhere may lead here
        ):
            raise Refused(403, "a page of another site may not ask this server for anything")
        if reads:
            return
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"{scope['scheme']}://{host}".lower():
            raise Refused(403, f"a page of {origin[:100]} may not ask this server for anything")
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > self.body:
            raise Refused(413, self.too_large())

    def admit(self, scope: Scope, headers: dict[str, str]) -> str:
        """Refuse who does not know the token; whoever opens the page with it gets a cookie, which is returned."""
        name = f"nicest-{(scope.get('server') or ('', 0))[1]}"  # cookies are of a host, whatever the port
        cookies = (each.strip().partition("=") for each in headers.get("cookie", "").split(";"))
        given = [value for key, _, value in cookies if key == name]
        if (kind := headers.get("authorization", "").split(" ", 1))[0].lower() == "bearer":
            given += kind[1:]
        if any(self.knows(each) for each in given):
            return ""
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        if scope["path"] == "/" and any(self.knows(each) for each in asked):
            return f"{name}={self.token}; HttpOnly; SameSite=Lax; Path=/"
        raise Refused(
            401, "expected the token: open the whole address that `nicest studio` printed, ?token=... included"
        )

    def knows(self, given: str) -> bool:
        return secrets.compare_digest(given.strip().encode(), self.token.encode())

    async def read(self, receive: Any) -> bytes:
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


async def redirect(send: Any, cookie: str) -> None:
    """To the page without the token in its address, which history and screens would keep."""
    headers = [(b"location", b"/"), (b"set-cookie", cookie.encode()), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


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
