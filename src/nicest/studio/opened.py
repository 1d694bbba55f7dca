"""An open model: what the studio asks of any kind of model, and of flows over numbers."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from fastapi import Query

from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.inference.engine import Engine
from nicest.runs.run import Run
from nicest.studio import limits
from nicest.studio.api import Json, endpoint
from nicest.studio.latents import Latents
from nicest.studio.messages import Count, SeedQuery
from nicest.tasks.latent import principal
from nicest.tasks.score import kept_quantiles, score_quantiles

FEW = 20  # validation rows below which a fraction of them says little
SPLITS = {"valid": "validation", "train": "training"}  # compared with, in this order


class Opened:
    """A model in memory, for any number of threads. There is a subclass for each kind of model."""

    kind: ClassVar[str]
    of: ClassVar[str]  # what the model is of, in messages

    def __init__(self, run: Run, stamp: tuple[int, ...]) -> None:
        self.run, self.data, self.stamp = run, run.recipe.data, stamp
        self.run.flow.requires_grad_(False)
        self.draws = 1 if self.kind == "table" else run.draws()
        self.lock, self.closed = threading.Lock(), threading.Event()
        self.counter: threading.Thread | None = None
        self.quantiles: np.ndarray | None = None
        self.compared_with = "validation"

    def info(self) -> Json:
        """Return what the page needs to know of the model."""
        return {
            "form": self.form,
            "recipe": self.run.recipe.name,
            "dataset": Path(self.data.name).name,
            "kind": self.kind,
            "dim": self.dim,
            "data": self.no_data,
        }

    @property
    def dim(self) -> int:
        """The number of columns or pixel values."""
        return self.data.dim

    @property
    def form(self) -> str:
        """A digest of the shape and type of the data: a page must not mix two forms."""
        what = [self.kind, self.data.shape, self.data.levels, self.data.interval, self.run.schema]
        return hashlib.sha256(repr(what).encode()).hexdigest()[:12]

    @functools.cached_property
    def no_data(self) -> str:
        """The reason why the data of the run is not available; empty if it is."""
        try:
            with self.lock:
                self.run.splits  # noqa: B018
        except NicestError as error:
            return str(error)
        return ""

    def reference(self) -> np.ndarray | None:
        """Return quantiles of the log-densities of held-out rows; None while they are computed, or without data.

        An overfitted model prefers its training rows. They are used only if there are too few validation rows, or if
        the data is gone and their scores were stored. The first call starts a background thread: a large model needs
        minutes, once in its life.
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
        with suppress(OSError, AttributeError):  # requests come first, where threads have priorities
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        engine = None if self.kind == "table" else Closable(self.run.flow, self.closed)
        with suppress(Closed):
            for split, name in SPLITS.items():
                if self.no_data:
                    found = kept_quantiles(self.run, self.draws, split)
                elif split == "valid" and len(self.run.splits.valid) < FEW:
                    continue
                else:
                    found = score_quantiles(self.run, self.draws, split, engine)
                if found is not None:
                    self.quantiles, self.compared_with = found, name
                    return

    @endpoint("GET", "job")
    def rows(
        self,
        n: Count = 20,
        seed: SeedQuery = 0,
        of: Annotated[int, Query(ge=0, le=limits.DRAWS)] = 0,
        where: Annotated[str, Query(max_length=limits.WHERE)] = "",
    ) -> Json:
        """Draw `rows`; of a table, under conditions such as `age = 30 and income > 50000`.

        `histograms` are of `of` rows, fewer for many columns. `probability` is that of the conditions, and
        `effective_size` the number of independent rows that the `draws` are worth.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the background work."""
        self.closed.set()
        if self.counter:
            self.counter.join()


class Rows(Opened):
    """A flow over rows of numbers: it has a latent space, but no columns."""

    kind, of = "rows", "numbers with a latent space"

    def __init__(self, run: Run, stamp: tuple[int, ...]) -> None:
        super().__init__(run, stamp)
        self.model, self.engine, self.units = Latents(run), run.engine, run.flow.units

    def info(self) -> Json:
        return super().info() | {"shape": list(self.data.shape), "levels": self.data.levels}

    def rows(self, n: int = 20, seed: int = 0, of: int = 0, where: str = "") -> Json:
        if of or where:
            raise NicestError("this model is of numbers, not of a table: it has no conditions and no histograms")
        rows = self.model.decode(self.model.draw(n, seed=seed)).cpu().numpy()
        cells = [[number(float(f"{each:.7g}")) for each in row] for row in rows.tolist()]
        return {"columns": [f"x{i + 1}" for i in range(self.dim)], "rows": cells, "histograms": []}

    @endpoint("GET")
    def spectrum(self) -> Json:
        """Return the σ_d from the largest, and a PCA of the data unless the model whitens it."""
        model = self.model
        skip = self.no_data or model.whitens or self.dim > limits.PCA
        return {
            "sigma": model.sigma[model.order].tolist(),
            "deviation": model.deviation,
            "pca": None if skip else self.principal_deviations,
            "whitened": model.whitens,
        }

    @functools.cached_property
    def principal_deviations(self) -> list[float]:
        """Standard deviations of the principal components of the training data."""
        with self.lock:
            return [float(each) for each in principal(self.model.units, self.run.rows("train"))[1]]


class Closed(Exception):
    """The server is shutting down."""


class Closable(Engine):
    """An engine for background work, which ends between two batches when the model is closed."""

    def __init__(self, flow: Flow, closed: threading.Event) -> None:
        super().__init__(flow, batch=200)
        self.closed = closed

    def each(self, *inputs: Any, **options: Any) -> Iterator[Any]:
        for result in super().each(*inputs, **options):
            if self.closed.is_set():
                raise Closed
            yield result


def number(value: float) -> float | None:
    """Return a number, or None if JSON cannot express it."""
    return value if math.isfinite(value) else None


def numbers(values: Any) -> list[float | None]:
    """Return the entries of a tensor or array (N,) as JSON numbers."""
    return [number(each) for each in values.tolist()]
