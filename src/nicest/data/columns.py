"""What the columns of a table hold, and their cells as numbers that a model works on, and back."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from nicest.data.arrays import brief, called
from nicest.data.tables import TableFile, listed
from nicest.errors import NicestError

MOST_VALUES = 100  # different texts in a column
FEW = 20  # different numbers in a column of fractions that is not continuous, each in ten rows or more
FINEST = 1 << 20  # steps across a column of whole numbers: where there are more, they do not matter
LONGEST = 1000  # characters of a text
SMALLEST, LARGEST = 1e-30, 1e30  # across a continuous column, that float32 holds it
MILLISECONDS = 86_400_000  # of a day
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$|^[+-]?(nan|inf|infinity)$"

Kind = Literal["real", "steps", "values"]
Codes = Callable[[Any], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Column:
    """What the numbers of a column mean.

    real    a continuous number; the model has its density, in the column's own unit
    steps   whole steps of `step`, counted from `low`; the model has the probability of each count
    values  one of `values`, whose number is its place among them; the model has the probability of each

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

    @property
    def discrete(self) -> bool:
        return self.kind != "real"


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
    infinite: float = 0.0  # one of them

    def add_numbers(self, numbers: np.ndarray) -> None:
        """Take note of cells, missing ones left out."""
        finite = np.isfinite(numbers)
        if not finite.all():
            self.infinite = float(numbers[~finite][0])
            numbers = numbers[finite]
        if not len(numbers):
            return
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
        where = f"column {called(self.name)}"
        if not self.seen:
            raise NicestError(f"{path}: {where} is missing in all rows; {leave_out(self.name)}")
        if str(self.type) == "bool":
            return Column(self.name, "bool", "values", 0, 1, 1.0, (False, True))
        if 0 < self.not_numbers < self.seen / 2:
            raise NicestError(
                f"{path}: expected numbers in {where}, got {brief(self.example, 60)!r} among them; mend the cell,"
                f" or {leave_out(self.name)}"
            )
        if self.not_numbers:
            return self._of_texts(path)
        if self.infinite:
            raise NicestError(
                f"{path}: expected finite numbers, got {self.infinite} in {where}; drop those rows,"
                " or leave the cells empty"
            )
        kind = str(self.type)
        if is_text(self.type):  # all of whose cells are numbers, as in a .csv file
            kind = "int64" if self.whole and not self.missing else "double"
        if self.whole:
            step = float(self.divisor or 1)
            if (self.high - self.low) / step <= FINEST:
                return Column(self.name, kind, "steps", self.low, self.high, step)
        elif len(self.numbers) <= FEW and self.seen >= 10 * len(self.numbers):
            return Column(self.name, kind, "values", 0, len(self.numbers) - 1, 1.0, tuple(sorted(self.numbers)))
        if self.low == self.high:
            raise NicestError(
                f"{path}: {where} is constant, {self.low:g}: its density is infinite; {leave_out(self.name)}"
            )
        if not SMALLEST < self.high - self.low < LARGEST:
            spread = f"has numbers from {self.low:g} to {self.high:g}, of which no density is made"
            raise NicestError(f"{path}: {where} {spread}; give it another unit, or {leave_out(self.name)}")
        return Column(self.name, kind, "real", self.low, self.high)

    def _of_texts(self, path: Path) -> Column:
        what = ""
        if len(self.texts) > MOST_VALUES:
            what = f"more than {MOST_VALUES} different texts"
        elif max(map(len, self.texts)) > LONGEST:
            what = f"texts of more than {LONGEST} characters"
        if what:
            raise NicestError(
                f"{path}: column {called(self.name)} holds {what}, such as {brief(self.example, 60)!r}, of which no"
                f" model is made; {leave_out(self.name)}"
            )
        values = tuple(sorted(self.texts))
        return Column(self.name, str(self.type), "values", 0, len(values) - 1, 1.0, values)


def scan(path: Path, drop: Sequence[str] = ()) -> tuple[Column, ...]:
    """What the columns of a table hold: one pass over the file."""
    file, dropped, rows = TableFile(path), set(drop), 0
    if absent := sorted(dropped - set(file.names)):
        raise NicestError(f"{path}: found no column {listed(absent)} to drop; it has {listed(file.names)}")
    tallies = [Tally(name, file.schema.field(name).type) for name in file.names if name not in dropped]
    for tally in tallies:
        if not holds_numbers(tally.type) and not is_text(tally.type):
            raise NicestError(
                f"{path}: expected numbers or texts in column {called(tally.name)}, got {brief(tally.type, 60)};"
                f" {leave_out(tally.name)}"
            )
    for batch in file.batches([tally.name for tally in tallies]):
        rows += batch.num_rows
        for tally, cells in zip(tallies, batch.columns, strict=True):
            _look(tally, cells)
    if not rows:
        raise NicestError(f"{path}: expected rows, got none beside the names of {len(tallies)} columns")
    return tuple(tally.column(path) for tally in tallies)


