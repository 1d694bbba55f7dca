"""Seconds that a table model takes to train, score, sample and impute, with other work on every core and without."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.compare import in_process
from benchmarks.report import Out, Report, origin
from nicest.errors import NicestError
from nicest.estimators.table import NICETable
from nicest.inference.workers import cores
from nicest.progress import track
from nicest.tasks import options

COLUMNS, HIDDEN = 10, 0.2
CASES = {"one": (1, False), "all": (None, False), "all, busy cores": (None, True)}


def study(
    size: Annotated[Sequence[int], options.integer(20, 10**7, "Training rows; repeatable.")] = (1_000, 16_000),
    rows: Annotated[int, options.integer(1, 10**7, "Rows to score and to sample.")] = 100_000,
    imputed: Annotated[int, options.integer(1, 10**7, "Rows to impute.")] = 400,
    effort: Annotated[str, typer.Option(help="low, medium or high.")] = "medium",
    out: Out = None,
) -> Report:
    """Measure how long a model of a table trains, scores, samples and imputes, and what busy cores cost.

    Each model has its own process: with one thread, with the default threads, and with these next to a busy loop on
    every core. Seconds are of wall-clock time, and of CPU time of the process.

    Example: python -m benchmarks table-speed --size 1000 --rows 10000
    """
    found = []
    runs = [(case, n) for case in CASES for n in size]
    for case, n in track(runs, "speed", len(runs)):
        threads, busy = CASES[case]
        with busy_cores() if busy else nullcontext():
            answer, why = in_process(partial(measured, n, rows, imputed, effort), threads)
        if why:
            raise NicestError(f"{n} rows with threads: {case}: {why}")
        found.append({"threads": case, "rows": n} | answer)
    about = {"columns": COLUMNS, "scored_rows": rows, "imputed_rows": imputed, "effort": effort}
    return Report(found=origin(torch.device("cpu")) | about | {"rows": found}, out=out)


def data(n: int, seed: int) -> np.ndarray:
    """Draw rows of correlated columns, some of them bent."""
    mixing = np.random.default_rng(0).normal(size=(COLUMNS, COLUMNS))
    rows = np.random.default_rng(seed).normal(size=(n, COLUMNS)) @ mixing
    return np.where(np.arange(COLUMNS) % 2, np.exp(rows / 4), rows)


def measured(size: int, rows: int, imputed: int, effort: str) -> dict[str, float]:
    """Return the seconds of every kind of work of one model."""
    model = NICETable(effort=effort, random_state=0, device="cpu")
    train, many, some = data(size, 1), data(rows, 2), data(imputed, 3)
    some[np.random.default_rng(4).random(some.shape) < HIDDEN] = np.nan
    work: dict[str, Callable[[], object]] = {
        "fit": partial(model.fit, train),
        "score": partial(model.score_samples, many),
        "sample": partial(model.sample, rows, random_state=0),
        "impute": partial(model.impute, some),
    }
    found = dict[str, float]()
    for name, call in work.items():
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        found |= {f"{name} s": time.perf_counter() - wall, f"{name} CPU s": time.process_time() - cpu}
    return found


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy."""
    loops = [multiprocessing.Process(target=spin, daemon=True) for _ in range(cores())]
    try:
        for each in loops:
            each.start()
        yield
    finally:
        for each in loops:
            each.kill()


def spin() -> None:
    """Loop without end."""
    while True:
        pass
