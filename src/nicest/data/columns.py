"""What the columns of a table hold, and their cells as numbers that a model works on, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from nicest.data.arrays import brief
from nicest.data.tables import TableFile, listed
from nicest.errors import NicestError

MOST_VALUES = 100  # different texts in a column
FEW = 20  # different numbers in a column of fractions that is not continuous, each in ten rows or more
FINEST = 1 << 20  # steps across a column of whole numbers: where there are more, they do not matter

Kind = Literal["real", "steps", "values"]


@dataclass(frozen=True)
class Column:
    """What the numbers of a column mean.

    real    a continuous number; the model has its density, in the column's own unit
    steps   whole steps of `step`, counted from `low`: the model has the probability of each
    values  one of `values`, whose number is its place among them: the model has the probability of each

    `type` is Arrow's name for the cells, which samples get back. `low` and `high` are of the rows of training;
    `low` is taken off before the cells are rounded to float32.
    """

    name: str
    type: str
    kind: Kind
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0
    values: tuple[Any, ...] = ()


class Batch(NamedTuple):
    """Some rows as numbers (N, D), NaN where a cell is missing; and which rows hold a value unknown in training."""

    rows: np.ndarray
    unknown: np.ndarray


@dataclass
class Tally:
    """What was seen of one column."""

    name: str
    type: Any
    seen: int = 0
    missing: int = 0
    low: float = math.inf
    high: float = -math.inf
    whole: bool = True
    divisor: int = 0
    first: int | None = None
    numbers: set[float] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    not_numbers: int = 0  # among the texts
    example: str = ""  # of them

    def add_numbers(self, numbers: np.ndarray, path: Path) -> None:
        """Take note of cells, missing ones left out."""
        if not len(numbers):
            return
        bad = ~np.isfinite(numbers)
        if bad.any():
            raise NicestError(
                f"{path}: expected finite numbers, got {numbers[bad][0]} in column {self.name!r}; drop those rows,"
                " or leave the cells empty"
            )
        self.low, self.high = min(self.low, float(numbers.min())), max(self.high, float(numbers.max()))
        self.whole = self.whole and bool((numbers == np.floor(numbers)).all()) and max(-self.low, self.high) < 2**53
        if self.whole:
            whole = numbers.astype(np.int64)
            self.first = int(whole[0]) if self.first is None else self.first
            self.divisor = math.gcd(self.divisor, int(np.gcd.reduce(whole - self.first)))
        if len(self.numbers) <= FEW:
            self.numbers |= set(np.unique(numbers)[: FEW + 1].tolist())

    def column(self, path: Path) -> Column:
        """The column, after all of it was seen."""
        if not self.seen:
            raise NicestError(f"{path}: column {self.name!r} is missing in all rows; {leave_out(self.name)}")
        kind = str(self.type)
        if kind == "bool":
            return Column(self.name, kind, "values", 0, 1, 1.0, (False, True))
        if 0 < self.not_numbers < self.seen / 2:
            raise NicestError(
                f"{path}: expected numbers in column {self.name!r}, got {self.example!r} among them; mend the cell,"
                f" or {leave_out(self.name)}"
            )
        if self.not_numbers:
            if len(self.texts) > MOST_VALUES:
                raise NicestError(
                    f"{path}: column {self.name!r} holds more than {MOST_VALUES} different texts, of which no model"
                    f" is made; {leave_out(self.name)}"
                )
            values = tuple(sorted(self.texts))
            return Column(self.name, kind, "values", 0, len(values) - 1, 1.0, values)
        if kind == "string":  # of a .csv file, all of whose cells are numbers
            kind = "int64" if self.whole and not self.missing else "double"
        if self.whole:
            step = float(self.divisor or 1)
            if (self.high - self.low) / step <= FINEST:
                return Column(self.name, kind, "steps", self.low, self.high, step)
        elif len(self.numbers) <= FEW and self.seen >= 10 * len(self.numbers):
            return Column(self.name, kind, "values", 0, len(self.numbers) - 1, 1.0, tuple(sorted(self.numbers)))
        return Column(self.name, kind, "real", self.low, self.high)


def scan(path: Path, drop: Sequence[str] = ()) -> tuple[Column, ...]:
    """What the columns of a table hold: one pass over the file."""
    file = TableFile(path)
    if absent := [name for name in drop if name not in file.schema.names]:
        raise NicestError(f"{path}: found no column {listed(absent)} to drop; it has {listed(file.schema.names)}")
    tallies = [Tally(name, file.schema.field(name).type) for name in file.schema.names if name not in drop]
    for batch in file.batches([tally.name for tally in tallies]):
        for tally, cells in zip(tallies, batch.columns, strict=True):
            _look(tally, cells, path)
    return tuple(tally.column(path) for tally in tallies)


def _look(tally: Tally, cells: Any, path: Path) -> None:
    """Take note of the cells of one column."""
    tally.missing += cells.null_count
    cells = cells.drop_null()
    if str(cells.type) != "bool":
        numbers = _numbers(cells, tally.name, path, refuse=not _is_text(cells.type))
        if _is_text(cells.type) and len(tally.texts) <= MOST_VALUES:
            tally.texts |= set(cells.unique().to_pylist()[: MOST_VALUES + 1])
        if numbers is None:
            wrong = [each for each in cells.to_pylist() if not _is_number(each)]
            tally.not_numbers, tally.example = tally.not_numbers + len(wrong), wrong[0]
        else:
            numbers = numbers[~np.isnan(numbers)]
            tally.missing += len(cells) - len(numbers)
            tally.add_numbers(numbers, path)
            tally.seen += len(numbers) - len(cells)
    tally.seen += len(cells)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    inner = kind.value_type if types.is_dictionary(kind) else kind
    return bool(
        types.is_string(inner) or types.is_large_string(inner) or types.is_string_view(inner) or types.is_boolean(inner)
    )


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return True


def _numbers(cells: Any, name: str, path: Path, *, refuse: bool = True) -> np.ndarray | None:
    """The cells as float64, NaN where they are missing."""
    import pyarrow as pa
    from pyarrow import compute, types

    kind = cells.type
    try:
        if types.is_boolean(kind):
            return None
        if types.is_dictionary(kind):
            cells = cells.dictionary_decode()
        if types.is_temporal(kind):
            cells = cells.cast(pa.int32() if types.is_date32(kind) or types.is_time32(kind) else pa.int64())
        if types.is_string(cells.type):
            cells = compute.utf8_trim_whitespace(cells)
        return np.asarray(cells.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        if not refuse:
            return None
        raise NicestError(
            f"{path}: expected numbers or texts in column {name!r}, got {kind}; {leave_out(name)}"
        ) from error


def encode(batch: Any, columns: Sequence[Column], path: Path) -> Batch:
    """A record batch, or anything with `column(name)`, as the numbers the model works on."""
    rows = np.empty((batch.num_rows, len(columns)), dtype=np.float32)
    unknown = np.zeros(len(rows), dtype=bool)
    for i, column in enumerate(columns):
        cells = batch.column(column.name)
        if column.values and isinstance(column.values[0], str | bool):
            codes, new = _places(cells, column)
            unknown |= new
        else:
            numbers = _numbers(cells, column.name, path, refuse=False)
            if numbers is None:
                raise NicestError(_other(path, column, cells))
            if column.values:
                codes, new = _nearest(numbers, column)
                unknown |= new
            else:
                codes = numbers - column.low
                if column.step:
                    codes = np.floor(codes / column.step) * column.step
        rows[:, i] = codes
    return Batch(rows, unknown)


def _other(path: Path, column: Column, cells: Any) -> str:
    bad = next((each for each in cells.to_pylist() if each is not None and not _is_number(each)), cells.type)
    return f"{path}: expected numbers in column {column.name!r}, as in training, got {bad!r}"


def _places(cells: Any, column: Column) -> tuple[np.ndarray, np.ndarray]:
    """The place of every cell among the known values, and which have none."""
    import pyarrow as pa
    from pyarrow import compute, types

    if types.is_dictionary(cells.type):
        cells = cells.dictionary_decode()
    if isinstance(column.values[0], str) and not types.is_string(cells.type):
        cells = cells.cast(pa.string())
    places = compute.index_in(cells, value_set=pa.array(column.values, cells.type))
    found = np.asarray(places.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)
    missing = np.asarray(cells.is_null().to_numpy(zero_copy_only=False), dtype=bool)
    new = np.isnan(found) & ~missing
    return np.where(new, 0.0, found), new


def _nearest(numbers: np.ndarray, column: Column) -> tuple[np.ndarray, np.ndarray]:
    known = np.array(column.values)
    places = np.searchsorted(known, numbers).clip(0, len(known) - 1).astype(np.float64)
    missing = np.isnan(numbers)
    new = (known[places.astype(int)] != numbers) & ~missing
    return np.where(missing, np.nan, np.where(new, 0.0, places)), new


def decode(rows: np.ndarray, columns: Sequence[Column]) -> Any:
    """Rows of the model's numbers as an Arrow table of the types of training; NaN becomes missing."""
    import pyarrow as pa

    arrays = []
    for i, column in enumerate(columns):
        numbers = rows[:, i].astype(np.float64)
        missing = np.isnan(numbers)
        if column.values:
            places = np.where(missing, 0, numbers).round().clip(0, len(column.values) - 1).astype(int)
            cells = pa.array([column.values[place] for place in places], mask=missing)
        else:
            cells = pa.array(cell_values(numbers, column), mask=missing)
        arrays.append(_as_type(cells, column.type))
    return pa.table(arrays, names=[column.name for column in columns])


