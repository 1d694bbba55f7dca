"""Checks before every request (host, origin, token, size), headers of every answer, and clients that stall."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from nicest.studio import limits

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
PATIENCE = 8  # this many times the size limit is read and dropped, because clients hear no answer while they send


class Guard:
    """ASGI middleware that refuses requests before they reach the application.

    `hosts` are the names by which the server may be called: this keeps a page elsewhere from reaching it under a name
    of its own (DNS rebinding). Requests that compute something must come from a page of this server, or from a
    program, which sends no origin. With a `token`, a browser must have opened the page with it once, and a program
    must send it as a bearer token. Bodies are read completely before the application starts.
    """

    def __init__(self, app: Any, *, hosts: tuple[str, ...] = LOOPBACK, body: int, token: str = "") -> None:
        self.app, self.hosts, self.body, self.token = app, hosts, body, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer: Response | None
        try:
            answer = self.check(request := Request(scope)) or (self.admit(request) if self.token else None)
            whole = b"" if answer else await asyncio.wait_for(self.read(receive), limits.BODY_SECONDS)
        except TimeoutError:
            answer = refusal(408, f"expected the whole request within {limits.BODY_SECONDS} s: send it again")
        except HTTPException as error:
            answer = refusal(error.status_code, error.detail)
        if answer:
            await answer(scope, receive, guarded)
        else:
            await self.app(scope, replay(whole, receive), guarded)

    def check(self, request: Request) -> Response | None:
        """Return a refusal if the host, the origin or the announced size of a request is wrong."""
        headers, host = request.headers, request.headers.get("host", "")
        if (name := host_name(host)) not in self.hosts:
            wanted = " or ".join(self.hosts)
            return refusal(400, f"expected to be called by {wanted}, got {name!r}: --allow-host adds a name")
        reads = request.method in ("GET", "HEAD")
        from_link = reads and request.scope["path"] in PAGES  # pages elsewhere may link to the studio
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not from_link:
            return refusal(403, "a page of another site may not ask this server for anything")
        origin = headers.get("origin")
        if not reads and origin is not None and origin.lower() != f"{request.scope['scheme']}://{host}".lower():
            return refusal(403, f"a page of {origin[:100]} may not ask this server for anything")
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > self.body:
            return refusal(413, self.too_large())
        return None

    def admit(self, request: Request) -> Response | None:
        """Refuse clients without the token; set a cookie for a browser that opens the page with it."""
        name = f"nicest-{(request.scope.get('server') or ('', 0))[1]}"  # cookies ignore ports, so the name has it
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        known = (request.cookies.get(name, ""), bearer if kind.lower() == "bearer" else "")
        if any(self.knows(each) for each in known):
            return None
        if request.scope["path"] != "/" or not self.knows(request.query_params.get("token", "")):
            line = "expected the token: open the whole address that `nicest studio` printed, ?token=... included"
            return refusal(401, line)
        answer = RedirectResponse("/", 303)  # without the token, which history and screens would keep
        answer.set_cookie(name, self.token, httponly=True, samesite="lax")
        return answer

    def knows(self, given: str) -> bool:
        """Compare a token with ours, in constant time."""
        return secrets.compare_digest(given.strip().encode(), self.token.encode())

    async def read(self, receive: Any) -> bytes:
        """Read the whole body, which is never larger than it may be."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise HTTPException(400, "the request was broken off")
            part, more = message.get("body", b""), message.get("more_body")
            size += len(part)
            if size <= self.body:
                parts.append(part)
            elif not more or size > PATIENCE * self.body:
                raise HTTPException(413, self.too_large())
            if not more:
                return b"".join(parts)

    def too_large(self) -> str:
        """Return the error for a body above the limit."""
        return f"expected at most {self.body / 2**20:g} MB, got more: send a smaller file"


def refusal(status: int, line: str) -> Response:
    """Return an error that also closes the connection."""
    return JSONResponse({"error": line}, status, {"Connection": "close"})


def replay(body: bytes, receive: Any) -> Any:
    """Return a `receive` that gives the whole body first, and then reports when the client leaves."""
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Any:
        return next(parts, None) or await receive()

    return again


def host_name(host: str) -> str:
    """Return the name in a Host header, without its port; empty if it is malformed."""
    try:
        return "" if "@" in host else urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class Connection(H11Protocol):
    """A connection that ends if its client stalls, or if there are too many others.

    uvicorn has no time limit for the head of a first request nor for a client that stops reading, and its
    `limit_concurrency` counts requests, not open sockets. (A slow body is refused in words, by `Guard`.)
    """

    reads: asyncio.TimerHandle | None = None
    sends: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > limits.CONNECTIONS:
            transport.abort()
        self.reads = self.loop.call_later(limits.HEAD_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.reads, self.sends):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy and self.reads:
            self.reads.cancel()
            self.reads = None
        elif not busy and not self.reads:  # a part of the next request
            self.reads = self.loop.call_later(limits.HEAD_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.sends = self.loop.call_later(limits.SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.sends:
            self.sends.cancel()
