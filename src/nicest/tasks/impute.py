"""Fill in the missing cells of a table; observed cells stay as they are (NICE §5.2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from nicest.data.columns import Column, Number
from nicest.data.tables import writing
from nicest.errors import NicestError
from nicest.progress import Bar
from nicest.runs.run import Run
from nicest.tasks import rows
from nicest.tasks.options import Interval, Seed, Table, integer, out_file
from nicest.tasks.results import Result, count


@dataclass(frozen=True, kw_only=True)
class Imputation(Result):
    """Counts of rows, of imputed cells, and of rows with values that training never saw."""

    out: str
    cells: str | None
    interval: float
    draws: int
    seed: int
    rows: int
    filled: int
    rows_filled: int
    unknown: int

    def lines(self) -> Iterator[Any]:
        yield f"{count(self.filled, 'cell')} of {count(self.rows_filled, 'row')} imputed in {self.out}"
        if self.draws:
            yield f"{self.draws} completed copies of each row: columns row and draw"
        if self.unknown:
            yield f"{count(self.unknown, 'row')} with a value that training never saw: it was ignored, and kept"


def impute(
    run: Run,
    table: Table,
    *,
    out: Annotated[str | Path, out_file("The completed table.", rows=True)] = "imputed.csv",
    cells: Annotated[
        str | Path | None, out_file("One line per imputed cell: value, interval, probability.", rows=True)
    ] = None,
    draws: Annotated[
        int, integer(0, 1000, "Write this many completed copies of each row, drawn jointly; 0 for the best one.")
    ] = 0,
    interval: Interval = 0.9,
    seed: Seed = 0,
) -> Imputation:
    """Impute the missing cells of a table. Observed cells and other columns stay as they are.

    Real numbers get the mean of their distribution given the observed cells of the row, integers and numbers with
    frequent values the median, categories the most probable value. --draws writes joint draws of all missing cells
    instead, for multiple imputation. --cells lists `row`, `column`, `value`, `low` and `high`, the ends of the
    interval, and `probability`, that of the value where it is discrete.

    Example: nicest impute runs/people holes.csv --out whole.csv --cells cells.csv
    """
    rows.require_table(run)
    path, target = rows.table_path(table), rows.table_path(out)
    outputs = [target, *([rows.table_path(cells)] if cells else [])]
    if len({str(each.resolve()) for each in outputs}) < len(outputs):
        raise NicestError(f"expected two files for the table and for its cells, got {target} for both")
    if cells and draws:
        raise NicestError("cells describe the best values, not draws: leave out one of them")
    if not 0 < interval < 1:
        raise NicestError(f"expected a probability between 0 and 1 for the interval, got {interval:g}")
    rows.require_outputs(run, *outputs, inputs=[path])
    import pyarrow as pa

    file = rows.open_table(path, run.table.schema)
    copies = [pa.field("row", pa.int64()), pa.field("draw", pa.int64())] if draws else []
    if copies and {"row", "draw"} & set(file.names):
        raise NicestError(f"{path}: the draws would have two columns called row or draw: rename those of the table")
    counts = {"rows": 0, "filled": 0, "rows_filled": 0, "unknown": 0}
    with ExitStack() as stack:
        write = stack.enter_context(writing(target, pa.schema([*copies, *file.schema]), plain=True))
        write_cells = stack.enter_context(writing(outputs[1], CELLS, plain=True)) if cells else None
        bar = stack.enter_context(Bar("imputing", file.count or 0))
        for some in rows.batches(file, file.names):
            values, unknown = rows.encoded(some, run.table.schema, path)
            hidden, first = np.isnan(values) & ~unknown, counts["rows"]
            if draws:
                for k in range(draws):
                    own_seed = int(np.random.SeedSequence([seed, first, k]).generate_state(1)[0])
                    whole = filled(some, run.table.schema, run.table.impute(values, draw=True, seed=own_seed), hidden)
                    places = range(first, first + some.num_rows), [k + 1] * some.num_rows
                    write([*map(pa.array, places), *whole.columns])
            else:
                best = run.table.impute(values)
                write(filled(some, run.table.schema, best, hidden).columns)
                if write_cells:
                    write_cells(cell_lines(run, values, best, hidden, first, interval))
            counts["rows"] += some.num_rows
            counts["filled"] += int(hidden.sum())
            counts["rows_filled"] += int(hidden.any(1).sum())
            counts["unknown"] += int(unknown.any(1).sum())
            bar.update(counts["rows"], f"{counts['filled']:,} cells")
        if not counts["rows"]:
            raise NicestError(f"{path}: expected rows to impute, got only column names")
    written = {"out": str(target), "cells": str(cells) if cells else None}
    return Imputation(**written, interval=interval, draws=draws, seed=seed, **counts)  # type: ignore[arg-type]


TEXTS = [(name, "string") for name in ("column", "value", "low", "high")]
CELLS = [("row", "int64"), *TEXTS, ("probability", "float64")]


def impute_batch(run: Run, table: Any, *, draw: bool = False, seed: int = 0) -> Any:
    """Impute the missing cells of an Arrow table; `draw` takes a joint draw instead of the best values."""
    run.table.schema.require_in(table.column_names, "this table")
    values, unknown = rows.encoded(table, run.table.schema, "this table")
    return filled(table, run.table.schema, run.table.impute(values, draw=draw, seed=seed), np.isnan(values) & ~unknown)


def filled(table: Any, schema: Any, values: np.ndarray, hidden: np.ndarray) -> Any:
    """Return an Arrow table in which the hidden cells are those of encoded rows; all other cells stay."""
    import pyarrow as pa
    from pyarrow import compute

    new = schema.decode(values)
    for i, name in enumerate(schema.names):
        if hidden[:, i].any():
            old, cells = (_plain(each.column(name).combine_chunks()) for each in (table, new))
            if old.type == pa.null():  # a column without any value
                old = old.cast(cells.type)
            whole = compute.if_else(pa.array(hidden[:, i]), cells.cast(old.type), old)
            table = table.set_column(table.schema.get_field_index(name), name, whole)
    return table


def _plain(cells: Any) -> Any:
    """Decode dictionary-encoded cells."""
    return cells.dictionary_decode() if hasattr(cells, "dictionary") else cells


def cell_lines(
    run: Run, values: np.ndarray, best: np.ndarray, hidden: np.ndarray, first_row: int, level: float
) -> list[list[Any]]:
    """Return the columns of CELLS for the hidden cells of encoded rows, row by row."""
    lines: list[tuple[Any, ...]] = []
    for i, marginal, missing in run.table.missing(values):
        column, there, codes = run.table.schema[i], np.flatnonzero(missing), best[missing, i]
        ends, p = np.full((2, len(there)), None), np.full(len(there), None)
        if marginal.numeric:
            encode = column.code if isinstance(column, Number) else column.encode
            ends = np.array([_texts(column, encode(each)) for each in marginal.interval(level).T])
        if column.discrete:
            p = np.exp(marginal.log_prob_of(codes))
        found = zip(there, _texts(column, codes), *ends.tolist(), p.tolist(), strict=True)
        lines += [(int(row) + first_row, i, column.name, *others) for row, *others in found if hidden[row, i]]
    lines.sort(key=lambda line: line[:2])
    return [[line[k] for line in lines] for k in (0, *range(2, 7))]


def _texts(column: Column, codes: np.ndarray) -> list[str]:
    """Return encoded values as texts."""
    return list(map(str, column.decode(codes).to_pylist()))
