"""Seconds that a table model takes to train, score, sample and impute, with other work on every core and without."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.compare import in_process
from benchmarks.report import origin
from nicest.errors import NicestError
from nicest.estimators.table import NICETable
from nicest.inference.workers import cores
from nicest.progress import track

SIZES, COLUMNS, HIDDEN = (1_000, 16_000), 10, 0.2
CASES = {"one": (1, False), "all": (None, False), "all, busy cores": (None, True)}


def study(sizes: Sequence[int] = SIZES, rows: int = 100_000, imputed: int = 400, effort: str = "medium") -> dict[str, Any]:
    """Measure a fit for each size, then the work on `rows` rows and the imputation of `imputed` rows.

    Each in its own process: with one thread, with the default threads, and with these next to a busy loop on every
    core. Seconds are of wall-clock time, and of CPU time of the process.
    """
    found = []
    runs = [(case, size) for case in CASES for size in sizes]
    for case, size in track(runs, "speed", len(runs)):
        threads, busy = CASES[case]
        with busy_cores() if busy else nullcontext():
            answer, why = in_process(partial(measured, size, rows, imputed, effort), threads)
        if why:
            raise NicestError(f"{size} rows with threads: {case}: {why}")
        found.append({"case": case, "rows": size} | answer)
    return origin(torch.device("cpu")) | {
        "columns": COLUMNS,
        "scored_rows": rows,
        "imputed_rows": imputed,
        "effort": effort,
        "rows": found,
    }


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
    found = {}
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
