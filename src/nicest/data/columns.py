"""The columns of a table together: its schema, as rows of numbers and as JSON."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nicest.data.cells import Unfit, has_pyarrow
from nicest.data.kinds import Category, Column, Head, Integer, Moment, Number, Real
from nicest.errors import NicestError
from nicest.messages import brief, listed, nearest, shown

KINDS: dict[str, type[Column]] = {"real": Real, "integer": Integer, "category": Category, "moment": Moment}


class Schema(tuple[Column, ...]):
    """The columns of a table, in order."""

    @cached_property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [column.name for column in self]

    def index(self, name: str) -> int:  # type: ignore[override]
        """Return the index of a column by its name; raise a NicestError with the nearest name."""
        if name not in self.names:
            hint = nearest(name, self.names) or f"; the columns are {listed(self.names)}"
            raise NicestError(f"found no column {shown(name)}{hint}")
        return self.names.index(name)

    def heads(self) -> tuple[Head, ...]:
        """Return what the encoded values of each column can be."""
        return tuple(column.head() for column in self)

    def encode(
        self, table: Any, source: Path | str = "the table", *, unseen: Literal["inf", "missing"] = "inf"
    ) -> np.ndarray:
        """Encode the rows of a table.

        Parameters
        ----------
        table : pyarrow.Table, pyarrow.RecordBatch or numpy.ndarray
            Table with these columns, in any order, and maybe others; or an array (N, D).
        source : Path or str
            Name of the table in messages.
        unseen : {"inf", "missing"}
            Encode a value that a column cannot have as infinity (its row has density 0), or like a missing cell.

        Returns
        -------
        numpy.ndarray
            (N, D) float32, with NaN where a cell is missing.
        """
        cells = self._cells(table, source)
        rows = np.empty((len(table), len(self)), dtype=np.float32)
        for i, (column, each) in enumerate(zip(self, cells, strict=True)):
            try:
                with np.errstate(over="ignore"):
                    rows[:, i] = column.encode(each)
            except Unfit as error:
                what = f"expected {error.expected} in column {shown(column.name)}, as in training, got {error.found}"
                raise NicestError(f"{source}: {what}") from error
        return np.where(np.isinf(rows), np.float32(np.nan), rows) if unseen == "missing" else rows

    def _cells(self, table: Any, source: Path | str) -> list[Any]:
        if isinstance(table, np.ndarray):
            if table.ndim == 2 and table.shape[1] == len(self):
                return list(table.T)
            positions = {f"x{i}": i for i in range(table.shape[1] if table.ndim == 2 else 0)}
            if not positions.keys() >= set(self.names):
                raise NicestError(f"{source}: expected {len(self)} columns, got an array of shape {table.shape}")
            return [table[:, positions[name]] for name in self.names]
        self.require_in(table.schema.names, source)
        return [table.column(name) for name in self.names]

    def require_in(self, names: Sequence[str], source: Path | str) -> list[str]:
        """Refuse a table that lacks a column, and return the names of its additional columns."""
        have, known = set(names), set(self.names)
        extra = [name for name in names if name not in known]
        if missing := [name for name in self.names if name not in have]:
            more = f", and has {listed(extra)}, which it had not" if extra else ""
            raise NicestError(f"{source}: lacks {listed(missing)}, which training had{more}")
        return extra

    def decode(self, rows: np.ndarray) -> Any:
        """Decode encoded rows (N, D) to an Arrow table of the types of training; without pyarrow to an array."""
        cells = [column.decode(rows[:, i]) for i, column in enumerate(self)]
        if not has_pyarrow():
            return np.column_stack(cells)
        import pyarrow as pa

        return pa.table(cells, names=self.names)

    def fill(self, table: Any, rows: np.ndarray, filled: np.ndarray) -> Any:
        """Return the table, Arrow's or an array, with the cells that are missing in `rows` taken from `filled`.

        Both are encoded, (N, D).
        """
        array = isinstance(table, np.ndarray)
        found = table.astype(np.float64) if array else table
        for i, column in enumerate(self):
            missing = np.isnan(rows[:, i])
            if not missing.any():
                continue
            if array:
                place = i if found.shape[1] == len(self) else int(column.name[1:])
                found[missing, place] = column.plain(filled[missing, i])
                continue
            import pyarrow as pa

            place = found.schema.get_field_index(column.name)
            cells, drawn = found.column(place), column.decode(filled[:, i])
            new = pa.compute.if_else(pa.array(missing), drawn.cast(cells.type), cells)
            found = found.set_column(place, found.schema.field(place), new)
        return found

    def plausible(self, rows: np.ndarray) -> np.ndarray:
        """Clip drawn rows (N, D) to what training holds: see `Number.plausible`."""
        rows = rows.copy()
        for i, column in enumerate(self):
            if isinstance(column, Number):
                rows[:, i] = column.plausible(rows[:, i])
        return rows

    def to_json(self) -> list[dict[str, Any]]:
        """Return plain dictionaries for a JSON file."""
        kinds = {kind: name for name, kind in KINDS.items()}
        rows = [{"kind": kinds[type(column)]} | vars(column) for column in self]
        plain = [{name: list(each) if isinstance(each, tuple) else each for name, each in row.items()} for row in rows]
        return [{name: each for name, each in row.items() if each not in ([], None)} for row in plain]

    @classmethod
    def from_json(cls, rows: Any, source: Path | str) -> Schema:
        """Restore what `to_json` returned; raise a NicestError if it is something else."""
        try:
            json.dumps(rows, ensure_ascii=False).encode()  # refuses what UTF-8 cannot write
            columns = [_column(dict(row)) for row in rows]
            if len({column.name for column in columns}) < len(columns) or not isinstance(rows, list):
                raise ValueError("a name comes twice")
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            what = f"expected the columns of a table, got something else ({brief(error)})"
            raise NicestError(f"{source}: {what}") from error
        return cls(columns)


def _column(row: dict[str, Any]) -> Column:
    kind = KINDS[row.pop("kind")]
    for each in fields(kind):
        value = row.get(each.name)
        if str(each.type).startswith("tuple") and not isinstance(value, list | None):
            raise ValueError("there is no list")
        if isinstance(value, list):
            row[each.name] = tuple(value)
        elif str(each.type).startswith("float") and value is not None:
            row[each.name] = float(value)
    return kind(**row)


def parsed_bounds(texts: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Parse bounds such as "0 <= age" or "0 <= rate <= 1"; return them by the names of their columns."""
    found = {}
    for text in texts:
        low, name, *high = (each.strip() for each in text.split("<=")) if text.count("<=") in (1, 2) else ("", "")
        try:
            found[name] = (float(low), float(*high) if high else math.inf)
        except ValueError:
            raise NicestError(f'expected bounds such as "0 <= age" or "0 <= rate <= 1", got {shown(text)}') from None
    return found


