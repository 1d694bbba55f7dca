"""Scoring, imputing, predicting and sampling in parts that an engine for many machines shares out.

A part is a row group of a Parquet file, or some samples. What is found in it depends on the part alone, so it does not
matter who does it, in which order, or how often, should a worker die. It is what `nicest score`, `impute`, `predict`
and `sample` write.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nicest import __version__
from nicest.data.cells import decode
from nicest.data.columns import Column, require_columns
from nicest.data.tables import TableFile, require_pyarrow, table_files
from nicest.errors import NicestError
from nicest.inference.impute import STEPS
from nicest.messages import listed
from nicest.remote import place
from nicest.runs.run import Run
from nicest.tasks.impute_table import filled, filled_cells
from nicest.tasks.predict import ROWS, blocks, predicted, predicted_cells, schema, targets_and_given
from nicest.tasks.sample import draw
from nicest.tasks.score import SCHEMA, Part, score_quantiles, scored

Files = str | Path | Sequence[str | Path]
PLACE = SCHEMA[:2]  # the first columns of a result: which row of which file it is of, by its whole path


class Job(NamedTuple):
    """Work for an engine: of plain values, which travel to workers; `schema` is Arrow's, of all results."""

    task: str
    run: str
    options: dict[str, Any]
    parts: list[tuple[str, int, int, int, int]]  # path, number of the file, row group, first row, rows
    schema: Any

    def worker(self, extra: str) -> Callable[[int], Iterator[Any]]:
        """A function that gives the record batches of a part by its number.

        It is nested, and so travels by value: a worker without nicest can say so.
        """
        task, run, options, parts, version = self.task, self.run, self.options, self.parts, __version__

        def work(number: int) -> Iterator[Any]:
            try:
                from nicest import __version__ as here
                from nicest.tasks.parts import results
            except ImportError as error:
                raise RuntimeError(f"a worker has no nicest: install 'nicest[{extra}]=={version}' there") from error
            if here != version:
                raise RuntimeError(f"a worker has nicest {here}, and this is {version}: install one version everywhere")
            return results(task, run, options, parts[number])

        return work


def scoring(run: str | Path, files: Files, *, draws: int = 8, seed: int = 0, device: str = "cpu") -> Job:
    model, parts = _opened_for(run, files, "whole rows or targets")
    draws = model.draws(draws)
    options = {"draws": draws, "seed": seed, "reference": score_quantiles(model, draws), "device": device}
    return Job("score", _anywhere(run), options, parts, _arrow(SCHEMA))


def imputing(
    run: str | Path,
    files: Files,
    *,
    draws: int = 400,
    steps: int = STEPS,
    interval: float = 0.9,
    seed: int = 0,
    device: str = "cpu",
) -> Job:
    _, parts = _opened_for(run, files, "whole rows")
    options = {"draws": draws, "steps": steps, "interval": interval, "seed": seed, "device": device}
    return Job("impute", _anywhere(run), options, parts, imputed_schema(TableFile(place(parts[0][0]))))


