"""Arrow cells as numbers, and numbers as Arrow cells of any type."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from nicest.errors import NicestError
from nicest.messages import brief

MILLISECONDS = 86_400_000  # of a day
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$|^[+-]?(nan|inf|infinity)$"
FIRST = 16  # cells that are parsed before all others, since Arrow takes its time to fail
MOMENT = re.compile("date|time|duration")  # in Arrow's names of the types of dates and times


class Unfit(Exception):
    """Cells of another type than those of training: what was expected and what was found, in words."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}, got {found}")
        self.expected, self.found = expected, found


def has_pyarrow() -> bool:
    """Return True if pyarrow is installed."""
    return sys.modules.get("pyarrow", ...) is not None and importlib.util.find_spec("pyarrow") is not None


def family(kind: Any) -> str:
    """Classify an Arrow type: "text", "number", "moment" (also spans of time), "bool", "null", or "" for others.

    A dictionary is classified by its entries; one of booleans is "".
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


def inner(kind: Any) -> Any:
    """Return the type of the entries of a dictionary, or the type itself."""
    return kind.value_type if hasattr(kind, "index_type") else kind


def in_one(cells: Any) -> Any:
    """Return a column as one Arrow array, without views of strings, which Arrow can do little with."""
    import pyarrow as pa

    if str(cells.type) == "string_view":
        cells = cells.cast("large_string")
    if isinstance(cells, pa.ChunkedArray):
        cells = cells.unify_dictionaries() if hasattr(cells.type, "index_type") else cells
        cells = cells.chunk(0) if cells.num_chunks == 1 else cells.combine_chunks()
        if isinstance(cells, pa.ChunkedArray):  # more than 2 GiB of strings
            cells = cells.cast("large_string").combine_chunks()
    return cells


def entries(cells: Any) -> tuple[Any, np.ndarray]:
    """Return the distinct cells of a dictionary, and the index of each cell among them, (N,); -1 where missing."""
    return cells.dictionary, cells.indices.cast("int64").fill_null(-1).to_numpy(zero_copy_only=False)


def as_numbers(cells: Any, kind: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Convert an Arrow array to float64, NaN for missing cells and words; return also which cells are words.

    Cells are first cast to `kind`, if one is given. Entries of a dictionary are converted once.
    """
    if not hasattr(cells.type, "index_type"):
        return _plain_numbers(cells.cast(kind) if kind else cells)
    distinct, index = entries(cells)
    numbers, words = as_numbers(distinct, kind)
    return np.append(numbers, np.nan)[index], np.append(words, False)[index]


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
            _floats(cells[:FIRST])
            return _floats(cells), words
        except pa.ArrowInvalid:
            fits = compute.match_substring_regex(cells, NUMBER, ignore_case=True)
            words = ~fits.fill_null(True).to_numpy(zero_copy_only=False)
            cells = compute.if_else(fits, cells, pa.scalar(None, cells.type))
    return _floats(cells), words


def _floats(cells: Any) -> np.ndarray:
    import pyarrow as pa

    return np.array(cells.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)


def as_moments(cells: Any) -> tuple[np.ndarray, str]:
    """Convert texts to dates or moments, as numbers, and name their type; no type if they are something else."""
    import pyarrow as pa

    stamps = [pa.timestamp(unit, zone) for zone in (None, "UTC") for unit in ("s", "us")]
    for kind in (pa.date32(), *stamps):
        try:
            cells[:FIRST].cast(kind)
            return as_numbers(cells, kind)[0], str(kind)
        except pa.ArrowInvalid:
            continue
    return np.empty(0), ""