def _look(tally: Tally, cells: Any) -> None:
    """Take note of the cells of one column."""
    if str(cells.type) == "string_view":  # which Arrow can do little with
        cells = cells.cast("string")
    cells = cells.drop_null()
    if str(cells.type) == "bool":
        tally.seen += len(cells)
        return
    numbers, words = as_numbers(cells)
    if is_text(cells.type):
        if len(tally.texts) <= MOST_VALUES:
            tally.texts |= set(cells.unique().slice(0, MOST_VALUES + 1).to_pylist()) - {None}
        if words.any():
            tally.not_numbers += int(words.sum())
            tally.example = cells[int(words.argmax())].as_py()
    there = numbers[~np.isnan(numbers)]
    tally.seen += len(there) + int(words.sum())
    tally.missing += len(cells) - len(there) - int(words.sum())
    tally.add_numbers(there)


def is_text(kind: Any) -> bool:
    from pyarrow import types

    inner = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(inner) or types.is_large_string(inner) or types.is_string_view(inner))


def holds_numbers(kind: Any) -> bool:
    """Whether the cells are numbers, moments, spans of time, or yes and no."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return not types.is_boolean(kind.value_type) and holds_numbers(kind.value_type)
    if types.is_interval(kind):
        return False
    kinds = (types.is_integer, types.is_floating, types.is_decimal, types.is_temporal, types.is_boolean, types.is_null)
    return any(holds(kind) for holds in kinds)


def by_entry(cells: Any, function: Codes) -> tuple[np.ndarray, np.ndarray]:
    """What a function gives for cells; it is asked but once for each entry of their dictionary, if they have one."""
    from pyarrow import types

    if not types.is_dictionary(cells.type):
        return function(cells)
    numbers, flags = function(cells.dictionary)
    places = cells.indices.fill_null(len(numbers)).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.append(numbers, np.nan)[places], np.append(flags, False)[places]


def as_numbers(cells: Any) -> tuple[np.ndarray, np.ndarray]:
    """The cells as float64, NaN where they are missing or words; and which are words."""
    return by_entry(cells, _plain_numbers)


def _plain_numbers(cells: Any) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow as pa
    from pyarrow import compute, types

    kind = cells.type
    words = np.zeros(len(cells), dtype=bool)
    if types.is_temporal(kind):
        cells = cells.cast(pa.int32() if types.is_date32(kind) or types.is_time32(kind) else pa.int64())
    elif is_text(kind):
        cells = compute.utf8_trim_whitespace(cells.cast(pa.large_string()))
        try:
            return _floats(cells), words
        except pa.ArrowInvalid:
            fits = compute.match_substring_regex(cells, NUMBER, ignore_case=True)
            words = ~fits.fill_null(True).to_numpy(zero_copy_only=False)
            cells = compute.if_else(fits, cells, pa.scalar(None, cells.type))
    return _floats(cells), words


def _floats(cells: Any) -> np.ndarray:
    import pyarrow as pa

    return np.array(cells.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)


def encode(batch: Any, columns: Sequence[Column], path: Path) -> Batch:
    """A record batch, or anything with `column(name)`, as the numbers the model works on.

    A number that is no whole step is that of the step it lies in.
    """
    import pyarrow as pa

    rows = np.empty((batch.num_rows, len(columns)), dtype=np.float32)
    unknown = np.zeros(len(rows), dtype=bool)
    for i, column in enumerate(columns):
        cells = batch.column(column.name)
        cells = cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else cells
        try:
            codes, new = _codes(cells, column)
        except (pa.ArrowException, NotANumber) as error:
            found = error.found if isinstance(error, NotANumber) else brief(cells.type, 60)
            raise NicestError(
                f"{path}: expected {_wanted(column)} in column {called(column.name)}, as in training, got {found}"
            ) from error
        with np.errstate(over="ignore"):
            rows[:, i] = codes
        far = np.isinf(rows[:, i])  # beyond all numbers of training, and of float32
        rows[far, i] = 0.0
        unknown |= new | far
    return Batch(rows, unknown)


def _wanted(column: Column) -> str:
    from pyarrow import types

    if column.values and isinstance(column.values[0], str):
        return "texts"
    kind = arrow_type(column.type)
    return column.type if types.is_temporal(kind) or types.is_boolean(kind) else "numbers"


class NotANumber(Exception):
    """Cells that are not what training had."""

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found


def _codes(cells: Any, column: Column) -> tuple[np.ndarray, np.ndarray]:
    """The model's numbers of cells, NaN where they are missing; and which hold a value that training never saw."""
    from pyarrow import types

    if types.is_null(cells.type):
        return np.full(len(cells), np.nan), np.zeros(len(cells), dtype=bool)
    if column.values and isinstance(column.values[0], str | bool):
        texts = isinstance(column.values[0], str)
        if is_text(cells.type) or (types.is_boolean(cells.type) and not texts):
            return by_entry(cells, lambda entries: _places(entries, column, texts))
        raise NotANumber(brief(cells.type, 60))
    numbers = _as_in_training(cells, column)
    if column.values:
        return _nearest(numbers, column)
    codes = numbers - column.low
    return np.floor(codes / column.step) if column.step else codes, np.zeros(len(codes), dtype=bool)


