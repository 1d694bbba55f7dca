"""A model of a table: scores of rows and cells, missing cells, predictions, and draws under conditions."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Query

from nicest.data.columns import Category, Column, Number
from nicest.data.tables import TableFile
from nicest.errors import NicestError
from nicest.messages import nearest
from nicest.runs.run import Run
from nicest.studio import limits
from nicest.studio.api import File, Json, bytes_in, endpoint
from nicest.studio.messages import Row
from nicest.studio.opened import Opened, number, numbers
from nicest.tasks.rows import batches, encoded
from nicest.tasks.score import CAVEAT, table_scores

BINS = 24  # of a histogram, at most
VALUES = 100  # of a category that are listed
LEVEL = 0.9  # of intervals
BEYOND = 0.4  # of an interval: how far a histogram reaches beyond it, on either side
FAR = 10  # ranges of training: values farther off are no question for the model


class Tables(Opened):
    """A model of p(any cells | any other cells) of a table."""

    kind, of = "table", "a table"

    def __init__(self, run: Run, stamp: tuple[int, ...]) -> None:
        super().__init__(run, stamp)
        self.trained, self.schema = run.table, run.table.schema
        self.most = max(limits.FEWEST, limits.CELLS_AT_ONCE // len(self.schema))  # rows per request

    @endpoint("GET")
    def columns(self) -> Json:
        """Describe the columns: name, kind (real, integer, category, moment), usual range, values of a category."""
        return {"columns": [described(column) for column in self.schema]}

    def rows(self, n: int = 20, seed: int = 0, of: int = 0, where: str = "") -> Json:
        of = min(of, self.most)
        drawn = self.trained.sample(max(n, of), where=where, seed=seed)
        return {
            "columns": list(self.schema.names),
            "rows": self.listed(drawn.rows[:n]),
            "histograms": [histogram(drawn.rows[:of, d], column) for d, column in enumerate(self.schema)] if of else [],
            "draws": len(drawn.rows),
            "probability": number(float(drawn.probability)),
            "effective_size": number(float(drawn.effective_size)),
        }

    @endpoint("POST", "read", **bytes_in("text/csv"))
    def table(
        self,
        content: File,
        format: Literal["csv", "parquet", "arrow"] = "csv",
        predict: Annotated[str, Query(max_length=200)] = "",
    ) -> Json:
        """Score the first rows of a table and each of their cells, fill in missing cells, and predict a column.

        `tails` has, for each cell, the probability of values that fit the other cells of its row as badly. `filled`
        has the rows without missing cells. `predicted` has the `predict`ed column given the others, with the ends of
        its 90 % interval; that column may be absent.
        """
        if predict and predict not in self.schema.names:
            found = predict[:80]
            raise NicestError(f"found no column {found!r} to predict{nearest(found, self.schema.names)}")
        shown, values, unknown, total = self.read(content, f".{format}", predict)
        quantiles = self.reference()
        nats, denser = (numbers(np.asarray(each)) for each in table_scores(self.run, values, unknown, quantiles)[:2])
        tails = np.where(unknown, 0.0, self.tails(values))
        return {
            "columns": list(self.schema.names),
            "cells": shown,
            "nats": nats,
            "denser": denser,
            "unknown": unknown.any(1).tolist(),
            "tails": [numbers(each) for each in tails.round(4)],
            "filled": self.listed(self.trained.impute(values)) if np.isnan(values).any() else [],
            "predicted": self.predicted(values, predict) if predict else [],
            "total": total,
            "reference": self.compared_with,
            "caveat": CAVEAT,
        }

    @endpoint("POST", "job")
    def row(self, ask: Row) -> Json:
        """Predict every column of a row from the known cells of the other columns.

        Each entry has the `value` (filled in where it was missing), the ends `low` and `high` of the 90 % interval, a
        `histogram` of the distribution, and the `tail` of a known cell: the probability of values that fit as badly.
        """
        row = self.encode(ask)
        cells = []
        for d, column in enumerate(self.schema):
            marginal = self.trained.marginals(np.repeat(row, BINS + 1, 0), [d])[0]
            known = not np.isnan(row[0, d])
            found = {
                "value": plain(column, row[:, d] if known else marginal.best()[:1])[0],
                "known": known,
                "tail": number(tail(marginal, np.repeat(row[:, d], BINS + 1))[0]) if known else None,
            }
            cells.append(expected(marginal) | found)
        return {"cells": cells}

    def encode(self, ask: Row) -> np.ndarray:
        """Encode a row; NaN where a cell is unknown. Returns (1, D)."""
        if strange := [name for name in ask.cells if name not in self.schema.names]:
            raise NicestError(f"expected columns of the model, got {strange[0][:80]!r}")
        given = [ask.cells.get(column.name) for column in self.schema]
        codes = [
            np.nan if each is None else code(column, each) for column, each in zip(self.schema, given, strict=True)
        ]
        return np.array([codes], np.float32)

    def read(self, content: bytes, suffix: str, absent: str) -> tuple[list[Any], np.ndarray, np.ndarray, int | None]:
        """Read the first rows of a table; the others are not even decoded.

        Returns
        -------
        shown : list
            The cells as they are in the file.
        values : ndarray of float32, shape (N, D)
            Encoded cells, NaN where missing.
        unknown : ndarray of bool, shape (N, D)
            True for values that training never saw.
        total : int or None
            The number of rows in the file; None if it is larger than N and not known.
        """
        shown: list[Any] = []
        parts = [(np.zeros((0, len(self.schema)), np.float32), np.zeros((0, len(self.schema)), bool))]
        more, most = False, min(limits.ROWS, self.most)
        with tempfile.NamedTemporaryFile(suffix=suffix) as file:
            file.write(content)
            file.flush()
            path = Path(file.name)
            try:
                opened = TableFile(path, most=limits.UNPACKED)
                self.schema.require_in([*opened.names, absent], path)
                for batch in batches(opened, self.schema.names):
                    first = batch.slice(0, most - len(shown))
                    more = first.num_rows < batch.num_rows
                    if first.num_rows:
                        shown += in_json(first, self.schema.names)
                        parts.append(encoded(first, self.schema, path))
                    if more:
                        break
            except NicestError as error:
                raise NicestError(str(error).replace(str(path), "the table")) from error
        values, unknown = (np.concatenate(each) for each in zip(*parts, strict=True))
        return shown, values, unknown, opened.count if opened.count is not None else None if more else len(shown)

    def tails(self, rows: np.ndarray) -> np.ndarray:
        """Return the probability of cells that fit the other cells of their row as badly; NaN where missing, (N, D)."""
        each = (tail(self.trained.marginals(rows, [d])[0], rows[:, d]) for d in range(len(self.schema)))
        return np.where(np.isnan(rows), np.nan, np.stack(list(each), 1))

    def predicted(self, rows: np.ndarray, name: str) -> list[Any]:
        """Return the best prediction of a column from the others, and the ends of its interval, row by row."""
        d = self.schema.index(name)
        marginal = self.trained.marginals(rows, [d])[0]
        return list(zip(plain(self.schema[d], marginal.best()), *interval(marginal), strict=True))

    def listed(self, rows: np.ndarray) -> list[Any]:
        """Decode rows (N, D) as lists of JSON values."""
        return list(zip(*(plain(column, rows[:, d]) for d, column in enumerate(self.schema)), strict=True))


def code(column: Column, value: Any) -> float:
    """Encode one cell as people write it; refuse what the column cannot have."""
    try:
        found = column.parse(str(value).lower() if isinstance(value, bool) else str(value))
        if isinstance(value, bool) and isinstance(column, Number):
            raise ValueError("a number")
    except ValueError as error:
        raise NicestError(f"expected {error} in column {column.name!r}, got {str(value)[:80]!r}") from error
    again = float(column.encode(column.decode(np.array([found])))[0])
    fits = abs(again - found) < 1e-3 if column.discrete else np.isfinite(again)
    if isinstance(column, Number):
        low, high = column.code(column.low), column.code(column.high)
        fits = fits and low - FAR * (high - low) <= found <= high + FAR * (high - low)
    if not fits:
        text = f"column {column.name!r} {column.extent()}, got {str(value)[:80]!r}"
        raise NicestError(f"{text}: choose a value like those of training")
    return found


def described(column: Column) -> Json:
    """Describe a column: its kind, its range in training or the values of a category."""
    found: Json = {"name": column.name, "kind": type(column).__name__.lower(), "low": None, "high": None, "values": []}
    if isinstance(column, Category):
        return found | {"values": [as_json(each) for each in column.values[:VALUES]], "distinct": len(column.values)}
    ends = plain(column, np.array([column.code(each) for each in (column.low, column.high)]))  # type: ignore[attr-defined]
    return found | {"low": ends[0], "high": ends[1], "distinct": 0}


def histogram(codes: np.ndarray, column: Column) -> Json:
    """Count encoded values (N,): of a category by value, else in bins of one width from `low` to `high`."""
    if isinstance(column, Category):
        return bars(column, np.bincount(codes.astype(int), minlength=len(column.values)))
    low, high, step = float(codes.min()), float(codes.max()), column.head().step
    bins = min(BINS, round((high - low) / step) + 1) if step else BINS
    counts, _ = np.histogram(codes, bins, (low - step / 2, high + step / 2 if high > low or step else high + 1))
    first, last = plain(column, np.array([low, high]))
    return {"column": column.name, "counts": counts.tolist(), "values": [], "low": first, "high": last}


def expected(marginal: Any) -> Json:
    """Return the interval and the histogram of a distribution, from a marginal of BINS + 1 equal rows."""
    column = marginal.column
    if isinstance(column, Category):
        found = bars(column, marginal.probabilities()[0].round(4))
        low, high = (each[0] for each in interval(marginal))
    else:
        first, last = marginal.interval(LEVEL)[0]
        beyond = BEYOND * (last - first) or column.scale
        left, right = np.clip([first - beyond, last + beyond], *column.bounds)
        counts = np.diff(marginal.cdf(np.linspace(left, right, BINS + 1))).clip(0).round(4)
        low, high, first, last = own_units(column, np.array([first, last, left, right]))
        found = {"column": column.name, "counts": counts.tolist(), "values": [], "low": first, "high": last}
    return {"low": low, "high": high, "histogram": found}


def bars(column: Category, counts: np.ndarray) -> Json:
    """Return the histogram of a category, its most frequent values first unless they have an order."""
    order = np.arange(len(counts)) if column.numeric else np.argsort(-counts, kind="stable")[:BINS]
    values = plain(column, order.astype(float))
    return {"column": column.name, "counts": counts[order].tolist(), "values": values, "low": None, "high": None}


def interval(marginal: Any) -> tuple[list[Any], list[Any]]:
    """Return the ends of the interval of each row; None for categories without an order."""
    if not marginal.numeric:
        return ([None] * len(marginal),) * 2
    low, high = marginal.interval(LEVEL).T
    return own_units(marginal.column, low), own_units(marginal.column, high)


def tail(marginal: Any, codes: np.ndarray) -> np.ndarray:
    """Return the probability of values as far out as encoded values, or of categories as rare; (N,)."""
    known = np.nan_to_num(codes)
    if not marginal.numeric:
        p = marginal.probabilities()
        own = np.take_along_axis(p, known.astype(int)[:, None], 1)
        return np.where(p <= own * (1 + 1e-6), p, 0).sum(1)
    upto, below = marginal.cdf_of(known), marginal.cdf_of(known, strict=True)
    return np.clip(2 * np.minimum(upto, 1 - below), 0, 1)


def own_units(column: Column, numbers: np.ndarray) -> list[Any]:
    """Return numbers (N,) in the unit of a column as JSON values, rounded as in the data."""
    return plain(column, column.code(numbers)) if isinstance(column, Number) else [as_json(each) for each in numbers]


def plain(column: Column, codes: np.ndarray) -> list[Any]:
    """Decode values (N,) of a column as JSON values."""
    found = column.decode(np.asarray(codes, dtype=float))
    return [as_json(each) for each in (found.to_pylist() if hasattr(found, "to_pylist") else found)]


def in_json(table: Any, names: Any) -> list[Any]:
    """Return the rows of an Arrow table or batch as JSON values; None for columns that it lacks."""
    there, none = table.schema.names, [None] * table.num_rows
    columns = [table.column(name).to_pylist() if name in there else none for name in names]
    return [[as_json(each) for each in row] for row in zip(*columns, strict=True)]


def as_json(value: Any) -> Any:
    """Return a cell as a JSON value, a number with 7 digits; what JSON cannot express is text."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | bool | int):
        return value
    return number(float(f"{value:.7g}")) if isinstance(value, float) else str(value)