def with_bounds(
    schema: Sequence[Column], bounds: Mapping[str, tuple[float, float | None]], source: Path | str
) -> Schema:
    """Replace the bounds found in columns by given ones (low, high); high may be None."""
    if absent := sorted(map(str, bounds.keys() - {column.name for column in schema})):
        raise NicestError(f"{source}: found no column {listed(absent)} to bound")
    return Schema(_bounded(each, *bounds[each.name], source) if each.name in bounds else each for each in schema)


def _bounded(column: Column, low: float, high: float | None, source: Path | str) -> Column:
    high = math.inf if high is None else high
    what = f"{source}: column {shown(column.name)}"
    if not (math.isfinite(low) and low < high):
        raise NicestError(f"{what}: expected a finite lower bound, and one above it or none, got {low}, {high}")
    if not isinstance(column, Number):
        raise NicestError(f"{what} {column.extent()}, few distinct values, so bounds do not apply")
    if not low <= column.low <= column.high <= high:
        raise NicestError(
            f"{what} has numbers from {column.low:g} to {column.high:g}, beyond its bounds {low:g} and {high:g}"
        )
    return replace(column, floor=float(low), ceiling=float(high) if math.isfinite(high) else None)


def leave_out(name: str) -> str:
    """Return the hint that tells the user how to drop this column, quoted for a shell."""
    if len(name) > 100:
        return "leave it out by data.drop"
    quoted = json.dumps([name], ensure_ascii=False)
    plain = "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in quoted)  # as TOML has it
    return f"leave it out: set {shlex.quote('data.drop=' + plain)}"