def _as_in_training(cells: Any, column: Column) -> np.ndarray:
    """Numbers in the unit of training: moments may come in another, or as text."""
    from pyarrow import types

    kind = arrow_type(column.type)
    if types.is_dictionary(kind):
        kind = kind.value_type
    found = cells.type.value_type if types.is_dictionary(cells.type) else cells.type
    if types.is_temporal(kind):
        if types.is_temporal(found) or is_text(found):
            return by_entry(cells, lambda entries: _plain_numbers(entries.cast(kind)))[0]
        raise NotANumber(brief(found, 60))
    if types.is_temporal(found) or types.is_boolean(found) or not (holds_numbers(found) or is_text(found)):
        raise NotANumber(brief(found, 60))
    numbers, words = as_numbers(cells)
    if words.any():
        raise NotANumber(repr(brief(cells[int(words.argmax())].as_py(), 60)))
    return numbers


def _places(cells: Any, column: Column, texts: bool) -> tuple[np.ndarray, np.ndarray]:
    """The place of every cell among the known values, and which have none."""
    import pyarrow as pa
    from pyarrow import compute

    cells = cells.cast(pa.large_string() if texts else pa.bool_())
    places = compute.index_in(cells, value_set=pa.array(column.values, cells.type))
    found = _floats(places)
    new = np.isnan(found) & ~cells.is_null().to_numpy(zero_copy_only=False)
    return np.where(new, 0.0, found), new


def _nearest(numbers: np.ndarray, column: Column) -> tuple[np.ndarray, np.ndarray]:
    """The place of the nearest known value; another in float32 is a new one."""
    known = np.array(column.values, dtype=np.float64)
    above = np.searchsorted(known, numbers).clip(0, len(known) - 1)
    below = (above - 1).clip(0)
    places = np.where(np.abs(known[below] - numbers) < np.abs(known[above] - numbers), below, above)
    missing = np.isnan(numbers)
    with np.errstate(over="ignore"):
        new = (known[places].astype(np.float32) != numbers.astype(np.float32)) & ~missing
    return np.where(missing, np.nan, np.where(new, 0.0, places.astype(np.float64))), new


def decode(rows: np.ndarray, columns: Sequence[Column]) -> Any:
    """Rows of the model's numbers as an Arrow table of the types of training; NaN becomes missing."""
    import pyarrow as pa

    try:
        arrays = [_decoded(rows[:, i].astype(np.float64), column) for i, column in enumerate(columns)]
    except pa.ArrowException as error:
        raise NicestError(f"the columns of the model are of types that no numbers have ({brief(error)})") from error
    return pa.table(arrays, names=[column.name for column in columns])


def _decoded(numbers: np.ndarray, column: Column) -> Any:
    import pyarrow as pa

    kind, missing = arrow_type(column.type), np.isnan(numbers)
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if column.values:
        places = np.where(missing, 0, numbers).round().clip(0, len(column.values) - 1).astype(int)
        cells = pa.array(column.values).take(pa.array(places, mask=missing)).cast(inner, safe=False)
    else:
        cells = _of_type(cell_values(numbers, column), missing, inner)
    if not pa.types.is_dictionary(kind):
        return cells
    entries = cells.dictionary_encode()
    return pa.DictionaryArray.from_arrays(
        entries.indices.cast(kind.index_type), entries.dictionary, ordered=kind.ordered
    )


def cell_values(numbers: np.ndarray, column: Column) -> np.ndarray:
    """The model's numbers of a column of numbers, in its own unit; whole steps stay within what training saw."""
    if not column.step:
        return numbers + column.low
    return column.low + numbers.round().clip(0, (column.high - column.low) / column.step) * column.step


