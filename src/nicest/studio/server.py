"""The studio's server: the application, its page, what it answers to what is wrong, and its sockets."""

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
from nicest.messages import one_line, printable
from nicest.runs.shipped import fetched
from nicest.studio import limits
from nicest.studio.connections import Connection
from nicest.studio.endpoints import add_endpoints
from nicest.studio.guard import LOOPBACK, Guard
from nicest.studio.limits import Busy, Desk
from nicest.studio.messages import Problem
from nicest.studio.served import Served, Unready, add_run
from nicest.studio.trainer import Trainer

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FOLDER = Path("runs/studio")  # where trainings from the page keep their data and runs
PROBLEMS = {
    400: "Called by a name that is not this server's.",
    401: "Asked without the token, where one is needed.",
    403: "Asked by a page of another origin.",
    404: "No such run.",
    408: "The request took too long to arrive.",
    409: "The run has no model that can be read now, or one of another form than the header `nicest-form` names.",
    413: "More bytes than are taken.",
    422: "Not what was expected; the error says what was.",
    429: "Too much at once: try again later.",
}


def create_app(
    runs: Sequence[Path],
    *,
    folder: Path = FOLDER,
    hosts: tuple[str, ...] = LOOPBACK,
    token: str = "",
    desk: Desk | None = None,
    debug: bool = False,
) -> Guard:
    """The whole application, guard included; it serves the runs that are named and those that were trained from the
    page, in the `folder` for that, and nothing else on the disk."""
    served, desk, trainer = name_runs(runs), desk or Desk(), Trainer(folder)
    for path in trainer.runs():
        add_run(served, path)

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
    app.state.served = served
    add_errors(app, debug)
    add_page(app)
    add_endpoints(app, served, desk, trainer)
    return Guard(app, hosts=hosts, body=limits.BODY, token=token)


def name_runs(paths: Sequence[Path]) -> dict[str, Served]:
    """Every run under a name that is safe in an address, made from that of its folder; and every label of a run of
    images given labels, beside each other."""
    served: dict[str, Served] = {}
    for path in map(fetched, paths):
        if not path.exists():
            raise NicestError(
                f"expected a run folder, found no {path}: train one with `nicest train`, or `nicest demo`"
            )
        if path.is_file() and path.suffix != ".safetensors":
            raise NicestError(f"expected a run folder, got the file {path}: give the folder that `nicest train` wrote")
        add_run(served, path)
    return served


def warm(runs: Any) -> None:
    """Read the models and count the training scores before anyone asks."""
    for run in runs:
        try:
            run.open().info(run.id, run.name)
            run.open().reference()
        except Exception:  # whoever asks is told
            continue


def add_errors(app: FastAPI, debug: bool) -> None:
    """Every refusal is a JSON object with one line."""

    @app.exception_handler(NicestError)
    async def refused(_: Request, error: NicestError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 422)

    @app.exception_handler(Unready)
    async def unready(_: Request, error: Unready) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 409)

    @app.exception_handler(Busy)
    async def busy(_: Request, error: Busy) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 429, {"Retry-After": "1"})

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[-1]  # of the kinds that a value may be of, the last is a number
        if first["type"] == "json_invalid":
            said = f"{first['ctx']['error']}, at character {first['loc'][-1]}"
            return JSONResponse({"error": f"expected JSON in the body, got something else ({said})"}, 422)
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


def is_address(host: str) -> bool:
    """Whether a host is given by its IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


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
        unknown = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL  # not of this machine
        other = "--host" if unknown else "--port"
        raise NicestError(f"cannot listen on {host}, port {port}: {error.strerror}; choose another {other}") from error
    return found


def names(host: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The names that the server may be called by."""
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


class Server(uvicorn.Server):
    """A server that ends its streams when it is told to end."""

    def __init__(self, config: uvicorn.Config, desk: Desk) -> None:
        super().__init__(config)
        self.desk = desk

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.desk.closing = True
        super().handle_exit(sig, frame)


def make_server(app: Guard, desk: Desk) -> Server:
    """Without uvicorn's own log: what goes wrong is told by `add_errors`, in one line."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    return Server(config, desk)


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
    """Serve the studio until it is interrupted; `ready(url)` hears when it listens.

    Whoever can reach another host than this machine's own needs the token that is in the address.
    """
    hosts = names(host, allowed)
    if folder.exists() and not folder.is_dir():
        raise NicestError(f"expected a folder for trainings from the page, got the file {folder}: name another one")
    token = "" if is_loopback(host) and not allowed else secrets.token_urlsafe(24)
    torch.set_num_threads(1)  # requests are small and many: threads would wait for one another
    desk = Desk()
    app = create_app(runs, folder=folder, hosts=hosts, token=token, desk=desk, debug=debug)
    listening = bind(host, port)
    name = allowed[0] if allowed else host
    shown = f"[{name}]" if ":" in name else name
    url = f"http://{shown}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else "")
    ready(url)
    if browser:
        threading.Timer(0.5, webbrowser.open, (url,)).start()
    try:
        make_server(app, desk).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
