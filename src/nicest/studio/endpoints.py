"""The studio's endpoints, typed: each calls one function of a run, and the ascent streams its frames."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from nicest import __version__
from nicest.errors import NicestError
from nicest.studio import limits, messages
from nicest.studio.images import Events, Images
from nicest.studio.limits import Desk
from nicest.studio.rows import Rows
from nicest.studio.served import Loaded, Served
from nicest.tasks.masks import FIGURE

FRAME = 1 / 30  # seconds that a frame is shown at least
Count = Annotated[int, Query(ge=1, le=limits.WALL)]
SeedQuery = Annotated[messages.Seed, Query()]
TemperatureQuery = Annotated[messages.Temperature, Query()]


def add_endpoints(app: FastAPI, served: dict[str, Served], desk: Desk) -> None:
    """All but the ascent: short requests."""

    async def quick(run: str, work: Callable[[Loaded], Any]) -> Any:
        found = find(served, run)
        return await desk.quick(lambda: work(found.open()))

    @app.get("/api/runs")
    async def runs() -> messages.Runs:
        """The runs that are served, and what may be asked of them."""
        infos = await desk.quick(lambda: [each.info() for each in served.values()])
        allowed = messages.Limits(jobs=desk.jobs.count)
        return messages.Runs(version=__version__, runs=infos, limits=allowed, masks=list(FIGURE))

    @app.get("/api/status")
    async def status() -> messages.Status:
        """What the server is doing now."""
        return messages.Status(ascents=desk.jobs.taken, most_ascents=desk.jobs.count, requests=desk.waiting.taken)

    @app.get("/api/runs/{run}/pictures")
    async def pictures(run: str, first: Annotated[int, Query(ge=0)] = 0, n: Count = 24) -> messages.Pictures:
        """Images of the test split."""
        return await quick(run, lambda model: Images(model).test_images(first, n))

    @app.get("/api/runs/{run}/samples")
    async def samples(
        run: str, n: Count = 24, temperature: TemperatureQuery = 1.0, seed: SeedQuery = 0
    ) -> messages.Pictures:
        """Samples of the model, with their nats at the middle of the levels."""
        return await quick(run, lambda model: Images(model).samples(n, temperature, seed))

    @app.post("/api/runs/{run}/upload", openapi_extra=_bytes_in("image/*"))
    async def upload(run: str, request: Request, inverted: bool = False) -> messages.One:
        """A picture file as an image of the model's size, colours and levels."""
        content = await request.body()
        return await quick(run, lambda model: messages.One(picture=Images(model).upload(content, inverted)))

    @app.get("/api/runs/{run}/mask")
    async def mask(run: str, name: messages.MaskName, seed: SeedQuery = 0) -> messages.Mask:
        """One of the ten masks of the paper's figure."""
        return await quick(run, lambda model: messages.Mask(mask=Images(model).mask(name, seed)))

    @app.post("/api/runs/{run}/move")
    async def move(run: str, ask: messages.Move) -> messages.Moved:
        """Where a picture is in latent space, and the picture of a code that is changed."""
        return await quick(run, lambda model: Images(model).move(ask))

    @app.post("/api/runs/{run}/between")
    async def between(run: str, ask: messages.Between) -> messages.Pictures:
        """The way from one picture to another through latent space."""
        return await quick(run, lambda model: Images(model).between(ask))

    @app.get("/api/runs/{run}/sphere")
    async def sphere(
        run: str,
        basis: Literal["random", "top"] = "top",
        seed: SeedQuery = 0,
        n: Annotated[int, Query(ge=2, le=400)] = 200,
    ) -> messages.Sphere:
        """A sphere of latent space, decoded point by point."""
        return await quick(run, lambda model: Images(model).sphere(basis, seed, n))

    @app.post("/api/runs/{run}/score")
    async def score(run: str, ask: messages.ToScore) -> messages.Scores:
        """The log-density of pictures, term by term, and where it falls among those of training."""
        return await quick(run, lambda model: Images(model).score(ask.pictures))

    @app.get("/api/runs/{run}/training-scores")
    async def training_scores(run: str) -> messages.TrainingScores:
        """Quantiles of the nats of the training rows."""
        return await quick(run, lambda model: model.training_scores())

    @app.post("/api/runs/{run}/film", response_class=Response, responses={200: {"content": {"image/gif": {}}}})
    async def film(run: str, ask: messages.Film) -> Response:
        """Frames of an ascent as an animated GIF."""
        return Response(await quick(run, lambda model: Images(model).film(ask)), media_type="image/gif")

    @app.get("/api/runs/{run}/rows")
    async def rows(run: str, n: Count = 20, temperature: TemperatureQuery = 1.0, seed: SeedQuery = 0) -> messages.Table:
        """Sample rows of a model of rows or of a table."""
        return await quick(run, lambda model: Rows(model).sample_rows(n, temperature, seed))

    @app.get("/api/runs/{run}/columns")
    async def columns(run: str) -> messages.Columns:
        """The columns of the table that the model is of."""
        return await quick(run, lambda model: messages.Columns(columns=Rows(model).column_infos()))

    @app.post("/api/runs/{run}/table", openapi_extra=_bytes_in("text/csv"))
    async def table(
        run: str, request: Request, format: Literal["csv", "parquet", "arrow"] = "csv"
    ) -> messages.TableScores:
        """The log-density of every row of a table."""
        content = await request.body()
        return await quick(run, lambda model: Rows(model).score_table(content, f".{format}"))

    @app.post("/api/runs/{run}/impute")
    async def impute(run: str, ask: messages.Row) -> messages.ImputedRow:
        """The missing cells of a row, found from the known ones."""
        found = find(served, run)
        with desk.jobs.one():
            return await desk.step(lambda: Rows(found.open()).impute(ask))

    @app.get("/api/runs/{run}/spectrum")
    async def spectrum(run: str) -> messages.Spectrum:
        """σ_d from the largest, and a PCA of the data beside it where the model does not whiten."""
        return await quick(run, lambda model: model.spectrum())

    @app.get("/api/runs/{run}/metrics")
    async def metrics(run: str, after: int = -1) -> messages.Metrics:
        """The likelihood while the run trains, from the rows after a step."""
        return await desk.quick(find(served, run).metrics, after)


def add_inpainting(app: FastAPI, served: dict[str, Served], desk: Desk) -> None:
    @app.post(
        "/api/runs/{run}/inpaint",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}, "description": "Events: start, frame ..., end."}},
    )
    async def inpaint(run: str, ask: messages.Inpainting) -> Response:
        """Fill in what is hidden of a picture, watched: server-sent events with states and nats of every chain."""
        found = find(served, run)
        desk.jobs.take()
        try:
            events = await desk.step(lambda: Images(found.open()).ascent(ask))
        except BaseException:
            desk.jobs.give_back()
            raise
        return Stream(events, desk)


class Stream(StreamingResponse):
    """Events of an ascent, which ends and gives its slot back when it is over, or when its client has left."""

    def __init__(self, events: Events, desk: Desk) -> None:
        super().__init__(stream(events, desk), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.events, self.desk = events, desk

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.desk.jobs.give_back()
            self.events.close()


async def stream(events: Events, desk: Desk) -> AsyncIterator[str]:
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