def _of_type(values: np.ndarray, missing: np.ndarray, kind: Any) -> Any:
    """Numbers as cells of a type, which may hold whole ones alone, and not all of them."""
    import pyarrow as pa
    from pyarrow import types

    values = np.where(missing, 0.0, values)
    if types.is_decimal(kind):
        most = float(10 ** (kind.precision - kind.scale)) - float(10**-kind.scale)
        return pa.array(values.clip(-most, most), mask=missing).cast(kind, safe=False)
    if not (types.is_integer(kind) or types.is_temporal(kind)):
        return pa.array(values, mask=missing).cast(kind, safe=False)
    narrow = types.is_date32(kind) or types.is_time32(kind)
    whole = pa.int32() if narrow else kind if types.is_integer(kind) else pa.int64()
    bounds = np.iinfo(whole.to_pandas_dtype())
    low, high = float(bounds.min), np.nextafter(float(bounds.max) + 1, 0)
    if types.is_time(kind):
        low, high = 0.0, 86400.0 * {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[kind.unit] - 1
    if types.is_date64(kind):
        values = (values / MILLISECONDS).round() * MILLISECONDS
    return pa.array(values.round().clip(low, high).astype(bounds.dtype), mask=missing).cast(kind)


def arrow_type(name: str) -> Any:
    """The type that Arrow calls by a name."""
    import pyarrow as pa

    try:
        if match := re.fullmatch(r"timestamp\[(\w+), tz=(.+)\]", name):
            return pa.timestamp(*match.groups())
        if match := re.fullmatch(r"(decimal\d*)\((\d+), (-?\d+)\)", name):
            return getattr(pa, match[1])(int(match[2]), int(match[3]))
        if match := re.fullmatch(r"dictionary<values=([^<>]+), indices=(\w+), ordered=([01])>", name):
            return pa.dictionary(pa.type_for_alias(match[2]), arrow_type(match[1]), match[3] == "1")
        return pa.type_for_alias(name)
    except (ValueError, AttributeError, TypeError, pa.ArrowException) as error:
        raise NicestError(f"expected a type of Arrow's, got {brief(name, 60)!r}") from error


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
    """What to do about a column, to be copied into a shell."""
    if len(name) > 100:
        return "leave it out with data.drop"
    quoted = json.dumps([name], ensure_ascii=False)
    plain = "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in quoted)  # as TOML has it
    return f"leave it out with --set {shlex.quote('data.drop=' + plain)}"


def require_columns(file: TableFile, columns: Sequence[Column]) -> list[str]:
    """Refuse a table that lacks columns of training; the columns it has too many are returned."""
    have, known = set(file.names), {column.name for column in columns}
    missing = [column.name for column in columns if column.name not in have]
    extra = [name for name in file.names if name not in known]
    if missing:
        more = f", and has {listed(extra)}, which it had not" if extra else ""
        raise NicestError(f"{file.path}: lacks {listed(missing)}, which training had{more}")
    return extra


def columns_to_json(columns: Sequence[Column]) -> list[dict[str, Any]]:
    rows = [vars(column) | {"values": list(column.values)} for column in columns]
    return [{name: value for name, value in row.items() if value != []} for row in rows]


def columns_from_json(rows: Any, source: str) -> tuple[Column, ...]:
    """What `columns_to_json` gave, checked."""
    try:
        if not isinstance(rows, list) or not all(isinstance(row.get("values", []), list) for row in rows):
            raise ValueError("there is no list")
        columns = tuple(Column(**row | {"values": tuple(row.get("values", ()))}) for row in rows)
        if len({column.name for column in columns}) < len(columns):
            raise ValueError("a name comes twice")
        for column in columns:
            _require_sound(column)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise NicestError(
            f"{source}: expected what nicest writes about columns, got something else ({brief(error)})"
        ) from error
    return tuple(
        replace(column, low=float(column.low), high=float(column.high), step=float(column.step)) for column in columns
    )


def _require_sound(column: Column) -> None:
    numbers, kinds = (column.low, column.high, column.step), {type(value) for value in column.values}
    if not (isinstance(column.name, str) and isinstance(column.type, str)):
        raise ValueError("names or types are wanting")
    if not all(isinstance(each, int | float) and math.isfinite(float(each)) for each in numbers):
        raise ValueError("numbers are wanting")
    if column.kind not in ("real", "steps", "values") or (column.step > 0) != column.discrete or column.step < 0:
        raise ValueError(f"no kind of column: {column.kind}")
    if bool(column.values) != (column.kind == "values") or column.low > column.high:
        raise ValueError("no such values")
    if kinds and (
        len(kinds) > 1 or not kinds <= {str, bool, float} or list(column.values) != sorted(set(column.values))
    ):
        raise ValueError("no such values")
    if kinds == {float} and not all(map(math.isfinite, column.values)):
        raise ValueError("no such values")
