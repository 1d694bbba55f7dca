"""An opened run: the one way to a trained model, its recipe, its columns and its data."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nicest.data import Splits
from nicest.data.columns import Column
from nicest.errors import NicestError
from nicest.flows import AtContext, Flow
from nicest.inference.engine import Engine
from nicest.messages import listed
from nicest.recipes.splits import load_splits
from nicest.runs.factory import from_factory
from nicest.runs.folder import COLUMNS, RunFolder, filled, restore_flow
from nicest.runs.runtime import choose_device, rows_to
from nicest.runs.shipped import fetched

DRAWS = 8  # of the dequantisation noise, that a log-likelihood is the mean over


class Run:
    """A trained model and what it was trained on, from a run folder or a model file alone; nothing in it is executed.

        run = nicest.open("runs/mnist")        # or a model that comes with nicest: nicest.open("digits")
        run.flow.log_prob(x), run.engine.sample(100_000), run.splits.test, run.nats(x)

    The model is read once, the data when asked for, and hashed once. The model must be the file that training wrote,
    by its SHA-256 in environment.json: see `RunFolder` for `verify`. A run of a flow that you built yourself needs that
    `flow`, built again, to put the stored weights into; one that `nicest.save` wrote is built by the function that it
    names, once `trust` is that name. `data` says where the data is now, if it was moved. A model of images given
    labels, opened with a `label`, is one of the images of that label.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        verify: bool | None = None,
        flow: Flow | None = None,
        trust: bool | str = False,
        data: str | None = None,
        label: int | None = None,
    ) -> None:
        self.folder = RunFolder(fetched(path), verify=verify)
        self.path, self.dtype, self.device = self.folder.path, dtype, choose_device(str(device))
        self.tensors, self.trained, self.figures, self.version = self.folder.read_model()
        if data is not None:
            self.trained = replace(self.trained, data=replace(self.trained.data, name=data))
        self.recipe, self.label = self.trained, label
        if label is not None:
            self.require_label(label)
            self.recipe = replace(
                self.trained,
                data=replace(self.trained.data, labels=False, classes=()),
                train=replace(self.trained.train, label_weight=0.0),
            )
        self.own = from_factory(self.figures, trust, str(path)) if flow is None else flow
        self.flow = self.flow_in(dtype)

    def flow_in(self, dtype: torch.dtype) -> Flow:
        """The trained flow in another dtype, from the numbers that were stored."""
        source = str(self.folder.asked)
        if self.own is None:
            flow = restore_flow(self.trained, self.tensors, source, self.version)
        else:
            flow = filled(copy.deepcopy(self.own).double(), self.tensors, source, self.version, self.trained.data)
        if self.label is not None:
            label = torch.tensor([[float(self.label)]], dtype=torch.float64)
            flow = Flow(flow.units, AtContext(flow.bijection, flow.embed(label)), flow.prior)
        return flow.to(device=self.device, dtype=dtype).eval()

    @functools.cached_property
    def engine(self) -> Engine:
        return Engine(self.flow)

    @functools.cached_property
    def splits(self) -> Splits:
        """The data of the run, which must be what it was trained on; with a label, its images alone."""
        splits = load_splits(self.trained)
        return splits if self.label is None else splits.of_label(self.label)

    @functools.cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the table that the model is of; none where it is of something else."""
        columns, data = self.folder.columns(), self.recipe.data
        modelled = [columns[i] for i in data.targets or range(len(columns)) if i < len(columns)]
        fits = len(columns) == data.dim and sum(column.discrete for column in modelled) == data.discrete
        if columns and not fits:
            raise NicestError(f"{self.path}: {COLUMNS} is not of this model: restore a copy of it, or train again")
        return columns

    def require_whole_rows(self, but: Sequence[str] = ()) -> None:
        """Refuse a model of some columns given the others, and one of images given labels; `but` allows "targets" or
        "labels"."""
        if self.recipe.data.classes and "labels" not in but:
            raise NicestError(
                f"{self.path} is a model of images given their labels, 0 to {len(self.recipe.data.classes) - 1}: say"
                " which by --label, or in Python nicest.open(path, label=3)"
            )
        if self.recipe.data.targets and "targets" not in but:
            columns = self.columns
            names = listed([columns[i].name for i in self.recipe.data.targets]) if columns else "some columns"
            raise NicestError(
                f"{self.path} is a model of {names} given the other columns, but this command needs one"
                " of all columns: use `nicest predict`, or train without a target"
            )

    def require_label(self, label: int) -> None:
        count = len(self.trained.data.classes)
        if not count:
            raise NicestError(f"{self.path} is a model without labels: leave the label out, or train with data.labels")
        if not 0 <= label < count:
            raise NicestError(f"expected a label from 0 to {count - 1}, got {label}")

    @property
    def kind(self) -> Literal["table", "rows", "images"]:
        return "table" if self.columns else "rows" if len(self.recipe.data.shape) == 1 else "images"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row for each validation; a training that goes on writes more."""
        return self.folder.metrics()

    def rows(self, split: str) -> Tensor:
        """The rows of a split, on the device of the run."""
        return rows_to(self.splits.split(split), self.device)

    def draws(self, wanted: int = DRAWS) -> int:
        """How many draws of the noise to average over: continuous data has none, and needs one."""
        return wanted if self.flow.units.discrete else 1

    def nats(self, rows: Tensor, draws: int = DRAWS) -> Tensor:
        """Return the log-likelihood of stored rows, (n,), as `evaluate` reports it: for pixels on their interval.

        The rows of a conditional model include its context, as those of `rows` do.
        """
        x, context = self.recipe.data.split(rows)
        each = [self.engine.log_prob(x, context).double() for _ in range(self.draws(draws))]
        return torch.stack(each).mean(0) + self.flow.units.interval_nats


def load(path: str | Path, **options: Any) -> Flow:
    """The trained flow of a run: `nicest.open(path, **options).flow`."""
    return Run(path, **options).flow
