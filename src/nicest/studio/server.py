"""The studio's server: the application, its page, what it answers to what is wrong, and its sockets."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nicest import __version__
from nicest.errors import NicestError
from nicest.studio import limits
from nicest.studio.endpoints import add_endpoints, add_inpainting
from nicest.studio.guard import LOOPBACK, Guard
from nicest.studio.limits import Busy, Desk
from nicest.studio.messages import Problem
from nicest.studio.served import Served

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PROBLEMS = {
    400: "Called by a name that is not this server's.",
    403: "Asked by a page of another origin.",
    404: "No such run.",
    413: "More bytes than are taken.",
    422: "Not what was expected; the error says what was.",
    429: "Too much at once: try again later.",
}
log = logging.getLogger("nicest.studio")


def create_app(runs: Sequence[Path], *, hosts: tuple[str, ...] = LOOPBACK, jobs: int = limits.JOBS) -> Guard:
    """The whole application, guard included; it serves the runs that are named, and nothing else on the disk."""
    served = name_runs(runs)
    desk = Desk(jobs=jobs)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=warm, args=(list(served.values()),)).start()
        yield
        for each in served.values():
            each.close()

    app = FastAPI(
        title="nicest studio",
        version=__version__,
        description="Trained density models: sample, score, fill in, walk through latent space.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses={code: {"model": Problem, "description": text} for code, text in PROBLEMS.items()},
        redirect_slashes=False,
    )
    add_errors(app)
    add_page(app)
    add_endpoints(app, served, desk)
    add_inpainting(app, served, desk)
    return Guard(app, hosts=hosts, body=limits.BODY)


def name_runs(paths: Sequence[Path]) -> dict[str, Served]:
    """Every run under a name that is safe in an address, made from that of its folder."""
    served: dict[str, Served] = {}
    for path in paths:
        if not path.exists():
            raise NicestError(
                f"expected a run folder, found no {path}: train one with `nicest train`, or `nicest demo`"
            )
        plain = re.sub(r"[^a-z0-9]+", "-", path.resolve().name.lower()).strip("-") or "run"
        number = sum(re.fullmatch(rf"{plain}(-\d+)?", id) is not None for id in served)
        id = f"{plain}-{number + 1}" if number else plain
        served[id] = Served(id, path)
    return served


def warm(runs: Any) -> None:
    """Read the models and count the training scores before anyone asks."""
    for run in runs:
        try:
            run.open().info(run.id, run.name)
            run.open().reference()
        except Exception as error:  # whoever asks is told
            log.debug("%s: %s", run.id, error)


def add_errors(app: FastAPI) -> None:
    """Every refusal is a JSON object with one line."""

    @app.exception_handler(NicestError)
    async def refused(_: Request, error: NicestError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 422)

    @app.exception_handler(Busy)
    async def busy(_: Request, error: Busy) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 429, {"Retry-After": "1"})

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[-1]  # of the kinds that a value may be of, the last is a number
        where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
        got = f", got {str(first.get('input'))[:80]!r}" if first["type"] != "missing" else ""
        return JSONResponse({"error": f"{where}: {first['msg']}{got}"}, 422)

    @app.exception_handler(HTTPException)
    async def plain(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        log.exception("this should not happen", exc_info=error)
        return JSONResponse({"error": f"the server failed ({type(error).__name__}): its terminal shows where"}, 500)


def add_page(app: FastAPI) -> None:
    """The files of the page, read once: an address names one of them or nothing."""
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


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens, or an error that says why there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen()  # who comes before the server is up waits, and is not sent away
    except OSError as error:
        found.close()
        raise NicestError(f"cannot listen on {host}, port {port}: {error.strerror}; choose another --port") from error
    return found


def serve(
    runs: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    browser: bool = False,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve the studio until it is interrupted; `ready(url)` hears when it listens."""
    hosts = tuple(dict.fromkeys((*LOOPBACK, host))) if is_loopback(host) else ()
    torch.set_num_threads(1)  # requests are small and many: threads would wait for one another
    app = create_app(runs, hosts=hosts)
    listening = bind(host, port)
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{listening.getsockname()[1]}/"
    config = uvicorn.Config(app, log_level="warning", server_header=False, timeout_graceful_shutdown=2)
    ready(url)
    if browser:
        threading.Timer(0.5, webbrowser.open, (url,)).start()
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
