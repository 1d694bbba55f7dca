"""The cells of a table as numbers that a model works on, and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nicest.data.columns import Column
from nicest.data.tables import require_pyarrow
from nicest.errors import NicestError
from nicest.messages import brief, shown

MILLISECONDS = 86_400_000  # of a day
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$|^[+-]?(nan|inf|infinity)$"
Codes = Callable[[Any], tuple[np.ndarray, np.ndarray]]


class Batch(NamedTuple):
    """Some rows as numbers (N, D), NaN where a cell is missing; and which rows hold a value unknown in training."""

    rows: np.ndarray
    unknown: np.ndarray


def family(kind: Any) -> str:
    """What cells of a type are: "text", "number", "moment" (or a span of time), "bool", "null", or "", something else.

    A dictionary is what its entries are, unless these are booleans.
    """
    from pyarrow import types

    if types.is_dictionary(kind):
        return family(kind.value_type).replace("bool", "")
    if str(kind) in ("string", "large_string", "string_view"):
        return "text"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_temporal(kind) and not types.is_interval(kind):
        return "moment"
    return str(kind) if str(kind) in ("bool", "null") else ""


def _inner(kind: Any) -> Any:
    """The type of the cells; of a dictionary, that of its entries."""
    return kind.value_type if hasattr(kind, "index_type") else kind


def by_entry(cells: Any, function: Codes) -> tuple[np.ndarray, np.ndarray]:
    """What a function gives for cells; it is asked but once for each entry of their dictionary, if they have one."""
    from pyarrow import types

    if not types.is_dictionary(cells.type):
        return function(cells)
    numbers, flags = function(cells.dictionary)
    places = cells.indices.fill_null(len(numbers)).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.append(numbers, np.nan)[places], np.append(flags, False)[places]


def as_numbers(cells: Any, kind: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The cells, of a kind if one is given, as float64, NaN where they are missing or words; and which are words."""
    return by_entry(cells, lambda entries: _plain_numbers(entries.cast(kind) if kind else entries))


def _plain_numbers(cells: Any) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow as pa
    from pyarrow import compute, types

    kind = cells.type
    words = np.zeros(len(cells), dtype=bool)
    if types.is_temporal(kind):
        cells = cells.cast(pa.int32() if types.is_date32(kind) or types.is_time32(kind) else pa.int64())
    elif family(kind) == "text":
        cells = compute.utf8_trim_whitespace(cells.cast(pa.large_string()))
        try:
            return _floats(cells), words
        except pa.ArrowInvalid:
            fits = compute.match_substring_regex(cells, NUMBER, ignore_case=True)
            words = ~fits.fill_null(True).to_numpy(zero_copy_only=False)
            cells = compute.if_else(fits, cells, pa.scalar(None, cells.type))
    return _floats(cells), words


def as_moments(cells: Any) -> tuple[np.ndarray, str]:
    """Texts as dates or moments, in numbers, and their type; no type where they are something else."""
    import pyarrow as pa

    stamps = [pa.timestamp(unit, zone) for zone in (None, "UTC") for unit in ("s", "us")]
    for kind in (pa.date32(), *stamps):
        try:
            return as_numbers(cells, kind)[0], str(kind)
        except pa.ArrowInvalid:
            continue
    return np.empty(0), ""


def _floats(cells: Any) -> np.ndarray:
    import pyarrow as pa

    return np.array(cells.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)


def encode(batch: Any, columns: Sequence[Column], path: Path, dtype: type = np.float32) -> Batch:
    """A record batch, or anything with `column(name)`, as the numbers the model works on.

    A number between whole steps is a value that training never saw, and has no probability.
    """
    import pyarrow as pa

    rows = np.empty((batch.num_rows, len(columns)), dtype=dtype)
    unknown = np.zeros(len(rows), dtype=bool)
    for i, column in enumerate(columns):
        cells = batch.column(column.name)
        cells = cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else cells
        found, new = codes(cells, column, path)
        with np.errstate(over="ignore"):
            rows[:, i] = found
        far = np.isinf(rows[:, i])  # beyond all numbers of training, and of float32
        rows[far, i] = 0.0
        unknown |= new | far
    return Batch(rows, unknown)


def is_moment(column: Column) -> bool:
    """Whether a column is of dates or times."""
    return not column.values and family(arrow_type(column.type)) == "moment"


def _wanted(column: Column) -> str:
    if column.values and isinstance(column.values[0], str):
        return "texts"
    return column.type if is_moment(column) or column.type == "bool" else "numbers"


class NotANumber(Exception):
    """Cells that are not what training had, in words."""


