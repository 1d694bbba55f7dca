"""A run as the studio serves it: its model, read when it is asked for, and what is the same for all of them."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.inference.engine import Engine
from nicest.inference.langevin import ALIKE, SAMPLES, Chains
from nicest.recipes import load_recipe
from nicest.recipes.splits import load_splits
from nicest.runs.folder import RECIPE, RunFolder
from nicest.runs.run import Run
from nicest.runs.runtime import rows_to
from nicest.studio import limits
from nicest.studio.messages import Metrics, Reference, ReferenceScores, RunInfo, Spectrum
from nicest.tasks.latent import Model, principal
from nicest.tasks.score import kept_quantiles, score_quantiles

FEW = 20  # validation rows below which a share of them says little
LABELLED = 100  # training images of a label, at most, that its mean code is of
SPLITS: dict[str, Reference] = {"valid": "validation", "train": "training"}  # the first there is
noise = threading.Lock()  # the seed of the noise is the process's


class Unready(NicestError):
    """A run that has no model now, or one of another form than was asked for."""


class Served:
    """A run folder, whose model is read when it is first asked for, and again when its file has changed.

    A model of images given labels is served as one of the images of a `label`.
    """

    def __init__(self, id: str, path: Path, label: int | None = None) -> None:
        self.id, self.path, self.folder, self.label = id, path, RunFolder(path), label
        self.name = path.resolve().name + ("" if label is None else f", label {label}")
        self.lock = threading.RLock()
        self.loaded: Loaded | None = None
        self.was_ready = False

    def open(self) -> Loaded:
        with self.lock:
            stamp = _stamp(self.folder.model)
            if self.loaded is None or self.loaded.stamp != stamp:
                self.close()
                try:
                    self.loaded = Loaded(self.folder, stamp, self.label)
                except NicestError as error:
                    raise Unready(self.absent() or str(error)) from error
                self.was_ready = True
            return self.loaded

    def absent(self) -> str:
        """What to say where there is no model file."""
        if self.folder.model.is_file():
            return ""
        if not self.folder.path.is_dir():
            return f"The folder of this run, {self.folder.path}, is gone: put it back, or serve another run"
        if self.folder.lost_model():
            return f"The model of this run, {self.folder.model}, is missing: resume the training to write it again"
        if self.was_ready:
            return f"The model of this run, {self.folder.model}, is gone: put it back, or train again"
        return "This run has no model yet: it comes with the first validation of `nicest train`"

    def close(self) -> None:
        if self.loaded:
            self.loaded.close()
        self.loaded = None

    def info(self) -> RunInfo:
        try:
            return self.open().info(self.id, self.name)
        except NicestError as error:
            return RunInfo(id=self.id, name=self.name, ready=False, why=str(error), data="")

    def metrics(self, after: int) -> Metrics:
        """The rows of metrics after a step; a training that goes on writes more."""
        rows = [_plain(row) for row in self.folder.metrics()]
        path = self.folder.path / "metrics.jsonl"
        idle = max(0.0, time.time() - path.stat().st_mtime) if path.is_file() else None
        try:
            train = self.open().run.recipe.train
            epochs, patience = train.epochs, train.patience
        except NicestError:
            epochs = patience = 0
        scored = [row for row in rows if row.get("valid_nats") is not None and isinstance(row.get("epoch"), int)]
        best = max(scored, key=lambda row: row["valid_nats"])["epoch"] if scored else None
        last = scored[-1]["epoch"] if scored else 0
        tired = best is not None and 0 < patience <= last - best
        return Metrics(
            rows=[row for row in rows if row["step"] > after],
            idle_seconds=idle,
            epochs=epochs,
            patience=patience,
            best_epoch=best,
            finished=bool(epochs and (last >= epochs or tired)),
        )


class Loaded:
    """The model of a run, ready for any number of threads."""

    def __init__(self, folder: RunFolder, stamp: tuple[int, ...], label: int | None = None) -> None:
        self.stamp = stamp
        self.run = Run(folder.model, label=label)
        self.run.require_whole_rows()
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
        self.compared_with: Reference = "validation"
        what = [self.run.kind, self.data.shape, self.data.levels, self.data.interval, self.columns]
        self.form = hashlib.sha256(repr(what).encode()).hexdigest()[:12]

    def info(self, id: str, name: str) -> RunInfo:
        recipe = self.run.recipe
        return RunInfo(
            id=id,
            name=name,
            ready=True,
            form=self.form,
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
            classes=len(self.run.trained.data.classes),
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
        """Quantiles of the nats of held-out rows; None while they are counted, and where the data is gone.

        Of training rows an overfitted model thinks better than of any others: they stand in only where there are too
        few validation rows, or where the data is gone and their scores were kept. With many rows and a large network
        it takes minutes, once in the life of a model: who asks first starts it.
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

    def close(self) -> None:
        """Break off what is going on behind the requests."""
        self.closed.set()
        self.idle.set()
        if self.counter:
            self.counter.join()

    def reference_scores(self) -> ReferenceScores:
        found = self.reference()
        counting = found is None and self.counter is not None and self.counter.is_alive()
        kept = [] if found is None else (found[::10] + self.run.flow.units.interval_nats).tolist()
        return ReferenceScores(quantiles=kept, counting=counting, reference=self.compared_with)

    def spectrum(self) -> Spectrum:
        model = self.model
        skip = self.no_data or model.whitens or self.data.dim > limits.PCA
        pca = None if skip else self.principal_deviations
        sigma = model.sigma[model.order].tolist()
        return Spectrum(sigma=sigma, deviation=model.deviation, pca=pca, whitened=model.whitens)

    @functools.cached_property
    def principal_deviations(self) -> list[float]:
        with self.lock:
            return [float(each) for each in principal(self.model.units, self.run.rows("train"))[1]]

    @functools.cached_property
    def label_means(self) -> Tensor:
        """The mean code of training images of each label, (K, D). There are none without labels at hand, nor in a model
        that is given the label: its codes do not depend on it."""
        if not self.no_data and self.run.label is None:
            with suppress(NicestError):  # data without labels
                found = load_splits(replace(self.run.recipe, data=replace(self.data, labels=True, digest="")))
                rows, labels = found.train[:, :-1], found.train[:, -1]
                each = (rows[labels == label][:LABELLED] for label in range(len(found.classes)))
                return torch.stack([self.model.encode(rows_to(some, self.run.device)).mean(0) for some in each])
        return self.model.loc.new_zeros(0, self.data.dim)

    def chains(self, count: int, seed: int) -> Chains:
        """Exact chains, as many for each row. The Gaussian that they are fitted by is found once."""
        if self.data.dim > limits.WALK:
            raise NicestError(
                f"exact draws need a model of at most {limits.WALK} dimensions, this one has {self.data.dim}: use the"
                " ascent"
            )
        made = copy.copy(self.fitted_chains)
        made.chains, made.generator = count, torch.Generator(self.run.device).manual_seed(seed)
        return made

    @functools.cached_property
    def fitted_chains(self) -> Chains:
        with self.lock:
            generator = torch.Generator(self.run.device).manual_seed(0)
            samples = self.engine.sample(SAMPLES, generator=generator)
            return Chains(self.run.flow, samples, None, generator, alike=ALIKE)

    def climbers(self, change: int) -> None:
        """Count the ascents; while there are any, the counting of reference scores rests."""
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

    def each(self, *inputs: Any, **options: Any) -> Iterator[Any]:
        for result in super().each(*inputs, **options):
            self.idle.wait(60)
            if self.closed.is_set():
                raise Closed
            yield result


def add_run(served: dict[str, Served], path: Path) -> dict[str, Served]:
    """Serve a run under a name that is safe in an address, made from that of its folder; of images given labels, every
    label. What was added comes back."""
    plain = re.sub(r"[^a-z0-9]+", "-", path.resolve().name.lower()).strip("-") or "run"
    number = sum(re.fullmatch(rf"{plain}(-\d+)?(-label-0)?", id) is not None for id in served)
    id = f"{plain}-{number + 1}" if number else plain
    added = {f"{id}-label-{label}": Served(f"{id}-label-{label}", path, label) for label in labels_of(path)}
    added = added or {id: Served(id, path)}
    served |= added
    return added


def labels_of(path: Path) -> range:
    """The labels of a run by its recipe; none where its images have none, or where it cannot be read."""
    with suppress(NicestError):
        return range(len(load_recipe(str(RunFolder(path).path / RECIPE)).data.classes))
    return range(0)


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file does: training replaces it by another, and people write over it."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
