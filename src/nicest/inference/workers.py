"""Blocks coded side by side in worker processes. The entropy coder holds Python's lock, so threads would not help."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from typing import Any

import torch

from nicest.errors import NicestError
from nicest.messages import brief

PRELOADED = ("nicest.codec",)  # what a worker needs
AHEAD = 2  # blocks for each worker that are coded or wait for their turn, at most: they are in memory
GPU_WORKERS, GPU_BLOCKS = 4, 4  # workers on a GPU by default, at most, and blocks for each, at least: they start slowly


def workers_for(jobs: int, blocks: int, device: torch.device) -> int:
    """Return the number of processes that code blocks; by default the number of cores, and 1 is this process."""
    if jobs:
        return max(1, min(jobs, blocks))
    if device.type == "cuda":
        return max(1, min(cores(), GPU_WORKERS, blocks // GPU_BLOCKS))
    return max(1, min(cores(), blocks))


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def mapped(function: Callable[..., Any], tool: Any, inputs: Iterable[tuple[Any, ...]], workers: int) -> Iterator[Any]:
    """function(tool, *input) of each input, in order. More than one worker: in processes with a copy of the tool each.

    A NicestError that the function raises is raised here. So is one if a process dies. Processes end with the iterator.
    """
    given = _pickled(function, tool) if workers > 1 else None
    if given is None:
        for each in inputs:
            yield function(tool, *each)
        return
    with _Workers(given, workers) as processes:
        yield from processes.results(inputs)


def _pickled(function: Callable[..., Any], tool: Any) -> bytes | None:
    """None of what cannot go to another process, such as a flow with a lambda in it."""
    try:
        return pickle.dumps((function, tool))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


class _Workers:
    """Processes that each code one block at a time."""

    def __init__(self, given: bytes, count: int) -> None:
        self.given, self.count = given, count
        self.processes = dict[Any, Any]()  # by the pipe to each

    def __enter__(self) -> _Workers:
        forks = "forkserver" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload(list(PRELOADED))  # so that all workers import them once
        threads = max(1, cores() // self.count)
        try:
            for _ in range(self.count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, threads), daemon=True)
                process.start()
                theirs.close()  # so that the pipe ends with the process
                self.processes[ours] = process
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for pipe, process in self.processes.items():
            process.kill()
            pipe.close()
        for process in self.processes.values():
            process.join()

    def results(self, inputs: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        for pipe in self.processes:
            self._send(pipe, self.given)
        idle, running, found = list(self.processes), dict[Any, int](), dict[int, Any]()
        asked, number, due = iter(inputs), 0, 0
        while True:
            while idle and number < due + AHEAD * self.count and (each := next(asked, None)) is not None:
                pipe = idle.pop()
                self._send(pipe, pickle.dumps(each, protocol=pickle.HIGHEST_PROTOCOL))
                running[pipe], number = number, number + 1
            if due in found:
                yield found.pop(due)
                due += 1
            elif running:
                for pipe in connection.wait(list(running)):
                    found[running.pop(pipe)] = self._answer(pipe)
                    idle.append(pipe)
            else:
                return

    def _send(self, pipe: Any, content: bytes) -> None:
        try:
            pipe.send_bytes(content)
        except OSError as error:
            raise self._died(pipe) from error

    def _answer(self, pipe: Any) -> Any:
        try:
            failed, found = pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died(pipe) from error
        if failed:
            raise NicestError(found)
        return found

    def _died(self, pipe: Any) -> NicestError:
        process = self.processes[pipe]
        process.join()
        code = process.exitcode
        how = (
            f"was killed by signal {-code}, perhaps for lack of memory" if code < 0 else f"ended with exit code {code}"
        )
        return NicestError(f"a worker process {how}: try again with fewer --jobs (in Python: jobs=1)")


def _work(pipe: Any, threads: int) -> None:
    """Code blocks until nobody asks for more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        function, tool = pickle.loads(pipe.recv_bytes())
        while True:
            pipe.send((False, function(tool, *pickle.loads(pipe.recv_bytes()))))
    except (EOFError, ConnectionError):  # the parent has no more blocks
        pass
    except NicestError as error:
        pipe.send((True, str(error)))
    except Exception as error:
        pipe.send((True, f"a worker process failed: {type(error).__name__}: {brief(error)}"))


def end_with_parent() -> None:
    """End this process as soon as the one that started it is gone."""
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)