def cell_values(numbers: np.ndarray, column: Column) -> np.ndarray:
    """The model's numbers of a column of numbers, in its own unit; whole steps stay within what training saw."""
    if not column.step:
        return numbers + column.low
    most = (column.high - column.low) / column.step
    return column.low + (numbers / column.step).round().clip(0, most) * column.step


def _as_type(cells: Any, name: str) -> Any:
    import pyarrow as pa

    if name.startswith("dictionary"):
        return cells.dictionary_encode()
    if name.startswith("decimal"):
        return cells
    kind = pa.type_for_alias(name.replace("date32[day]", "date32").replace("date64[ms]", "date64"))
    if pa.types.is_temporal(kind):
        whole = pa.int32() if pa.types.is_date32(kind) or pa.types.is_time32(kind) else pa.int64()
        return cells.cast(whole, safe=False).cast(kind)
    return cells.cast(kind, safe=False)


def read_table(path: Path, drop: Sequence[str] = ()) -> tuple[np.ndarray, tuple[Column, ...], int]:
    """All whole rows of a table (N, D), its columns, and how many rows were left out, for their missing cells."""
    columns = scan(path, drop)
    parts, left_out = [], 0
    for batch in TableFile(path).batches([column.name for column in columns]):
        rows = encode(batch, columns, path).rows
        whole = ~np.isnan(rows).any(1)
        parts.append(rows[whole])
        left_out += int((~whole).sum())
    rows = np.concatenate(parts) if parts else np.empty((0, len(columns)), np.float32)
    if not len(rows):
        there = f"{left_out} rows, each with a missing cell" if left_out else "none"
        raise NicestError(f"{path}: expected rows without missing cells to train on, got {there}")
    return rows, columns, left_out


