"""Run a trained model of a table on many machines, with Ray Data or Spark."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from nicest import __version__
from nicest.errors import NicestError
from nicest.messages import listed
from nicest.runs.run import Run
from nicest.tasks.impute import impute_batch
from nicest.tasks.predict import chosen, predict_batch
from nicest.tasks.rows import require_table
from nicest.tasks.sample import sample_batch
from nicest.tasks.score import score_batch, score_quantiles

TASKS: dict[str, Any] = {"score": score_batch, "impute": impute_batch, "predict": predict_batch, "sample": sample_batch}


class Worker:
    """Callable that runs one task on Arrow batches, for Ray's ``map_batches`` and Spark's ``mapInArrow``.

    It holds only plain values, so engines can pickle it. Each process opens the model once.

    Parameters
    ----------
    run : str or Path
        A run folder that every machine can read, or the name of a model that comes with nicest.
    task : {"score", "impute", "predict", "sample"}
        "score" appends ``log_density`` and ``outlier_score`` to the columns of a batch; "predict" appends predictions.
        "impute" fills in missing cells. "sample" draws ``rows`` rows for each number in the column ``id``.
    device : str
        "cpu" or "cuda".
    **options
        impute: draw (a joint draw instead of the best values), seed; predict: target, interval; sample: rows, seed.
        "sample" draws with the seed ``seed + id``.

    Raises
    ------
    NicestError
        If the model cannot do the task.
    """

    def __init__(self, run: str | Path, task: str = "score", *, device: str = "cpu", **options: Any) -> None:
        if task not in TASKS:
            raise NicestError(f"expected a task, {listed(list(TASKS))}, got {task!r}")
        inspect.signature(TASKS[task]).bind(None, None, **options)  # validates the names of the options
        # a model that comes with nicest keeps its name: its path may differ from machine to machine
        self.run = str(Path(run).resolve()) if Path(run).exists() else str(run)
        self.task, self.device, self.options, self.version = task, device, options, __version__
        model = _open(self.run, "cpu")
        require_table(model)
        if task == "predict":
            chosen(model, options.get("target", ()))  # validates the names of the targets
        if task == "score":  # computed here because workers may not have the training data
            options["quantiles"] = score_quantiles(model)

    def __call__(self, batch: Any) -> Any:
        """Return the result for a ``pyarrow.Table`` or ``pyarrow.RecordBatch`` as a ``pyarrow.Table``."""
        import pyarrow as pa

        if self.version != __version__:
            raise NicestError(f"expected nicest {self.version} on every worker, found {__version__}: install that one")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # engines start one worker per core
        table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
        return TASKS[self.task](_open(self.run, self.device), table, **self.options)

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the record batches of the result for an iterator of record batches, as ``mapInArrow`` needs."""
        import pyarrow as pa

        for batch in batches:
            step = 1 if self.task == "sample" else max(1, batch.num_rows)  # the samples of one id at a time
            for start in range(0, batch.num_rows, step):
                found = self(batch.slice(start, step))
                types = [pa.timestamp("us", t.tz) if pa.types.is_timestamp(t) else t for t in found.schema.types]
                yield from found.cast(pa.schema(zip(found.column_names, types, strict=True))).to_batches()

    def schema(self, schema: Any) -> Any:
        """Return the Spark schema of the result for a data frame with this Spark schema."""
        from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

        return from_arrow_schema(self(to_arrow_schema(schema, timezone="UTC").empty_table()).schema)


@functools.lru_cache(maxsize=2)
def _open(run: str, device: str) -> Run:
    """Open a run once per process."""
    return Run(run, device=device)
