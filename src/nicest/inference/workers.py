"""Blocks coded side by side in worker processes. The entropy coder holds Python's lock, so threads would not help."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from nicest.errors import NicestError
from nicest.messages import brief

AHEAD = 2  # blocks for each worker that are coded or wait for their turn, at most: they are in memory
GPU_WORKERS, GPU_BLOCKS = 4, 4  # workers on a GPU by default, at most, and blocks for each, at least: they start slowly

work: Callable[..., Any]  # of a worker process


def workers_for(jobs: int, blocks: int, device: torch.device) -> int:
    """Return how many processes code blocks: `jobs`, or if that is 0 one per core; 1 is this process."""
    if jobs:
        return max(1, min(jobs, blocks))
    if device.type == "cuda":
        return max(1, min(cores(), GPU_WORKERS, blocks // GPU_BLOCKS))
    return max(1, min(cores(), blocks))


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def mapped(function: Callable[..., Any], tool: Any, inputs: Iterable[tuple[Any, ...]], workers: int) -> Iterator[Any]:
    """Yield function(tool, *input) of each input, in order.

    More than one worker: in processes with a copy of the tool each, which end with the iterator. A NicestError that
    the function raises is raised here, and so is one if a process dies.
    """
    given = _pickled(function, tool) if workers > 1 else None
    if given is None:
        for each in inputs:
            yield function(tool, *each)
        return
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["nicest.codec"])  # so that all workers import it once
    pool = ProcessPoolExecutor(workers, context, _begin, (given, max(1, cores() // workers)))
    due = deque[Future[Any]]()
    try:
        for each in inputs:
            due.append(pool.submit(_work, each))
            if len(due) == AHEAD * workers:
                yield due.popleft().result()
        while due:
            yield due.popleft().result()
    except BrokenProcessPool as error:
        what = "a worker process was killed, perhaps for lack of memory"
        raise NicestError(f"{what}: try again with fewer --jobs (in Python: jobs=1)") from error
    finally:
        for process in list((pool._processes or {}).values()):  # in the middle of a block, too
            process.kill()
        pool.shutdown(cancel_futures=True)


def _pickled(function: Callable[..., Any], tool: Any) -> bytes | None:
    """Return None for what cannot go to another process, such as a flow with a lambda in it."""
    try:
        return pickle.dumps((function, tool))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _begin(given: bytes, threads: int) -> None:
    """Prepare a worker process."""
    global work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    function, tool = pickle.loads(given)
    work = lambda *each: function(tool, *each)  # noqa: E731


def _work(each: tuple[Any, ...]) -> Any:
    """Code one block."""
    try:
        return work(*each)
    except NicestError:
        raise
    except Exception as error:
        raise NicestError(f"a worker process failed: {type(error).__name__}: {brief(error)}") from None


def end_with_parent() -> None:
    """End this process as soon as its parent is gone."""
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)