def leave_out(name: str) -> str:
    return f"leave it out with --set 'data.drop={json.dumps([name], ensure_ascii=False)}'"


def require_columns(file: TableFile, columns: Sequence[Column]) -> list[str]:
    """Refuse a table that lacks columns of training; the columns it has too many are returned."""
    have = set(file.schema.names)
    missing = [column.name for column in columns if column.name not in have]
    extra = [name for name in file.schema.names if name not in {column.name for column in columns}]
    if missing:
        more = f", and has {listed(extra)}, which it had not" if extra else ""
        raise NicestError(f"{file.path}: lacks {listed(missing)}, which training had{more}")
    return extra


def columns_to_json(columns: Sequence[Column]) -> list[dict[str, Any]]:
    return [{name: value for name, value in vars(column).items() if value != ()} for column in columns]


def columns_from_json(rows: Any, source: str) -> tuple[Column, ...]:
    """What `columns_to_json` gave, checked."""
    try:
        columns = tuple(Column(**row | {"values": tuple(row.get("values", ()))}) for row in rows)
        for column in columns:
            numbers = (column.low, column.high, column.step)
            plain = all(isinstance(each, int | float) and math.isfinite(each) for each in numbers)
            if not (isinstance(column.name, str) and isinstance(column.type, str) and plain):
                raise ValueError("names, types or numbers are wanting")
            if column.kind not in ("real", "steps", "values") or any(isinstance(v, list | dict) for v in column.values):
                raise ValueError(f"no kind of column: {column.kind}")
    except (TypeError, ValueError, AttributeError) as error:
        raise NicestError(
            f"{source}: expected what nicest writes about columns, got something else ({brief(error)})"
        ) from error
    return tuple(
        replace(column, low=float(column.low), high=float(column.high), step=float(column.step)) for column in columns
    )