def _codes(cells: Any, column: Column) -> tuple[np.ndarray, np.ndarray]:
    """The model's numbers of cells, NaN where they are missing; and which hold a value that training never saw."""
    found = family(cells.type)
    if found == "null":
        return np.full(len(cells), np.nan), np.zeros(len(cells), dtype=bool)
    if column.values and isinstance(column.values[0], str | bool):
        texts = isinstance(column.values[0], str)
        if found == "text" or (found == "bool" and not texts):
            return by_entry(cells, lambda entries: _places(entries, column, texts))
        raise NotANumber(brief(cells.type, 60))
    return codes_of(as_in_training(cells, column), column)


def codes_of(numbers: np.ndarray, column: Column) -> tuple[np.ndarray, np.ndarray]:
    """The model's numbers of a column of numbers, NaN where they are; and which are values that training never saw."""
    if column.values:
        return _nearest(numbers, column)
    codes, outside = numbers - column.taken_off, column.outside(numbers)
    if not column.step:
        return np.where(outside, column.code(column.low), codes), outside
    whole = np.floor(codes / column.step)
    unknown = (whole * column.step != codes) & ~np.isnan(codes) | outside
    return np.where(unknown, 0.0, whole), unknown


def as_in_training(cells: Any, column: Column) -> np.ndarray:
    """Numbers in the unit of training: moments may come in another, or as text."""
    wanted, found = arrow_type(column.type), family(cells.type)
    if family(wanted) == "moment" and found in ("moment", "text"):
        return as_numbers(cells, _inner(wanted))[0]
    if family(wanted) == "moment" or found not in ("number", "text"):
        raise NotANumber(brief(_inner(cells.type), 60))
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
    require_pyarrow()
    import pyarrow as pa

    try:
        arrays = [decoded(rows[:, i].astype(np.float64), column) for i, column in enumerate(columns)]
    except pa.ArrowException as error:
        raise NicestError(f"cannot write numbers as the column types of the model ({brief(error)})") from error
    return pa.table(arrays, names=[column.name for column in columns])


def decoded(numbers: np.ndarray, column: Column) -> Any:
    """The model's numbers of a column as an Arrow array of its type; NaN becomes missing."""
    import pyarrow as pa

    kind, missing = arrow_type(column.type), np.isnan(numbers)
    inner = _inner(kind)
    if column.values:
        places = np.where(missing, 0, numbers).round().clip(0, len(column.values) - 1).astype(int)
        cells = pa.array(column.values).take(pa.array(places, mask=missing)).cast(inner, safe=False)
    else:
        cells = _of_type(cell_values(numbers, column), missing, inner)
    return _in_dictionary(cells, kind)


def _in_dictionary(cells: Any, kind: Any) -> Any:
    """Cells as a dictionary, if that is what a type is."""
    import pyarrow as pa

    if not pa.types.is_dictionary(kind):
        return cells
    entries = cells.dictionary_encode()
    return pa.DictionaryArray.from_arrays(
        entries.indices.cast(kind.index_type), entries.dictionary, ordered=kind.ordered
    )


def numbers_as(values: np.ndarray, missing: np.ndarray, kind: Any) -> Any:
    """Numbers in the unit of a column as cells of a type."""
    return _in_dictionary(_of_type(values, missing, _inner(kind)), kind)


def codes(cells: Any, column: Column, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The model's numbers of cells, NaN where they are missing; and which hold a value that training never saw."""
    import pyarrow as pa

    try:
        return _codes(cells, column)
    except (pa.ArrowException, NotANumber) as error:
        cell = re.search(r"string: ('.*') as a scalar", str(error))  # Arrow's words for a date that is none
        found = str(error) if isinstance(error, NotANumber) else brief(cell[1] if cell else cells.type, 60)
        raise NicestError(
            f"{path}: expected {_wanted(column)} in column {shown(column.name)}, as in training, got {found}"
        ) from error


def cell_values(numbers: np.ndarray, column: Column) -> np.ndarray:
    """The model's numbers of a column of numbers, in its own unit; whole steps stay within what training saw.

    A column that had no number below 0 in training gets none.
    """
    if column.values:
        places = np.nan_to_num(numbers).round().clip(0, len(column.values) - 1).astype(int)
        return np.where(np.isnan(numbers), np.nan, np.array(column.values, dtype=np.float64)[places])
    if not column.step:
        values = numbers.astype(np.float64) + column.taken_off
        for spike in column.spikes:  # whose digits float32 does not hold
            values = np.where(np.float32(numbers) == np.float32(column.code(spike)), spike, values)
        return np.clip(
            values, 0.0 if column.low >= 0 else -np.inf, np.inf if column.ceiling is None else column.ceiling
        )
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
    bounds = np.iinfo(str(whole))
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
