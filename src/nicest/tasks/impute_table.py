"""The missing cells of a table, filled in from a model of it; observed cells stay as they are (NICE §5.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nicest.data.cells import Batch, decode, encode
from nicest.data.columns import Column, require_columns
from nicest.data.tables import IN_MEMORY, SUFFIXES, TableFile, batch_rows, writing
from nicest.errors import NicestError
from nicest.flows import Flow
from nicest.inference.impute import MIXED, STEPS, Imputed, impute_rows, in_parts
from nicest.progress import Bar
from nicest.remote import place
from nicest.runs.folder import require_own_file
from nicest.runs.run import Run


class Cells(NamedTuple):
    """What was found for the hidden cells of some rows, each (N, D): NaN where nothing was hidden."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    share: np.ndarray  # of the draws that are the value, of whole steps and few values
    r_hat: np.ndarray


def impute_table(
    run: Run,
    table: str | Path,
    *,
    out: str | Path = "imputed.csv",
    cells: str | Path | None = None,
    draws: int = 400,
    steps: int = STEPS,
    interval: float = 0.9,
    seed: int = 0,
) -> dict[str, Any]:
    """Write the table again with its missing cells filled in, and if asked a line for each of those cells.

    A continuous cell gets the mean of its draws, an integer or one of a column with spikes their median, a category
    the most frequent. `cells`
    gets row, column, value, low and high, the ends of the interval, which texts and booleans have none of; share, how
    many of the draws are the value where it is not continuous; and R-hat, near 1 where the chains of the row agree.
    Rows that hold a value which training never saw are left as they are: the model knows nothing of them.
    """
    path, target = place(table), place(out)
    outputs = [target, *([place(cells)] if cells else [])]
    if len({str(each.resolve()) for each in outputs}) < len(outputs):
        raise NicestError(f"expected two files for the table and for its cells, got {target} for both")
    columns = run.columns
    if not columns:
        raise NicestError(f"{run.path} is not a model of a table: train one with the recipe `table`")
    for each in (path, *outputs):
        if each.suffix.lower() not in SUFFIXES:
            raise NicestError(f"expected a table, a file that ends in {', '.join(SUFFIXES)}, got {str(each)!r}")
        if each is not path:
            require_own_file(each, run.recipe, path)
    file = TableFile(path)
    import pyarrow as pa

    require_columns(file.names, columns, path)
    counts = {"rows": 0, "filled": 0, "rows_filled": 0, "unknown": 0, "not_mixed": 0}
    with ExitStack() as stack:
        write = stack.enter_context(writing(target, file.schema, plain=True))
        write_cells = stack.enter_context(writing(outputs[1], cell_schema(), plain=True)) if cells else None
        bar = stack.enter_context(Bar("filling in", file.count or 0))
        for batch in file.batches(file.names):

            def tell(share: float, before: int = counts["rows"], rows: int = batch.num_rows) -> None:
                bar.update(before + int(share * rows), f"{counts['filled']:,} cells")

            how: dict[str, Any] = {"draws": draws, "steps": steps, "interval": interval, "seed": [seed, counts["rows"]]}
            encoded, hidden, found = filled_cells(run, batch, path, watch=tell, **how)
            write(filled(pa.Table.from_batches([batch]), columns, found.value, hidden).columns)
            if write_cells:
                write_cells(listed_cells(columns, found, hidden, counts["rows"]).columns)
            counts["rows"] += batch.num_rows
            counts["filled"] += int(hidden.sum())
            counts["rows_filled"] += int(hidden.any(1).sum())
            counts["unknown"] += int((encoded.unknown & np.isnan(encoded.rows).any(1)).sum())
            counts["not_mixed"] += int((np.nan_to_num(found.r_hat, nan=1.0).max(1, initial=1.0) >= MIXED).sum())
            bar.update(counts["rows"], f"{counts['filled']:,} cells")
        if not counts["rows"]:
            raise NicestError(f"{path}: expected rows to fill in, got only column names")
    return {"out": str(target), "cells": str(cells) if cells else None, "interval": interval, "seed": seed, **counts}


def impute_batch(run: Run, table: Any, *, draws: int = 400, steps: int = STEPS, seed: int = 0) -> Any:
    """Fill in the missing cells of an Arrow table, as `impute_table` does for a file with these rows."""
    import pyarrow as pa

    require_columns(table.column_names, run.columns, IN_MEMORY)
    plain = pa.table([_plain(each.combine_chunks()) for each in table.columns], table.column_names)
    parts, row = [plain.slice(0, 0)], 0
    for batch in plain.to_batches(batch_rows(table.num_columns)):
        _, hidden, cells = filled_cells(run, batch, IN_MEMORY, draws=draws, steps=steps, seed=[seed, row])
        parts.append(filled(pa.Table.from_batches([batch]), run.columns, cells.value, hidden))
        row += batch.num_rows
    return pa.concat_tables(parts)


