"""Limits of one request, of the work done at once, and of how long a client may stall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from anyio import CapacityLimiter, to_thread

BODY = 8 * 2**20  # bytes of a request
PICTURES = 16  # images scored per request
WALL = 100  # samples or test images per request
ROWS = 2000  # rows of a table that are scored
DRAWS = 2000  # rows drawn for histograms
CELLS_AT_ONCE = 2**15  # cells of a table per request: each takes a few passes of the network
UNPACKED = 2**28  # bytes of an uncompressed table
WHERE = 2000  # characters of conditions
COLUMNS = 20_000  # columns of a row
STEPS = 5000  # of an inpainting
CHAINS = 8
COMPONENTS = 24  # with a slider
PCA = 4096  # dimensions of data whose principal components are computed
WALK = 4096  # dimensions of a model that makes exact draws: they need a D x D matrix
STAGED = 4  # uploaded data sets that wait for their training
CELLS = 2**22  # cells of a table to train on: about 8 MB of .csv
TRAIN_DIM = 4096  # numbers per image to train on
FEWEST = 50  # rows to train on
RUNS = 100  # runs trained from the page
JOBS = 4  # long requests at once
WAITING = 64  # short requests at once
CONNECTIONS = 256
HEAD_SECONDS = 10  # until the head of a request is complete
BODY_SECONDS = 30  # until its body is complete
SEND_SECONDS = 15  # without reading the answer


Work = Callable[[], Any]
How = Literal["quick", "read", "job"]


class Busy(Exception):
    """Too many requests at once: the client should try again later."""


class Slots:
    """A counter with a maximum: one more is refused, not queued."""

    def __init__(self, count: int, what: str) -> None:
        self.count, self.what, self.taken = count, what, 0

    def take(self) -> None:
        """Take a slot, or raise `Busy`."""
        if self.taken >= self.count:
            raise Busy(f"at most {self.count} {self.what} can run at once: wait for one to end, then try again")
        self.taken += 1

    def give_back(self) -> None:
        """Free a slot."""
        self.taken -= 1


class Desk:
    """Worker threads, so that the page never waits."""

    def __init__(self, *, jobs: int = JOBS, threads: int = 2) -> None:
        self.jobs, self.waiting = Slots(jobs, "long requests, such as inpaintings,"), Slots(WAITING, "requests")
        self.short, self.files, self.long = CapacityLimiter(threads), CapacityLimiter(1), CapacityLimiter(jobs)

    async def run(self, how: How, function: Work) -> Any:
        """Run a function in a worker thread.

        `how` is "quick" for a short function, "read" for one that reads an uploaded file, or "job" for a long one.
        Large files wait for each other, and nothing waits for them.
        """
        slots = self.jobs if how == "job" else self.waiting
        limiter = {"quick": self.short, "read": self.files, "job": self.long}[how]
        slots.take()
        try:
            return await to_thread.run_sync(function, limiter=limiter)
        finally:
            slots.give_back()

    async def step(self, function: Work) -> Any:
        """Run a part of a long request whose slot the caller holds."""
        return await to_thread.run_sync(function, limiter=self.long)