def as_numbers_of(cells: Any, kind: str) -> np.ndarray:
    """Convert cells to float64, (N,), in the unit of a type: moments may come in another unit, or as text."""
    if isinstance(cells, np.ndarray):
        try:
            return cells.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise Unfit("numbers", brief(error, 60)) from error
    import pyarrow as pa

    cells = in_one(cells)
    found = family(cells.type)
    if found == "null":
        return np.full(len(cells), np.nan)
    if MOMENT.search(kind):
        try:
            if found in ("moment", "text"):
                return as_numbers(cells, inner(arrow_type(kind)))[0]
        except pa.ArrowException as error:
            cell = re.search(r"string: ('.*') as a scalar", str(error))  # Arrow's words for a date that is none
            raise Unfit(kind, brief(cell[1] if cell else cells.type, 60)) from error
        raise Unfit(kind, brief(inner(cells.type), 60))
    if found not in ("number", "text"):
        raise Unfit("numbers", brief(inner(cells.type), 60))
    numbers, words = as_numbers(cells)
    if words.any():
        raise Unfit("numbers", repr(brief(cells[int(words.argmax())].as_py(), 60)))
    return numbers


def as_places(cells: Any, values: Sequence[str | bool]) -> np.ndarray:
    """Convert cells to indices among texts or booleans, (N,): NaN where missing, infinity for other values."""
    if isinstance(cells, np.ndarray):
        known = {value: float(i) for i, value in enumerate(values)} | {None: math.nan}
        return np.array([math.nan if each != each else known.get(each, math.inf) for each in cells.tolist()])
    import pyarrow as pa
    from pyarrow import compute

    texts = isinstance(values[0], str)
    cells, found = in_one(cells), family(cells.type)
    if found == "null":
        return np.full(len(cells), np.nan)
    if not (found == "text" or (found == "bool" and not texts)):
        raise Unfit("texts" if texts else "booleans", brief(cells.type, 60))
    if hasattr(cells.type, "index_type"):
        distinct, index = entries(cells)
        return np.append(as_places(distinct, values), np.nan)[index]
    try:
        cells = cells.cast(pa.large_string() if texts else pa.bool_())
    except pa.ArrowException as error:
        raise Unfit("booleans", brief(cells.type, 60)) from error
    places = _floats(compute.index_in(cells, value_set=pa.array(values, cells.type)))
    return np.where(np.isnan(places) & ~cells.is_null().to_numpy(zero_copy_only=False), np.inf, places)


def as_cells(values: np.ndarray, missing: np.ndarray, kind: str) -> Any:
    """Convert numbers or objects, (N,), to Arrow cells of a type; those marked `missing` become null."""
    import pyarrow as pa

    wanted = arrow_type(kind)
    try:
        if values.dtype == object:
            cells = pa.array(values.tolist(), mask=missing).cast(inner(wanted))
        else:
            cells = _of_type(values, missing, inner(wanted))
        if not pa.types.is_dictionary(wanted):
            return cells
        found = cells.dictionary_encode()
        indices = found.indices.cast(wanted.index_type)
        return pa.DictionaryArray.from_arrays(indices, found.dictionary, ordered=wanted.ordered)
    except pa.ArrowException as error:
        raise NicestError(f"cannot write numbers as {kind} ({brief(error)})") from error


def _of_type(values: np.ndarray, missing: np.ndarray, kind: Any) -> Any:
    """Convert numbers to cells of a type, within the range of the type, rounded if it holds whole numbers only."""
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
    limits = np.iinfo(str(whole))
    low, high = float(limits.min), np.nextafter(float(limits.max) + 1, 0)
    if types.is_time(kind):
        low, high = 0.0, 86400.0 * {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[kind.unit] - 1
    if types.is_date64(kind):
        values = (values / MILLISECONDS).round() * MILLISECONDS
    return pa.array(values.round().clip(low, high).astype(limits.dtype), mask=missing).cast(kind)


def arrow_type(name: str) -> Any:
    """Return the type that Arrow calls by a name."""
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


def parse_number(text: str, kind: str) -> float:
    """Return the number of a text, in the unit of a type; raise a ValueError with what was expected."""
    if MOMENT.search(kind):
        import pyarrow as pa

        try:
            return float(as_numbers_of(pa.array([text]), kind)[0])
        except Unfit:
            raise ValueError(f"{kind}, such as 2026-01-31,") from None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("a number")
    return number