def predicting(
    run: str | Path,
    files: Files,
    *,
    level: float = 0.9,
    draws: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Job:
    model, parts = _opened_for(run, files, "targets")
    targets, _ = targets_and_given(model)
    names = TableFile(place(parts[0][0])).names
    observed = all(column.name in names for column in targets)
    options = {"level": level, "draws": draws, "seed": seed, "observed": observed, "device": device}
    return Job("predict", _anywhere(run), options, parts, predicted_schema(targets, draws, observed=observed))


def sampling(
    run: str | Path, n: int, *, rows: int = 100_000, temperature: float = 1.0, seed: int = 0, device: str = "cpu"
) -> Job:
    model = Run(run)
    if not model.columns:
        raise NicestError(f"{model.path} is not a model of a table, which engines draw: use `nicest sample`")
    model.require_whole_rows()
    if min(n, rows) < 1:
        raise NicestError(f"expected a row or more, got {n} samples in parts of {rows}")
    parts = [("", 0, i, i * rows, min(rows, n - i * rows)) for i in range(-(-n // rows))]
    found = decode(np.empty((0, len(model.columns))), model.columns).schema
    return Job("sample", _anywhere(run), {"temperature": temperature, "seed": seed, "device": device}, parts, found)


def _opened_for(run: str | Path, files: Files, of: str) -> tuple[Run, list[Any]]:
    """A model of a table, which must be one `of` what is asked, and the parts of the files."""
    require_pyarrow()
    model = Run(run)
    if not model.columns:
        raise NicestError(f"{model.path} is not a model of a table: train one with the recipe `table`")
    model.require_whole_rows(("targets",) if "targets" in of else ())
    columns = targets_and_given(model)[1] if of == "targets" else model.columns
    parts: list[Any] = []
    for i, path in enumerate(table_files([files] if isinstance(files, str | Path) else files)):
        if path.suffix.lower() != ".parquet":
            raise NicestError(f"expected Parquet files, which engines share out by row groups, got {path}")
        table, first = TableFile(path), 0
        require_columns(table, columns)
        for group, rows in enumerate(table.counts):
            parts.append((str(path.resolve()), i, group, first, rows or 0))
            first += rows or 0
    return model, parts


def _anywhere(run: str | Path) -> str:
    """A run folder by its whole path; the name of a model that comes with nicest as it is."""
    return str(Path(run).resolve()) if Path(run).exists() else str(run)


def _arrow(fields: Sequence[Any]) -> Any:
    import pyarrow as pa

    return pa.schema(fields)


def imputed_schema(table: TableFile) -> Any:
    if twice := [name for name, _ in PLACE if name in table.names]:
        raise NicestError(f"{table.path}: the result would have two columns {listed(twice)}: rename those of the table")
    plain = (each.with_type(getattr(each.type, "value_type", each.type)) for each in table.schema)
    return _arrow([*_arrow(PLACE), *plain])


def predicted_schema(targets: Sequence[Column], draws: int, *, observed: bool) -> Any:
    return schema(targets, draws, observed=observed).insert(0, _arrow(PLACE).field(0))


def results(task: str, run: str, options: Mapping[str, Any], part: tuple[str, int, int, int, int]) -> Iterator[Any]:
    """The record batches of a part, by a worker: one model for each process."""
    how = dict(options)
    model = _model(run, how.pop("device"))
    yield from TASKS[task](model, Part(part[1], place(part[0]), None, part[2], part[3]), part[4], **how)


@functools.lru_cache(maxsize=1)
def _model(run: str, device: str) -> Run:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # engines start a worker for each core
    return Run(run, device=device)


def _batches(path: Path, row: int, columns: Sequence[Any], found: Any) -> Iterator[Any]:
    """Columns of results as record batches, after the file and the row."""
    import pyarrow as pa

    rows = len(columns[0])
    arrays = [[str(path)] * rows, np.arange(row, row + rows), *columns]
    yield from pa.table([pa.array(a) if isinstance(a, list) else a for a in arrays], schema=found).to_batches()


def _score(run: Run, part: Part, rows: int, **how: Any) -> Iterator[Any]:
    import pyarrow as pa

    row = part.first_row
    for columns in scored(run, part._replace(table=TableFile(part.path)), **how):
        yield from _batches(part.path, row, [pa.array(c, mask=np.isnan(c)) for c in columns], _arrow(SCHEMA))
        row += len(columns[0])


def _impute(run: Run, part: Part, rows: int, *, seed: int, **how: Any) -> Iterator[Any]:
    import pyarrow as pa

    table, row = TableFile(part.path), part.first_row
    found = imputed_schema(table)
    for batch in table.batches(table.names, part.group):
        _, hidden, cells = filled_cells(run, batch, part.path, seed=[seed, row], **how)
        whole = filled(pa.Table.from_batches([batch]), run.columns, cells.value, hidden)
        columns = [column.cast(of) for column, of in zip(whole.columns, found.types[2:], strict=True)]
        yield from _batches(part.path, row, columns, found)
        row += batch.num_rows


def _predict(run: Run, part: Part, rows: int, *, seed: int, observed: bool, **how: Any) -> Iterator[Any]:
    """Predictions are made of ROWS rows at once, whatever the row groups: a part has the blocks that begin in it."""
    targets, given = targets_and_given(run)
    names = [column.name for column in (*given, *(targets if observed else ()))]
    start, stop = (-(-row // ROWS) * ROWS for row in (part.first_row, part.first_row + rows))
    found = predicted_schema(targets, how["draws"], observed=observed)
    for some in blocks(TableFile(part.path).rows(names, start, stop)):
        prediction, _, _ = predicted(run, some, part.path, observed=observed, seed=[seed, start], **how)
        yield from _batches(part.path, start, predicted_cells(prediction, targets, start)[1:], found)
        start += some.num_rows


def _sample(run: Run, part: Part, rows: int, *, temperature: float, seed: int) -> Iterator[Any]:
    drawn = draw(run, rows, temperature=temperature, seed=seed + part.group)
    yield from decode(drawn, run.columns).to_batches()


TASKS: dict[str, Callable[..., Iterator[Any]]] = {
    "score": _score,
    "impute": _impute,
    "predict": _predict,
    "sample": _sample,
}
