"""What one request may ask for, how much is done at once, and how long a client may stall."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anyio import CapacityLimiter, to_thread

BODY = 8 * 2**20  # bytes of a request
PICTURES = 16  # scored at once
WALL = 100  # samples or test images at once
ROWS = 2000  # of a table that are scored
UNPACKED = 2**28  # bytes that a compressed table may be of
WHERE = 2000  # characters of conditions
COLUMNS = 20_000  # of a row that is filled in
STEPS = 5000
CHAINS = 8
COMPONENTS = 24  # with a slider
PCA = 4096  # dimensions of data that has its principal components counted
WALK = 4096  # dimensions of a model whose exact draws are made: they take a matrix of all by all
STAGED = 4  # files that were looked at, to be trained on
CELLS = 2**22  # of a table to train on: about what a .csv file of so many bytes holds
TRAIN_DIM = 4096  # numbers of an image to train on
FEWEST = 50  # rows to train on
RUNS = 100  # that were trained from the page
JOBS = 4  # inpaintings at once
WAITING = 64  # short requests at once
CONNECTIONS = 256
HEAD_SECONDS = 10  # in which the head of a request must have come
BODY_SECONDS = 30  # and its body
SEND_SECONDS = 15  # in which a client must read on


class Busy(Exception):
    """There is too much to do: try again later."""


class Slots:
    """So many may hold a slot; one more is refused, not queued."""

    def __init__(self, count: int, what: str) -> None:
        self.count, self.what, self.taken = count, what, 0

    def take(self) -> None:
        if self.taken >= self.count:
            raise Busy(f"at most {self.count} {self.what} can run at once: wait for one to end, then try again")
        self.taken += 1

    def give_back(self) -> None:
        self.taken -= 1

    @contextmanager
    def one(self) -> Iterator[None]:
        self.take()
        try:
            yield
        finally:
            self.give_back()


class Desk:
    """Work in threads, so that the page never waits: short requests on a few of them, files of users one by one,
    inpaintings on their own."""

    def __init__(self, *, jobs: int = JOBS, threads: int = 2) -> None:
        self.jobs, self.waiting = Slots(jobs, "inpaintings and surprise maps"), Slots(WAITING, "requests")
        self.short, self.files, self.long = CapacityLimiter(threads), CapacityLimiter(1), CapacityLimiter(jobs)
        self.closing = False  # the server ends, and every stream with it

    async def quick(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with self.waiting.one():
            return await to_thread.run_sync(function, *arguments, limiter=self.short)

    async def read(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Read a file that a user sent: large ones wait for each other, and nobody else waits for them."""
        with self.waiting.one():
            return await to_thread.run_sync(function, *arguments, limiter=self.files)

    async def step(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A part of an inpainting, whose slot is held by its caller."""
        return await to_thread.run_sync(function, *arguments, limiter=self.long)
