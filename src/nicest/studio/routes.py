"""The endpoints that are no method of an open model: lists of runs, their metrics, and trainings from the page."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from nicest import __version__
from nicest.studio import limits, messages
from nicest.studio.api import File, Json, Run, bytes_in, bytes_out, router_of
from nicest.studio.explorer import Explorer
from nicest.studio.images import Images
from nicest.studio.opened import Opened, Rows
from nicest.studio.pictures import LARGEST
from nicest.studio.served import Served, add_run
from nicest.studio.tables import Tables
from nicest.studio.trainer import Trainer, packed
from nicest.tasks.masks import FIGURE

studio, training = APIRouter(), APIRouter()
ROUTERS = (studio, *map(router_of, (Opened, Rows, Explorer, Images, Tables)), training)


@studio.get("/api/runs")
async def list_runs(request: Request) -> Json:
    """List the `runs` with their kinds and shapes, and the `limits` of requests."""
    state = request.app.state
    runs = await state.desk.run("quick", lambda: [each.info() for each in list(state.served.values())])
    names = ("BODY", "PICTURES", "WALL", "ROWS", "STEPS", "CHAINS", "COMPONENTS", "WALK")
    allowed = {name.lower(): getattr(limits, name) for name in names} | {"side": LARGEST, "jobs": state.desk.jobs.count}
    folder = str(state.trainer.folder)
    return {"version": __version__, "runs": runs, "limits": allowed, "masks": list(FIGURE), "folder": folder}


@studio.get("/api/status")
async def status(request: Request) -> Json:
    """Count the requests in work: `ascents` of at most `most_ascents` long ones, and short `requests`."""
    desk = request.app.state.desk
    return {"ascents": desk.jobs.taken, "most_ascents": desk.jobs.count, "requests": desk.waiting.taken}


@studio.get("/api/runs/{run}/metrics")
async def metrics(request: Request, run: Run, after: int = -1) -> Json:
    """Return the metrics of a run after a step, and the state of its training."""
    state, path = request.app.state, run.served.path
    return await state.desk.run("quick", lambda: run.served.metrics(after) | {"process": state.trainer.state(path)})


@studio.get("/api/runs/{run}/download", **bytes_out("application/zip"))
async def download(run: Run) -> Response:
    """Return the run as a .zip file that `nicest.open` reads once it is unpacked."""
    content = await run.ask("quick", Opened, lambda model: packed(run.served.path))
    return Response(content, media_type="application/zip")


@studio.post("/api/runs/{run}/classes")
async def classes(request: Request, run: Run, ask: messages.Origin) -> Json:
    """Decode one code by the model of every label; none if it has no labels."""
    path = run.served.path if run.served.label is not None else None
    served: list[Served] = [each for each in request.app.state.served.values() if each.path == path]
    labels = {each.label: each for each in served}.values()
    return await run.ask("quick", Images, lambda model: model.classes(ask, [each.open(Images) for each in labels]))


@training.post("/api/train/data", **bytes_in("application/octet-stream"))
async def stage(
    request: Request,
    content: File,
    name: Annotated[str, Query(max_length=200)] = "data",
    format: Literal["csv", "parquet", "arrow", "npy"] = "csv",
) -> Json:
    """Describe data to be trained on: a table, or images as bytes of shape (N, H, W) or (N, H, W, 3)."""
    trainer: Trainer = request.app.state.trainer
    return await request.app.state.desk.run("job", lambda: trainer.stage(content, name, format))


@training.post("/api/train")
async def begin(request: Request, ask: messages.Begin) -> Json:
    """Start a training in a process of its own, and return its `run`. The process survives the page and the server."""
    state = request.app.state
    return {"run": add_run(state.served, await state.desk.run("quick", lambda: state.trainer.begin(ask)))}


@training.post("/api/runs/{run}/stop")
async def stop(request: Request, run: Run) -> Json:
    """Tell a training that was started from the page to save and end."""
    state, path = request.app.state, run.served.path
    await state.desk.run("quick", lambda: state.trainer.stop(path))
    return await state.desk.run("quick", lambda: state.trainer.state(path))
