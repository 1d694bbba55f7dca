"""Endpoints from the methods of open models, worker threads for them, and streams of events."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import AsyncIterator, Callable, Generator
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from nicest.errors import NicestError
from nicest.studio.limits import Desk, How

EVENTS = "text/event-stream"
FRAME = 1 / 30  # seconds between two frames, at least
Json = dict[str, Any]
Events = Generator[tuple[str, Json], None, None]  # names and data of server-sent events
Kind = How | Literal["stream"]
M = TypeVar("M")


class Asked:
    """The run that a request names, and the worker threads for its model."""

    def __init__(self, served: Any, form: str, desk: Desk) -> None:
        self.served, self.form, self.desk = served, form, desk

    async def ask(self, how: Kind, kind: type[M], work: Callable[[M], Any]) -> Any:
        """Call a function of the model in a worker thread; `how` is that of `Desk.run`, or "stream"."""

        def function() -> Any:
            return work(self.served.open(kind, self.form))

        return await (stream(function, self.desk) if how == "stream" else self.desk.run(how, function))


async def asked(request: Request, run: str, nicest_form: Annotated[str, Header()] = "") -> Asked:
    """Find the run of a request."""
    served = request.app.state.served
    if run not in served:
        raise HTTPException(404, f"expected a run of {', '.join(served)}, got {run[:80]!r}")
    return Asked(served[run], nicest_form, request.app.state.desk)


async def body(request: Request) -> bytes:
    """Return the body of a request, which is a file."""
    return await request.body()


Run = Annotated[Asked, Depends(asked)]
File = Annotated[bytes, Depends(body)]


def bytes_in(kind: str) -> Json:
    """Return the options of an endpoint whose body is a file."""
    content = {kind: {"schema": {"type": "string", "format": "binary"}}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def bytes_out(kind: str) -> Json:
    """Return the options of an endpoint whose answer is not JSON."""
    return {"response_class": Response, "responses": {200: {"content": {kind: {}}, "description": "Not JSON."}}}


def endpoint(method: str, how: Kind = "quick", out: str = "", **options: Any) -> Callable[[M], M]:
    """Serve a method of an open model as /api/runs/{run}/NAME.

    Parameters
    ----------
    method
        GET or POST. The parameters are those of the method, with FastAPI's annotations.
    how
        "quick" for short work, "read" for uploaded files, "job" for long work, or "stream" for events.
    out
        The type of an answer in bytes; answers are JSON otherwise.
    """
    if how == "stream":
        out = EVENTS

    def mark(function: M) -> M:
        function.endpoint = (method, how, out, options | (bytes_out(out) if out else {}))  # type: ignore[attr-defined]
        return function

    return mark


def router_of(kind: type) -> APIRouter:
    """Return the endpoints that a class marks, but not those of its base classes."""
    router = APIRouter()
    for name, function in vars(kind).items():
        if hasattr(function, "endpoint"):
            method, how, out, options = function.endpoint
            options = {"name": name, "description": inspect.getdoc(function), "response_model": None} | options
            path = f"/api/runs/{{run}}/{name.replace('_', '-')}"
            router.add_api_route(path, serving(kind, function, how, out), methods=[method], **options)
    return router


def serving(kind: type, function: Any, how: Kind, out: str) -> Callable[..., Any]:
    """Return a function that FastAPI can serve: it calls a method of the model of the run."""
    signature = inspect.signature(function, eval_str=True)
    run = inspect.Parameter("run", inspect.Parameter.KEYWORD_ONLY, annotation=Run)
    others = [each.replace(kind=run.kind) for each in list(signature.parameters.values())[1:]]

    async def serve(run: Asked, **given: Any) -> Any:
        found = await run.ask(how, kind, lambda model: getattr(model, function.__name__)(**given))
        return Response(found, media_type=out) if out and how != "stream" else found

    serve.__signature__ = signature.replace(parameters=[run, *others])  # type: ignore[attr-defined]
    return serve


async def stream(begin: Callable[[], Events], desk: Desk) -> Response:
    """Stream events, in a slot that is freed when they end or when their client leaves."""
    desk.jobs.take()
    try:
        return Stream(await desk.step(begin), desk)
    except BaseException:
        desk.jobs.give_back()
        raise


class Stream(StreamingResponse):
    """Server-sent events in a slot."""

    def __init__(self, events: Events, desk: Desk) -> None:
        super().__init__(as_text(events, desk), media_type=EVENTS, headers={"Cache-Control": "no-cache"})
        self.events, self.desk = events, desk

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.desk.jobs.give_back()
            self.events.close()


async def as_text(events: Events, desk: Desk) -> AsyncIterator[str]:
    """Yield events as text, with pauses in which other requests run and a client that left is noticed."""
    began = time.perf_counter()
    try:
        while (event := await desk.step(lambda: next(events, None))) is not None:
            yield f"event: {event[0]}\ndata: {json.dumps(event[1])}\n\n"
            began = max(began + FRAME, time.perf_counter())
            await asyncio.sleep(max(0.0, began - time.perf_counter()))
    except NicestError as error:
        yield f"event: error\ndata: {json.dumps({'error': str(error)})}\n\n"
