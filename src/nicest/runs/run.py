"""An opened run: a trained model, its recipe, its columns and its data."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from nicest.data import Splits
from nicest.errors import NicestError
from nicest.files import to_json
from nicest.flows import AtContext, Density, Flow
from nicest.inference.engine import Engine
from nicest.recipes import Recipe
from nicest.recipes.splits import load_splits
from nicest.runs.digests import ENVIRONMENT
from nicest.runs.factory import from_factory
from nicest.runs.folder import COLUMNS, METRICS, RunFolder, filled, restore_flow
from nicest.runs.formats import FORMAT
from nicest.runs.runtime import choose_device, environment, rows_to
from nicest.runs.shipped import fetched
from nicest.runs.sinks import Saved

if TYPE_CHECKING:
    from nicest.data.columns import Schema
    from nicest.tables.table import Table

DRAWS = 8  # draws of the dequantisation noise that a log-likelihood is averaged over


class Run:
    """A trained model and what it was trained on, from a run folder or a model file alone; nothing in it is executed.

        run = nicest.open("runs/mnist")        # or a model that comes with nicest: nicest.open("digits")
        run.flow.log_prob(x), run.engine.sample(100_000), run.splits.test, run.nats(x)

    The model is read once, the data when it is first used. The model must be the file that training wrote, by its
    SHA-256 in environment.json.

    Parameters
    ----------
    path : str or Path
        A run folder, a model file, or the name of a model that comes with nicest.
    device, dtype : str or torch.device, torch.dtype
    verify : bool, optional
        As for `RunFolder`.
    flow : Density, optional
        Of a run of a density that you built yourself: build it again, and the stored weights are loaded into it.
    trust : bool or str
        The name of the function that may be called to build a flow that `nicest.save` wrote.
    data : str, optional
        Where the data is now, if it was moved.
    label : int, optional
        Of a model of images given labels: make it one of the images of this label.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        verify: bool | None = None,
        flow: Density | None = None,
        trust: bool | str = False,
        data: str | None = None,
        label: int | None = None,
    ) -> None:
        self.folder = RunFolder(fetched(path), verify=verify)
        self.path, self.dtype, self.device = self.folder.path, dtype, choose_device(str(device))
        self.tensors, self.trained, self.figures, self.version = self.folder.read_model()
        self.schema: Schema | None = self.folder.schema() if self.trained.data.kind == "table" else None
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

    def flow_in(self, dtype: torch.dtype) -> Any:
        """Build the trained model in another dtype, from the stored numbers."""
        source = str(self.folder.asked)
        if self.own is None:
            flow = restore_flow(self.trained, self.tensors, source, self.version, self.schema)
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
    def table(self) -> Table:
        """The model of a table with its columns, which answers all questions about rows."""
        from nicest.tables.table import Table  # not needed for images

        if self.schema is None:
            raise NicestError(f"{self.path} is not a model of a table: train one with `nicest train FILE.csv`")
        return Table(self.schema, self.flow)

    @functools.cached_property
    def splits(self) -> Splits:
        """The data of the run, which must be what it was trained on; with a label, its images alone."""
        splits = load_splits(self.trained)
        return splits if self.label is None else splits.of_label(self.label)

    def require_whole_rows(self, but: Sequence[str] = ()) -> None:
        """Raise a NicestError for a model of images given labels, unless `but` allows "labels"."""
        if self.recipe.data.classes and "labels" not in but:
            raise NicestError(
                f"{self.path} is a model of images given their labels, 0 to {len(self.recipe.data.classes) - 1}: say"
                " which by --label, or in Python nicest.open(path, label=3)"
            )

    def require_label(self, label: int) -> None:
        """Raise a NicestError unless the run is a model of images given labels, and this is one of them."""
        count = len(self.trained.data.classes)
        if not count:
            raise NicestError(f"{self.path} is a model without labels: leave the label out, or train with data.labels")
        if not 0 <= label < count:
            raise NicestError(f"expected a label from 0 to {count - 1}, got {label}")

    @property
    def kind(self) -> Literal["table", "rows", "images"]:
        return "table" if self.schema else "rows" if len(self.recipe.data.shape) == 1 else "images"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A row of metrics for each validation; a training that goes on writes more."""
        return self.folder.metrics()

    def rows(self, split: str) -> Tensor:
        """Return the rows of a split, on the device of the run."""
        return rows_to(self.splits.split(split), self.device)

    def draws(self, wanted: int = DRAWS) -> int:
        """Return how many draws of the noise to average over: 1 where the model has no noise."""
        units = getattr(self.flow, "units", None)
        return wanted if units is not None and units.discrete else 1

    def nats(self, rows: Tensor, draws: int = DRAWS) -> Tensor:
        """Return the log-likelihood of stored rows, (n,), in the units that `evaluate` reports.

        The rows of a conditional model include its context, as those of `rows` do.
        """
        x, context = self.recipe.data.split(rows)
        each = [self.engine.log_prob(x, context).double() for _ in range(self.draws(draws))]
        return torch.stack(each).mean(0) + self.flow.interval_nats


def load(path: str | Path, **options: Any) -> Any:
    """Open a run and return its trained model: `nicest.open(path, **options).flow`."""
    return Run(path, **options).flow


def write_run(
    path: str | Path,
    flow: Density,
    recipe: Recipe,
    *,
    schema: Schema | None = None,
    figures: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]] = (),
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a run folder for a model that was trained in memory; `files` are further text files, by name.

    Raises
    ------
    NicestError
        If the folder holds a run.
    """
    folder = RunFolder(path)
    folder.refuse_existing()
    made = environment(choose_device("cpu")) | {"format": f"nicest {FORMAT}"}
    texts = {ENVIRONMENT: to_json(made), METRICS: "".join(json.dumps(dict(row)) + "\n" for row in metrics)} | dict(
        files or {}
    )
    if schema is not None:
        texts[COLUMNS] = to_json(schema.to_json())
    with folder.open_for_writing():
        folder.begin(recipe, texts)
        folder.save_model(Saved(flow.state_dict(), recipe, dict(figures)))
