"""The studio's server: typed endpoints, each of which calls one function of a run, and the page."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
import socket
import threading
import time
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from nicest import __version__
from nicest.errors import NicestError
from nicest.studio import limits
from nicest.studio.guard import LOOPBACK, Guard
from nicest.studio.limits import Busy, Desk
from nicest.studio.messages import (
    Between,
    Columns,
    Film,
    ImputedRow,
    Inpainting,
    Limits,
    Mask,
    MaskName,
    Metrics,
    Move,
    Moved,
    One,
    Pictures,
    Problem,
    Row,
    Runs,
    Scores,
    Seed,
    Spectrum,
    Sphere,
    Status,
    Table,
    TableScores,
    Temperature,
    ToScore,
    TrainingScores,
)
from nicest.studio.served import Loaded, Served
from nicest.tasks.masks import FIGURE

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FRAME = 1 / 30  # seconds that a frame is shown at least
PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "Called by a name that is not this server's."},
    403: {"model": Problem, "description": "Asked by a page of another origin."},
    404: {"model": Problem, "description": "No such run."},
    413: {"model": Problem, "description": "More bytes than are taken."},
    422: {"model": Problem, "description": "Not what was expected; the error says what was."},
    429: {"model": Problem, "description": "Too much at once: try again later."},
}
Count = Annotated[int, Query(ge=1, le=limits.WALL)]
SeedQuery = Annotated[Seed, Query()]
TemperatureQuery = Annotated[Temperature, Query()]
log = logging.getLogger("nicest.studio")


def create_app(runs: Sequence[Path], *, hosts: tuple[str, ...] = LOOPBACK, jobs: int = limits.JOBS) -> Guard:
    """The whole application, guard included; it serves the runs that are named, and nothing else on the disk."""
    served = name_runs(runs)
    desk = Desk(jobs=jobs)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        warming = threading.Thread(target=warm, args=(list(served.values()),))
        warming.start()
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
        responses=PROBLEMS,
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
        first = error.errors()[0]
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

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return file("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return file("docs.html")

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return file("icon.svg")

    @app.get("/page/{name:path}", include_in_schema=False)
    async def page(name: str) -> Response:
        return file(name)


def add_endpoints(app: FastAPI, served: dict[str, Served], desk: Desk) -> None:
    """All but the ascent: short requests."""

    async def quick(run: str, work: Callable[[Loaded], Any]) -> Any:
        found = find(served, run)
        return await desk.quick(lambda: work(found.open()))

    @app.get("/api/runs")
    async def runs() -> Runs:
        """The runs that are served, and what may be asked of them."""
        infos = await desk.quick(lambda: [each.info() for each in served.values()])
        return Runs(version=__version__, runs=infos, limits=Limits(jobs=desk.jobs.count), masks=list(FIGURE))

    @app.get("/api/status")
    async def status() -> Status:
        """What the server is doing now."""
        return Status(ascents=desk.jobs.taken, most_ascents=desk.jobs.count, requests=desk.waiting.taken)

    @app.get("/api/runs/{run}/pictures")
    async def pictures(run: str, first: Annotated[int, Query(ge=0)] = 0, n: Count = 24) -> Pictures:
        """Images of the test split."""
        return await quick(run, lambda model: model.test_images(first, n))

    @app.get("/api/runs/{run}/samples")
    async def samples(run: str, n: Count = 24, temperature: TemperatureQuery = 1.0, seed: SeedQuery = 0) -> Pictures:
        """Samples of the model, with their nats at the middle of the levels."""
        return await quick(run, lambda model: model.samples(n, temperature, seed))

    @app.post("/api/runs/{run}/upload", openapi_extra=_bytes_in("image/*"))
    async def upload(run: str, request: Request, inverted: bool = False) -> One:
        """A picture file as an image of the model's size, colours and levels."""
        content = await request.body()
        return await quick(run, lambda model: One(picture=model.upload(content, inverted)))

    @app.get("/api/runs/{run}/mask")
    async def mask(run: str, name: MaskName, seed: SeedQuery = 0) -> Mask:
        """One of the ten masks of the paper's figure."""
        return await quick(run, lambda model: Mask(mask=model.mask(name, seed)))

    @app.post("/api/runs/{run}/move")
    async def move(run: str, ask: Move) -> Moved:
        """Where a picture is in latent space, and the picture of a code that is changed."""
        return await quick(run, lambda model: model.move(ask))

    @app.post("/api/runs/{run}/between")
    async def between(run: str, ask: Between) -> Pictures:
        """The way from one picture to another through latent space."""
        return await quick(run, lambda model: model.between(ask))

    @app.get("/api/runs/{run}/sphere")
    async def sphere(
        run: str,
        basis: Literal["random", "top"] = "top",
        seed: SeedQuery = 0,
        n: Annotated[int, Query(ge=2, le=400)] = 200,
    ) -> Sphere:
        """A sphere of latent space, decoded point by point."""
        return await quick(run, lambda model: model.sphere(basis, seed, n))

    @app.post("/api/runs/{run}/score")
    async def score(run: str, ask: ToScore) -> Scores:
        """The log-density of pictures, term by term, and where it falls among those of training."""
        return await quick(run, lambda model: model.score(ask.pictures))

    @app.get("/api/runs/{run}/training-scores")
    async def training_scores(run: str) -> TrainingScores:
        """Quantiles of the nats of the training rows."""
        return await quick(run, lambda model: model.training_scores())

    @app.post("/api/runs/{run}/film", response_class=Response, responses={200: {"content": {"image/gif": {}}}})
    async def film(run: str, ask: Film) -> Response:
        """Frames of an ascent as an animated GIF."""
        return Response(await quick(run, lambda model: model.film(ask)), media_type="image/gif")

    @app.get("/api/runs/{run}/rows")
    async def rows(run: str, n: Count = 20, temperature: TemperatureQuery = 1.0, seed: SeedQuery = 0) -> Table:
        """Sample rows of a model of rows or of a table."""
        return await quick(run, lambda model: model.sample_rows(n, temperature, seed))

    @app.get("/api/runs/{run}/columns")
    async def columns(run: str) -> Columns:
        """The columns of the table that the model is of."""
        return await quick(run, lambda model: Columns(columns=model.column_infos()))

    @app.post("/api/runs/{run}/table", openapi_extra=_bytes_in("text/csv"))
    async def table(run: str, request: Request, format: Literal["csv", "parquet", "arrow"] = "csv") -> TableScores:
        """The log-density of every row of a table."""
        content = await request.body()
        return await quick(run, lambda model: model.score_table(content, f".{format}"))

    @app.post("/api/runs/{run}/impute")
    async def impute(run: str, ask: Row) -> ImputedRow:
        """The missing cells of a row, found from the known ones."""
        found = find(served, run)
        with desk.jobs.one():
            answer: ImputedRow = await desk.step(lambda: found.open().impute(ask))
            return answer

    @app.get("/api/runs/{run}/spectrum")
    async def spectrum(run: str) -> Spectrum:
        """σ_d from the largest, and a PCA of the data beside it where the model does not whiten."""
        return await quick(run, lambda model: model.spectrum())

    @app.get("/api/runs/{run}/metrics")
    async def metrics(run: str, after: int = -1) -> Metrics:
        """The likelihood while the run trains, from the rows after a step."""
        found = find(served, run)
        answer: Metrics = await desk.quick(found.metrics, after)
        return answer


