"""The studio's endpoints, typed: each calls one function of a run, and the ascent streams its frames."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from nicest import __version__
from nicest.errors import NicestError
from nicest.studio import limits, messages
from nicest.studio.films import Films
from nicest.studio.images import Events, Images
from nicest.studio.limits import Desk
from nicest.studio.rows import Rows
from nicest.studio.served import Loaded, Served, Unready, add_run
from nicest.studio.trainer import Trainer, packed
from nicest.tasks.masks import FIGURE

FRAME = 1 / 30  # seconds that a frame is shown at least
Count = Annotated[int, Query(ge=1, le=limits.WALL)]
SeedQuery = Annotated[messages.Seed, Query()]
TemperatureQuery = Annotated[messages.Temperature, Query()]


class Asked:
    """The run that a request is about, and the form that its model is expected to have."""

    def __init__(self, served: Served, form: str) -> None:
        self.served, self.form = served, form

    def open(self) -> Loaded:
        found = self.served.open()
        if self.form not in ("", found.form):
            raise Unready("This run was replaced by one of another form: ask for the list of runs again")
        return found


async def asked(request: Request, run: str, nicest_form: Annotated[str, Header()] = "") -> Asked:
    served: dict[str, Served] = request.app.state.served
    if run not in served:
        raise HTTPException(404, f"expected a run of {', '.join(served)}, got {run[:80]!r}")
    return Asked(served[run], nicest_form)


Run = Annotated[Asked, Depends(asked)]


def add_endpoints(app: FastAPI, served: dict[str, Served], desk: Desk, trainer: Trainer) -> None:
    """Short requests, and inpainting, which streams its frames."""
    films = Films()

    async def quick(run: Asked, work: Callable[[Loaded], Any]) -> Any:
        return await desk.quick(lambda: work(run.open()))

    @app.get("/api/runs")
    async def runs() -> messages.Runs:
        """The runs that are served, and what may be asked of them."""
        infos = await desk.quick(lambda: [each.info() for each in list(served.values())])
        allowed = messages.Limits(jobs=desk.jobs.count)
        folder = str(trainer.folder)
        return messages.Runs(version=__version__, runs=infos, limits=allowed, masks=list(FIGURE), folder=folder)

    @app.get("/api/status")
    async def status() -> messages.Status:
        """What the server is doing now."""
        return messages.Status(ascents=desk.jobs.taken, most_ascents=desk.jobs.count, requests=desk.waiting.taken)

    @app.get("/api/runs/{run}/pictures")
    async def pictures(run: Run, first: Annotated[int, Query(ge=0)] = 0, n: Count = 24) -> messages.Pictures:
        """Images of the test split."""
        return await quick(run, lambda model: Images(model).test_images(first, n))

    @app.get("/api/runs/{run}/samples")
    async def samples(
        run: Run, n: Count = 24, temperature: TemperatureQuery = 1.0, seed: SeedQuery = 0
    ) -> messages.Pictures:
        """Samples of the model, with their nats before they are rounded to levels."""
        return await quick(run, lambda model: Images(model).samples(n, temperature, seed))

    @app.post("/api/runs/{run}/upload", openapi_extra=_bytes_in("image/*"))
    async def upload(run: Run, request: Request, inverted: bool = False) -> messages.One:
        """A picture file as an image of the model's size, colours and levels."""
        content = await request.body()
        return await desk.read(lambda: messages.One(picture=Images(run.open()).upload(content, inverted)))

    @app.get("/api/runs/{run}/mask")
    async def mask(run: Run, name: messages.MaskName, seed: SeedQuery = 0) -> messages.Mask:
        """One of the ten masks of the paper's figure."""
        return await quick(run, lambda model: messages.Mask(mask=Images(model).mask(name, seed)))

    @app.post("/api/runs/{run}/move")
    async def move(run: Run, ask: messages.Move) -> messages.Moved:
        """Where a picture is in latent space, and the picture of a code that is changed."""
        return await quick(run, lambda model: Images(model).move(ask))

    @app.get("/api/runs/{run}/labels")
    async def labels(run: Run) -> messages.Labels:
        """The labels between whose mean codes a code may be moved; of a large model, they take seconds, once."""
        return await desk.read(lambda: Images(run.open()).labels())

    @app.post("/api/runs/{run}/between")
    async def between(run: Run, ask: messages.Between) -> messages.Pictures:
        """The way from one picture to another through latent space."""
        return await quick(run, lambda model: Images(model).between(ask))

    @app.post("/api/runs/{run}/plane")
    async def plane(run: Run, ask: messages.Plane) -> messages.Pictures:
        """Pictures of a plane of latent space, which three codes span."""
        return await quick(run, lambda model: Images(model).plane(ask))

    @app.post("/api/runs/{run}/classes")
    async def classes(run: Run, ask: messages.Origin) -> messages.Pictures:
        """A code as the model decodes it for each of its labels, in their order; none where it has no labels."""
        path = run.served.path if run.served.label is not None else None
        labels = {each.label: each for each in list(served.values()) if each.path == path}
        return await quick(
            run, lambda model: Images(model).classes(ask, [Images(each.open()) for each in labels.values()])
        )

    @app.get("/api/runs/{run}/sphere")
    async def sphere(
        run: Run,
        basis: messages.Basis = "top",
        seed: SeedQuery = 0,
        n: Annotated[messages.SphereSize, Query()] = 200,
    ) -> messages.Sphere:
        """A sphere of latent space, decoded point by point."""
        return await quick(run, lambda model: Images(model).sphere(basis, seed, n))

    @app.post("/api/runs/{run}/score")
    async def score(run: Run, ask: messages.ToScore) -> messages.Scores:
        """The log-density of pictures, term by term, and the share of held-out rows that are denser."""
        return await quick(run, lambda model: Images(model).score(ask.pictures))

    @app.get("/api/runs/{run}/reference-scores")
    async def reference_scores(run: Run) -> messages.ReferenceScores:
        """Quantiles of the nats of held-out rows, which scores are compared with."""
        return await quick(run, lambda model: model.reference_scores())

    @app.get("/api/runs/{run}/film", response_class=Response, responses={200: {"content": {"image/gif": {}}}})
    async def film(run: Run, id: Annotated[str, Query(max_length=40)]) -> Response:
        """A recent inpainting as an animated GIF; its event `start` gave the id."""
        return Response(await desk.quick(lambda: films.find(id).gif()), media_type="image/gif")

    @app.get("/api/runs/{run}/rows")
    async def rows(
        run: Run,
        n: Count = 20,
        temperature: TemperatureQuery = 1.0,
        seed: SeedQuery = 0,
        of: Annotated[int, Query(ge=0, le=limits.ROWS)] = 0,
        where: Annotated[str, Query(max_length=limits.WHERE)] = "",
    ) -> messages.Table:
        """Sample rows of a model of rows or of a table, with histograms `of` so many; with `where`, those that meet
        conditions, at temperature 1, such as `age = 30 and income > 50000`."""
        if not where:
            return await quick(run, lambda model: Rows(model).sample_rows(n, temperature, seed, of))
        with desk.jobs.one():
            return await desk.step(lambda: Rows(run.open()).where(where, n, seed, of))

    @app.post("/api/runs/{run}/cells")
    async def cells(run: Run, ask: messages.Row) -> messages.CellSurprises:
        """How surprising each cell of a whole row is, given all the others."""
        with desk.jobs.one():
            return await desk.step(lambda: Rows(run.open()).surprises(ask))

    @app.get("/api/runs/{run}/columns")
    async def columns(run: Run) -> messages.Columns:
        """The columns of the table that the model is of."""
        return await quick(run, lambda model: messages.Columns(columns=Rows(model).column_infos()))

    @app.post("/api/runs/{run}/table", openapi_extra=_bytes_in("text/csv"))
    async def table(
        run: Run, request: Request, format: Literal["csv", "parquet", "arrow"] = "csv"
    ) -> messages.TableScores:
        """The log-density of the first rows of a table."""
        content = await request.body()
        return await desk.read(lambda: Rows(run.open()).score_table(content, f".{format}"))

    @app.post("/api/runs/{run}/impute")
    async def impute(run: Run, ask: messages.Row) -> messages.ImputedRow:
        """The missing cells of a row, found from the known ones."""
        with desk.jobs.one():
            return await desk.step(lambda: Rows(run.open()).impute(ask))

    @app.get("/api/runs/{run}/spectrum")
    async def spectrum(run: Run) -> messages.Spectrum:
        """σ_d from the largest, and a PCA of the data beside it where the model does not whiten."""
        return await quick(run, lambda model: model.spectrum())

    @app.get("/api/runs/{run}/metrics")
    async def metrics(run: Run, after: int = -1) -> messages.Metrics:
        """The likelihood while the run trains, from the rows after a step."""
        found = await desk.quick(run.served.metrics, after)
        return found.model_copy(update={"process": await desk.quick(trainer.state, run.served.path)})

    @app.get("/api/runs/{run}/download", response_class=Response, responses={200: {"content": {"application/zip": {}}}})
    async def download(run: Run) -> Response:
        """The run as a .zip file, to be unpacked and opened elsewhere: model, recipe, columns and metrics."""
        content = await quick(run, lambda model: packed(run.served.path))
        return Response(content, media_type="application/zip")

    @app.post("/api/train/data", openapi_extra=_bytes_in("application/octet-stream"))
    async def data(
        request: Request,
        name: Annotated[str, Query(max_length=200)] = "data",
        format: Literal["csv", "parquet", "arrow", "npy"] = "csv",
    ) -> messages.Found:
        """A table, or images as an array (N, H, W) or (N, H, W, 3) of bytes, to be trained on: what is in it."""
        content = await request.body()
        with desk.jobs.one():
            return await desk.step(trainer.stage, content, name, format)

    @app.post("/api/train")
    async def train(ask: messages.Begin) -> messages.Begun:
        """Begin a training, in a process of its own that goes on without page and server; the run that it makes."""
        path = await desk.quick(trainer.begin, ask)
        return messages.Begun(run=next(iter(add_run(served, path))))

    @app.post("/api/runs/{run}/stop")
    async def stop(run: Run) -> messages.Process:
        """Tell a training that was begun from the page to save and end."""
        await desk.quick(trainer.stop, run.served.path)
        return await desk.quick(trainer.state, run.served.path)

    streams: dict[str, Any] = {
        "response_class": StreamingResponse,
        "responses": {200: {"content": {"text/event-stream": {}}, "description": "Events: start, frame ..., end."}},
    }

    async def streamed(begin: Callable[[], Events]) -> Response:
        desk.jobs.take()
        try:
            events = await desk.step(begin)
        except BaseException:
            desk.jobs.give_back()
            raise
        return Stream(events, desk)

    @app.post("/api/runs/{run}/inpaint", **streams)
    async def inpaint(run: Run, ask: messages.Inpainting) -> Response:
        """Fill in what is hidden of a picture, watched: server-sent events with states and nats of every chain.

        The last frame of exact draws holds their `spread`, the standard deviation of every pixel as a share of the
        brightest, and `r_hat`, which is near 1 where the chains agree."""
        return await streamed(lambda: Images(run.open()).inpainting(ask, films))

    @app.post("/api/runs/{run}/surprise", **streams)
    async def surprise(run: Run, ask: messages.Whose) -> Response:
        """Where a picture is surprising, pixel by pixel: server-sent events with the `excess` of some `pixels`.

        The excess is -log p(level of the pixel | all others), less its expectation, the entropy of the pixel given the
        others, in nats; of colours the excesses of all channels are to be added. It is exact up to the noise, which
        stands still at the middle of every level. The sum over pixels is not the log-likelihood."""
        return await streamed(lambda: Images(run.open()).surprise(ask.picture))


class Stream(StreamingResponse):
    """Events of an inpainting, which ends and gives its slot back when it is over, or when its client has left."""

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
        while not desk.closing and (event := await desk.step(next, events, None)) is not None:
            yield f"event: {event[0]}\ndata: {json.dumps(event[1])}\n\n"
            began = max(began + FRAME, time.perf_counter())
            await asyncio.sleep(max(0.0, began - time.perf_counter()))
    except NicestError as error:
        yield f"event: error\ndata: {json.dumps({'error': str(error)})}\n\n"


def _bytes_in(kind: str) -> dict[str, Any]:
    """What OpenAPI says of a body that is a file as it is."""
    return {"requestBody": {"required": True, "content": {kind: {"schema": {"type": "string", "format": "binary"}}}}}
