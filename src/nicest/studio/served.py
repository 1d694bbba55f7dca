"""The runs that are served: each is opened when it is first asked for, and again when its file has changed."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from nicest.errors import NicestError
from nicest.recipes import load_recipe
from nicest.runs.folder import METRICS, RECIPE, RunFolder
from nicest.runs.run import Run
from nicest.runs.shipped import fetched
from nicest.studio.api import Json
from nicest.studio.images import Images
from nicest.studio.opened import Opened, Rows
from nicest.studio.tables import Tables

M = TypeVar("M", bound=Opened)
KINDS: dict[str, type[Opened]] = {each.kind: each for each in (Images, Rows, Tables)}


class Unready(NicestError):
    """A run that has no model now, or one of another form than the request names."""


class Served:
    """A run folder and, once it was asked for, its model. A `label` selects it in a model of labelled images."""

    def __init__(self, id: str, path: Path, label: int | None = None) -> None:
        self.id, self.path, self.folder, self.label = id, path, RunFolder(path), label
        self.name = path.resolve().name + ("" if label is None else f", label {label}")
        self.lock = threading.RLock()
        self.opened: Opened | None = None
        self.was_ready = False

    def open(self, kind: type[M], form: str = "") -> M:
        """Return the model, which must be of this kind and form; read it again if its file has changed."""
        found = self.reopened()
        if form not in ("", found.form):
            raise Unready("This run was replaced by one of another form: ask for the list of runs again")
        if not isinstance(found, kind):
            raise NicestError(f"this model is of {found.of}, not of {kind.of}: choose another run")
        return found

    def reopened(self) -> Opened:
        """Return the model; read it again if its file has changed."""
        with self.lock:
            stamp = stamp_of(self.folder.model)
            if self.opened is None or self.opened.stamp != stamp:
                self.close()
                try:
                    run = Run(self.folder.model, label=self.label)
                    run.require_whole_rows()
                    self.opened = KINDS[run.kind](run, stamp)
                except NicestError as error:
                    raise Unready(self.absent() or str(error)) from error
                self.was_ready = True
            return self.opened

    def absent(self) -> str:
        """Return the message for a run without a model file; empty if there is one."""
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
        """Drop the model and end its background work."""
        if self.opened:
            self.opened.close()
        self.opened = None

    def info(self) -> Json:
        """Describe the run; without a model, `why` says what is missing."""
        found = {"id": self.id, "name": self.name, "ready": True, "why": "", "shape": [], "classes": 0}
        try:
            return found | self.reopened().info()
        except NicestError as error:
            return found | {"ready": False, "why": str(error), "form": "", "kind": "unknown", "dataset": "", "data": ""}

    def metrics(self, after: int) -> Json:
        """Return the metrics after a step, and what they say about the end of the training."""
        rows = [finite(row) for row in self.folder.metrics()]
        path = self.folder.path / METRICS
        idle = max(0.0, time.time() - path.stat().st_mtime) if path.is_file() else None
        try:
            train = self.reopened().run.recipe.train
            epochs, patience = train.epochs, train.patience
        except NicestError:
            epochs = patience = 0
        scored = [row for row in rows if row.get("valid_nats") is not None and isinstance(row.get("epoch"), int)]
        best = max(scored, key=lambda row: row["valid_nats"])["epoch"] if scored else None
        last = scored[-1]["epoch"] if scored else 0
        out_of_patience = best is not None and 0 < patience <= last - best
        return {
            "rows": [row for row in rows if row["step"] > after],
            "idle_seconds": idle,
            "epochs": epochs,
            "patience": patience,
            "best_epoch": best,
            "finished": bool(epochs and (last >= epochs or out_of_patience)),
        }


def add_run(served: dict[str, Served], path: Path) -> str:
    """Serve a run under an id made from its folder's name, and each label of a model of labelled images as a run.

    Returns
    -------
    str
        The (first) new id.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", path.resolve().name.lower()).strip("-") or "run"
    count = sum(re.fullmatch(rf"{plain}(-\d+)?(-label-0)?", id) is not None for id in served)
    id = f"{plain}-{count + 1}" if count else plain
    added = {f"{id}-label-{label}": Served(f"{id}-label-{label}", path, label) for label in labels_of(path)}
    added = added or {id: Served(id, path)}
    served |= added
    return next(iter(added))


def name_runs(paths: Sequence[Path]) -> dict[str, Served]:
    """Return the named runs by their ids; refuse what is no run."""
    served: dict[str, Served] = {}
    for path in map(fetched, paths):
        if not path.exists():
            raise NicestError(
                f"expected a run folder, found no {path}: train one with `nicest train`, or `nicest demo`"
            )
        if path.is_file() and path.suffix != ".safetensors":
            raise NicestError(f"expected a run folder, got the file {path}: give the folder that `nicest train` wrote")
        add_run(served, path)
    return served


def labels_of(path: Path) -> range:
    """Return the labels in the recipe of a run; none if it has none or cannot be read."""
    with suppress(NicestError):
        return range(len(load_recipe(str(RunFolder(path).path / RECIPE)).data.classes))
    return range(0)


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return numbers that change when a file is replaced or written over."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def finite(row: dict[str, Any]) -> Json:
    """Replace numbers that JSON cannot express by None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
