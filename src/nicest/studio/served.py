"""A run as the studio serves it: its model, read when it is asked for, and what is the same for all of them."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.inference.engine import Engine
from nicest.runs.folder import RunFolder
from nicest.runs.run import Run
from nicest.studio.messages import Metrics, RunInfo, Spectrum, TrainingScores
from nicest.tasks.latent import Model, principal
from nicest.tasks.score import training_quantiles

noise = threading.Lock()  # the seed of the noise is the process's


class Served:
    """A run folder, whose model is read when it is first asked for, and again when training has replaced it."""

    def __init__(self, id: str, path: Path) -> None:
        self.id, self.folder, self.name = id, RunFolder(path), path.resolve().name
        self.lock = threading.RLock()
        self.loaded: Loaded | None = None

    def open(self) -> Loaded:
        with self.lock:
            try:
                found = self.folder.model.stat()
                stamp = (
                    found.st_ino,
                    found.st_mtime_ns,
                )  # training replaces it; inodes are used again
            except OSError:
                stamp = None
            if self.loaded is None or self.loaded.stamp != stamp:
                self.close()
                self.loaded = Loaded(self.folder, stamp)
            return self.loaded

    def close(self) -> None:
        if self.loaded:
            self.loaded.close()

    def info(self) -> RunInfo:
        try:
            return self.open().info(self.id, self.name)
        except NicestError as error:
            return RunInfo(id=self.id, name=self.name, ready=False, why=str(error), data="")

    def metrics(self, after: int) -> Metrics:
        """The rows of metrics after a step; a training that goes on writes more."""
        rows = [row for row in self.folder.metrics() if row["step"] > after]
        path = self.folder.path / "metrics.jsonl"
        idle = max(0.0, time.time() - path.stat().st_mtime) if path.is_file() else None
        try:
            epochs = self.open().run.recipe.train.epochs
        except NicestError:
            epochs = 0
        return Metrics(rows=[_plain(row) for row in rows], idle_seconds=idle, epochs=epochs)


class Loaded:
    """The model of a run, ready for any number of threads."""

    def __init__(self, folder: RunFolder, stamp: tuple[int, int] | None) -> None:
        self.stamp = stamp
        self.run = Run(folder.model)
        self.run.flow.requires_grad_(False)
        self.model, self.engine = Model(self.run), self.run.engine
        self.data, self.columns = self.run.recipe.data, self.run.columns
        self.lock, self.turnstile = threading.Lock(), threading.Lock()
        self.closed, self.idle, self.climbing = threading.Event(), threading.Event(), 0
        self.idle.set()
        self.counter: threading.Thread | None = None
        self.quantiles: np.ndarray | None = None
        self.dtype: Any = "float32" if not self.data.levels else "uint8" if self.data.levels <= 256 else "uint16"
        self.kind = np.dtype(self.dtype).newbyteorder("<")
        self.draws = self.run.draws()

    def info(self, id: str, name: str) -> RunInfo:
        recipe = self.run.recipe
        return RunInfo(
            id=id,
            name=name,
            ready=True,
            recipe=recipe.name,
            dataset=Path(self.data.name).name,
            kind=self.run.kind,
            shape=list(self.data.shape),
            dim=self.data.dim,
            levels=self.data.levels,
            dtype=self.dtype,
            brightest=self.brightest,
            interval=list(self.data.interval) if self.data.levels else None,
            data=self.no_data,
            imputes=bool(self.columns),
        )

    @functools.cached_property
    def no_data(self) -> str:
        """Why the data of the run is not at hand; empty where it is."""
        try:
            with self.lock:
                self.run.splits  # noqa: B018
        except NicestError as error:
            return str(error)
        return ""

    @functools.cached_property
    def brightest(self) -> float:
        if self.data.levels:
            return self.data.levels - 1
        return 1.0 if self.no_data else float(np.abs(self.run.splits.train).max()) or 1.0

    @property
    def unit(self) -> str:
        low, high = self.data.interval
        return f"nats on [{low:g}, {high:g}]" if self.data.levels else "nats in the units of the data"

    def reference(self) -> np.ndarray | None:
        """Quantiles of the nats of the training rows; None while they are counted, and where the data is gone.

        Of many rows and a large network that takes minutes, once in the life of a model: who asks first starts it.
        """
        with self.lock:
            first = self.counter is None
            if first:
                self.counter = threading.Thread(target=self._count)
                self.counter.start()
        if first and self.counter:
            self.counter.join(2)
        return self.quantiles

    def _count(self) -> None:
        with suppress(OSError, AttributeError):  # behind all who wait for an answer, where threads may be told so
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        engine = Patient(self.run.flow, self.closed, self.idle)
        with suppress(Closed):
            self.quantiles = training_quantiles(self.run, self.draws, engine)

    def close(self) -> None:
        """Break off what is going on behind the requests."""
        self.closed.set()
        self.idle.set()
        if self.counter:
            self.counter.join()

    def training_scores(self) -> TrainingScores:
        found = self.reference()
        counting = found is None and self.counter is not None and self.counter.is_alive()
        kept = [] if found is None else (found[::10] + self.run.flow.units.interval_nats).tolist()
        return TrainingScores(quantiles=kept, counting=counting)

    def spectrum(self) -> Spectrum:
        model = self.model
        pca = None if self.no_data or model.whitens else self.principal_deviations
        sigma = model.sigma[model.order].tolist()
        return Spectrum(sigma=sigma, deviation=model.deviation, pca=pca, whitened=model.whitens)

    @functools.cached_property
    def principal_deviations(self) -> list[float]:
        with self.lock:
            return [float(each) for each in principal(self.model.units, self.run.rows("train"))[1]]

    def climbers(self, change: int) -> None:
        """Count the ascents; while there are any, the counting of training scores rests."""
        with self.turnstile:
            self.climbing += change
            self.idle.clear() if self.climbing else self.idle.set()


class Closed(Exception):
    """The server ends."""


class Patient(Engine):
    """An engine for work behind the scenes: it rests while someone watches an ascent, and ends with the server."""

    def __init__(self, flow: Flow, closed: threading.Event, idle: threading.Event) -> None:
        super().__init__(flow, batch=200)
        self.closed, self.idle = closed, idle

    def each(self, method: str, x: Tensor, *, batch: int = 0, **options: bool) -> Iterator[Any]:
        for result in super().each(method, x, batch=batch, **options):
            self.idle.wait(60)
            if self.closed.is_set():
                raise Closed
            yield result


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
