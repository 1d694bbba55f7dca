"""The studio's server: the application, its page, its error messages and its socket."""

from __future__ import annotations

import errno
import ipaddress
import re
import secrets
import socket
import sys
import threading
import traceback
import webbrowser
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nicest import __version__
from nicest.errors import NicestError
from nicest.messages import one_line, printable
from nicest.studio import limits, routes
from nicest.studio.guard import LOOPBACK, Connection, Guard
from nicest.studio.limits import Busy, Desk
from nicest.studio.messages import Problem
from nicest.studio.served import Unready, add_run, name_runs
from nicest.studio.trainer import Trainer

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FOLDER = Path("runs/studio")  # where trainings from the page keep their data and runs
PROBLEMS = (400, 401, 403, 404, 408, 409, 413, 422, 429)  # statuses of refusals
DESCRIPTION = """Trained density models: sample, score, fill in, predict, walk through latent space.

A refusal is an object with one line, `error`. 409 means that the run has no model that can be read now, or one of
another form than the header `nicest-form` names; 429 that there are too many requests at once."""


def create_app(
    runs: Sequence[Path],
    *,
    folder: Path = FOLDER,
    hosts: tuple[str, ...] = LOOPBACK,
    token: str = "",
    desk: Desk | None = None,
    debug: bool = False,
) -> Guard:
    """Return the application behind its guard.

    It serves the named runs and those trained from the page, in `folder`, and nothing else on the disk.
    """
    trainer, served = Trainer(folder), name_runs(runs)
    for path in trainer.runs():
        add_run(served, path)

    def warm() -> None:
        for each in list(served.values()):
            with suppress(Exception):  # the request that meets the error reports it
                each.reopened().reference()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=warm).start()
        yield
        for each in served.values():
            each.close()

    app = FastAPI(
        title="nicest studio",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses={status: {"model": Problem} for status in PROBLEMS},
        redirect_slashes=False,
    )
    app.state.served, app.state.desk, app.state.trainer = served, desk or Desk(), trainer
    add_errors(app, debug)
    add_page(app)
    for router in routes.ROUTERS:
        app.include_router(router)
    return Guard(app, hosts=hosts, body=limits.BODY, token=token)


def add_errors(app: FastAPI, debug: bool) -> None:
    """Answer every error with a JSON object that has one line."""

    def answered(kind: type[Exception], status: int, headers: dict[str, str] | None = None) -> None:
        @app.exception_handler(kind)
        async def refused(_: Request, error: Exception) -> JSONResponse:
            return JSONResponse({"error": str(error)}, status, headers)

    answered(NicestError, 422)
    answered(Unready, 409)
    answered(Busy, 429, {"Retry-After": "1"})

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[-1]  # of the types that a value may have, the last is a number
        if first["type"] == "json_invalid":
            found = f"{first['ctx']['error']}, at character {first['loc'][-1]}"
            return JSONResponse({"error": f"expected JSON in the body, got something else ({found})"}, 422)
        where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
        got = f", got {str(first.get('input'))[:80]!r}" if first["type"] != "missing" else ""
        return JSONResponse({"error": f"{where}: {first['msg']}{got}"}, 422)

    @app.exception_handler(HTTPException)
    async def plain(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        what = f"{request.method} {printable(request.url.path)[:200]} failed with {type(error).__name__}"
        more = "" if debug else " (a bug in nicest: --debug shows where, please report it)"
        print(f"error: {what}: {one_line(error)}{more}", file=sys.stderr, flush=True)
        if debug:
            traceback.print_exception(error)
        return JSONResponse({"error": f"the server failed ({type(error).__name__}); its terminal says more"}, 500)


def add_page(app: FastAPI) -> None:
    """Serve the files of the page, which are read once: an address names one of them or nothing."""
    files = {path.name: path.read_bytes() for path in sorted(PAGE.iterdir()) if path.suffix in TYPES}

    def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, f"there is no {name[:80]!r} here")
        return Response(files[name], media_type=TYPES[Path(name).suffix], headers={"Cache-Control": "no-cache"})

    @app.get("/page/{name:path}", include_in_schema=False)
    async def page(name: str) -> Response:
        return file(name)

    for address, name in {"/": "index.html", "/docs": "docs.html", "/favicon.ico": "icon.svg"}.items():
        app.add_api_route(address, partial(file, name), methods=["GET", "HEAD"], include_in_schema=False)


def is_address(host: str) -> bool:
    """Return True for an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a host."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen()  # clients that come before the server is up wait
    except OSError as error:
        found.close()
        unknown = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        other = "--host" if unknown else "--port"
        raise NicestError(f"cannot listen on {host}, port {port}: {error.strerror}; choose another {other}") from error
    return found


def names(host: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Return the names by which the server may be called."""
    for each in (host, *allowed):
        if not re.fullmatch(r"[a-z0-9_.-]+", each, re.IGNORECASE) and not is_address(each):
            raise NicestError(
                f"expected the name or address of a machine, such as 192.168.0.7, without http:// or port, got {each!r}"
            )
    own: tuple[str, ...] = () if is_address(host) and ipaddress.ip_address(host).is_unspecified else (host,)
    if not own and not allowed:
        raise NicestError(
            f"{host} is every address of this machine: say by which name or address people call it,"
            " with --allow-host NAME"
        )
    return tuple(dict.fromkeys(each.lower() for each in (*own, *allowed, *LOOPBACK)))


def make_server(app: Guard) -> uvicorn.Server:
    """Return a server without a log of its own: `add_errors` prints one line per error."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,  # after which streams are broken off
    )
    return uvicorn.Server(config)


def serve(
    runs: Sequence[Path],
    *,
    folder: Path = FOLDER,
    host: str = "127.0.0.1",
    port: int = 8000,
    allowed: Sequence[str] = (),
    browser: bool = False,
    debug: bool = False,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve the studio until it is interrupted; call `ready(url)` when it listens.

    On any host but this machine's own, the address has a token, and requests need it.
    """
    hosts = names(host, allowed)
    if folder.exists() and not folder.is_dir():
        raise NicestError(f"expected a folder for trainings from the page, got the file {folder}: name another one")
    token = "" if is_loopback(host) and not allowed else secrets.token_urlsafe(24)
    torch.set_num_threads(1)  # requests are small and many: threads would wait for each other
    app = create_app(runs, folder=folder, hosts=hosts, token=token, debug=debug)
    listening = bind(host, port)
    name = allowed[0] if allowed else host
    shown = f"[{name}]" if ":" in name else name
    url = f"http://{shown}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else "")
    ready(url)
    if browser:
        threading.Timer(0.5, webbrowser.open, (url,)).start()
    with listening, suppress(KeyboardInterrupt):
        make_server(app).run(sockets=[listening])