def add_inpainting(app: FastAPI, served: dict[str, Served], desk: Desk) -> None:
    @app.post(
        "/api/runs/{run}/inpaint",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}, "description": "Events: start, frame ..., end."}},
    )
    async def inpaint(run: str, ask: Inpainting) -> Response:
        """Fill in what is hidden of a picture, watched: server-sent events with states and nats of every chain."""
        found = find(served, run)
        desk.jobs.take()
        try:
            events = await desk.step(lambda: found.open().ascent(ask))
        except BaseException:
            desk.jobs.give_back()
            raise
        return Stream(stream(events, desk), desk.jobs.give_back)


class Stream(StreamingResponse):
    """An answer that gives its slot back when it is over, or when its client has left."""

    def __init__(self, events: AsyncIterator[str], give_back: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.events, self.give_back = events, give_back

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.give_back()


async def stream(events: Iterator[tuple[str, dict[str, Any]]], desk: Desk) -> AsyncIterator[str]:
    """Events as text; between two of them anyone else may have the thread, and a client that left is noticed."""
    began = time.perf_counter()
    try:
        while (event := await desk.step(next, events, None)) is not None:
            yield f"event: {event[0]}\ndata: {json.dumps(event[1])}\n\n"
            began = max(began + FRAME, time.perf_counter())
            await asyncio.sleep(max(0.0, began - time.perf_counter()))
    except NicestError as error:
        yield f"event: error\ndata: {json.dumps({'error': str(error)})}\n\n"


def find(served: dict[str, Served], run: str) -> Served:
    if run not in served:
        raise HTTPException(404, f"expected a run of {', '.join(served)}, got {run[:80]!r}")
    return served[run]


def _bytes_in(kind: str) -> dict[str, Any]:
    """What OpenAPI says of a body that is a file as it is."""
    return {"requestBody": {"required": True, "content": {kind: {"schema": {"type": "string", "format": "binary"}}}}}


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
    hosts = (*LOOPBACK, host) if is_loopback(host) else ()
    torch.set_num_threads(
        1
    )  # requests are small, and many: threads that wait for one another cost more than they bring
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