def filled_cells(run: Run, batch: Any, path: Path, **how: Any) -> tuple[Batch, np.ndarray, Cells]:
    """Return the encoded rows of a record batch, the mask of their missing cells, and the values drawn for these."""
    encoded = encode(batch, run.columns, path)
    hidden = np.isnan(encoded.rows) & ~encoded.unknown[:, None]
    return encoded, hidden, fill(run.flow, encoded.rows, hidden, run.columns, **how)


def fill(
    flow: Flow,
    rows: np.ndarray,
    hidden: np.ndarray,
    columns: Sequence[Column],
    *,
    seed: int | list[int],
    watch: Callable[[float], None] = lambda share: None,
    **how: Any,
) -> Cells:
    """The hidden cells of rows of the model's numbers, which may be NaN there; some at once, for the draws' sake."""
    found = Cells(*(np.full(rows.shape, np.nan) for _ in Cells._fields))
    parts = in_parts(hidden, seed)
    for i, (part, own) in enumerate(parts):
        cells = _filled_rows(flow, rows[part], hidden[part], columns, seed=own, **how)
        for target, each in zip(found, cells, strict=True):
            target[part] = np.where(hidden[part], each, np.nan)
        watch((i + 1) / len(parts))
    return found


def draw_hidden(
    flow: Flow,
    rows: np.ndarray,
    hidden: np.ndarray,
    columns: Sequence[Column],
    *,
    seed: int,
    ascent: int = 0,
    **how: Any,
) -> Imputed:
    """Draws of the hidden cells of rows of the model's numbers, within the bounds of their columns.

    A table gets means, not modes: those take an `ascent`.
    """
    like = flow.units.scale
    lower, upper = torch.tensor([column.bounds for column in columns]).to(like).unbind(1)
    return impute_rows(
        flow,
        torch.from_numpy(rows).to(like),
        torch.from_numpy(hidden).to(like.device),
        bounds=(lower, upper),
        seed=seed,
        ascent=ascent,
        **how,
    )


def _filled_rows(
    flow: Flow, rows: np.ndarray, hidden: np.ndarray, columns: Sequence[Column], *, seed: int, **how: Any
) -> Cells:
    from scipy import stats  # slow to import: whoever imputes nothing need not wait for it

    discrete, steps = (np.array([c.kind in kinds for c in columns]) for kinds in (("steps", "values"), ("steps",)))
    spiked = np.array([bool(c.spikes) for c in columns])
    imputed = draw_hidden(flow, rows, hidden, columns, seed=seed, **how)
    draws, mean, low, high = (each.cpu().numpy() for each in (imputed.draws, imputed.mean, imputed.low, imputed.high))
    low, high, median = (np.where(discrete, np.floor(each), each) for each in (low, high, np.median(draws, 0)))
    value = np.where(discrete & ~steps, stats.mode(draws, axis=0).mode, np.where(steps | spiked, median, mean))
    share = np.where(discrete, (draws == value).mean(0), np.nan)
    agree = np.broadcast_to(imputed.r_hat.cpu().numpy()[:, None], value.shape)
    return Cells(value, low, high, share, agree)


def filled(table: Any, columns: Sequence[Column], values: np.ndarray, hidden: np.ndarray) -> Any:
    """The table with its hidden cells filled in; all others, and all other columns, are what they were."""
    import pyarrow as pa
    from pyarrow import compute

    new = decode(values, columns)
    for i, column in enumerate(columns):
        if hidden[:, i].any():
            old, cells = (_plain(each.column(column.name).combine_chunks()) for each in (table, new))
            whole = compute.if_else(pa.array(hidden[:, i]), cells.cast(old.type), old)
            table = table.set_column(table.schema.get_field_index(column.name), column.name, whole)
    return table


def _plain(cells: Any) -> Any:
    """Decode dictionary-encoded cells."""
    return cells.dictionary_decode() if hasattr(cells, "dictionary") else cells


def cell_schema() -> Any:
    import pyarrow as pa

    texts = [(name, pa.string()) for name in ("column", "value", "low", "high")]
    return pa.schema([("row", pa.int64()), *texts, ("share", pa.float64()), ("r_hat", pa.float64())])


def listed_cells(columns: Sequence[Column], found: Cells, hidden: np.ndarray, first_row: int) -> Any:
    """A line for every cell that was filled in."""
    import pyarrow as pa

    rows, places = (each.tolist() for each in np.nonzero(hidden))
    tables = [decode(each, columns) for each in (found.value, found.low, found.high)]
    words = [isinstance(next(iter(column.values), 0), str | bool) for column in columns]  # which have no order

    def text(table: Any, n: int, d: int) -> str | None:
        return None if words[d] and table is not tables[0] else str(table.column(d)[n].as_py())

    texts = [[text(table, n, d) for n, d in zip(rows, places, strict=True)] for table in tables]
    names, share = [columns[d].name for d in places], found.share[hidden]
    shares = pa.array(share, mask=np.isnan(share))
    return pa.table([[n + first_row for n in rows], names, *texts, shares, found.r_hat[hidden]], schema=cell_schema())
