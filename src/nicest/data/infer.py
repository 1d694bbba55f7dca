"""What the columns of a table are, by all of their cells, whatever the order of the rows."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nicest.data.cells import MOMENT, as_cells, as_moments, as_numbers, entries, family, in_one
from nicest.data.columns import Category, Column, Integer, Moment, Number, Real, Schema, leave_out, with_bounds
from nicest.data.kinds import INTEGERS, OFF_GRID
from nicest.errors import NicestError
from nicest.messages import brief, listed, shown

FEW = 20  # distinct numbers that are categories, each in ten rows or so
COMMON = 0.05  # fraction of the rows from which a number is a spike
CAPPED = 0.01  # the same for the least and the largest number, if they are more frequent than others
MOST_SPIKES = 8
NEAR = 0.1  # see `_ends_at`
FINEST = 1 << 20  # steps across a column of integers: where there are more, they do not matter
GRID, REPEATED = 1 << 16, 4  # most steps across a column of decimals, and how often its numbers come in the mean
DECIMALS = 15
MOST_VALUES = 4096  # distinct texts
LONGEST = 1000  # characters of a text
NUMBERED = 50  # rows from which distinct consecutive integers are taken for row numbers
TAIL = 0.01  # of the rows at either end that do not count for offset and scale
LEADING_ZERO = re.compile(r"0\d+$")  # of numbers that are names, such as postal codes

Discrete = Literal["values", "types"]


class LeftOut(Exception):
    """A column that no model is made of, and why."""


def schema_of(table: Any, **options: Any) -> Schema:
    """Infer the columns of a table; warn about those that are left out or look odd.

    Parameters
    ----------
    table : pyarrow.Table or numpy.ndarray
        Table, or array (N, D) of numbers, whose columns are named x0, x1, ...
    **options
        See `infer`.
    """
    schema, notes = infer(table, **options)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return schema


def infer(
    table: Any,
    *,
    drop: Sequence[str] = (),
    discrete: Discrete = "values",
    bounds: Mapping[str, tuple[float, float | None]] | None = None,
    source: Path | str = "the table",
    types: Mapping[str, Any] | None = None,
) -> tuple[Schema, list[str]]:
    """Infer the columns of a table, and what the user should know about them, a line each.

    Parameters
    ----------
    table : pyarrow.Table, numpy.ndarray or mapping
        See `schema_of`; or the cells of each column by its name, each of which is looked up once.
    drop : sequence of str
        Columns to leave out.
    discrete : {"values", "types"}
        Find discrete columns, spikes and bounds by the values of all columns, or only in columns of integers,
        booleans and texts.
    bounds : mapping of str to (float, float or None), optional
        Least and largest possible number of some columns.
    source : Path or str
        Name of the table in messages.
    types : mapping of str to pyarrow.DataType, optional
        Types in which cells come back, where they differ from those of the table.
    """
    if isinstance(table, np.ndarray):
        if table.ndim != 2:
            raise NicestError(f"{source}: expected an array (rows, columns), got one of shape {table.shape}")
        table = {f"x{i}": cells for i, cells in enumerate(table.T)}
    elif not isinstance(table, Mapping):
        table = dict(zip(table.schema.names, table.columns, strict=True))
    if absent := sorted(set(drop) - set(table)):
        raise NicestError(f"{source}: found no column {listed(absent)} to drop; it has {listed(list(table))}")
    found: list[Column] = []
    left_out: dict[str, str] = {}
    notes: list[str] = []
    for name in table:
        if name in drop:
            continue
        if (n := len(cells := table[name])) < 2:
            got = "1" if n else f"only the names of {len(table)} columns"
            raise NicestError(f"{source}: expected rows, at least 3 to train, validate and test on, got {got}")
        try:
            found.append(_column(name, cells, discrete == "types", notes, (types or {}).get(name)))
        except LeftOut as reason:
            left_out[name] = f"{shown(name)} ({reason})"
        except NicestError as error:
            raise NicestError(f"{source}: {error}") from error
    if not found:
        told = f"no model is made of column {next(iter(left_out.values()))}" if left_out else "it has no columns"
        raise NicestError(f"{source}: expected columns to model; {told}")
    if left_out:
        most = ", ".join(list(left_out.values())[:5]) + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else "")
        notes.insert(0, f"left out {len(left_out)} of {len(table)} columns: {most}")
    return with_bounds(found, bounds or {}, source), [f"{source}: {note}" for note in notes]


def _column(name: str, cells: Any, by_type: bool, notes: list[str], type: Any = None) -> Column:
    """Infer a column from its cells, of Arrow or numpy, which are to come back as a type."""
    if isinstance(cells, np.ndarray):
        if cells.dtype == np.bool_:
            return Category(name, "bool", tuple(np.unique(cells).tolist()))
        if cells.dtype.kind not in "iuf":
            raise LeftOut(f"expected numbers or strings, got {cells.dtype}")
        kind = {"float64": "double", "float32": "float", "float16": "halffloat"}.get(str(cells.dtype), str(cells.dtype))
        numbers = cells.astype(np.float64)
        return _of_numbers(name, kind, *np.unique(numbers[~np.isnan(numbers)], return_counts=True), by_type, notes)
    if not family(cells.type):
        raise LeftOut(f"expected numbers or strings, got {brief(cells.type, 60)}")
    kind = str(type or cells.type)
    cells = in_one(cells).drop_null()
    if kind in ("bool", "null"):
        values = tuple(sorted(cells.unique().to_pylist()))
        if not values:
            raise LeftOut("missing in all rows")
        return Category(name, kind, values)
    if family(cells.type) == "text":
        return _of_texts(name, kind, cells, by_type, notes)
    numbers = as_numbers(cells)[0]
    return _of_numbers(name, kind, *np.unique(numbers[~np.isnan(numbers)], return_counts=True), by_type, notes)


def _of_texts(name: str, kind: str, cells: Any, by_type: bool, notes: list[str]) -> Column:
    """Infer a column of texts, all of whose cells may be numbers or dates."""
    distinct, index = entries(cells if hasattr(cells.type, "index_type") else cells.dictionary_encode())
    counts = np.bincount(index[index >= 0], minlength=len(distinct))
    used = np.flatnonzero((counts > 0) & distinct.is_valid().to_numpy(zero_copy_only=False))
    distinct, counts = distinct.take(used), counts[used]
    numbers, words = as_numbers(distinct)
    seen, n_words = counts[words].sum() + counts[~np.isnan(numbers)].sum(), counts[words].sum()
    few = len(distinct) <= min(MOST_VALUES, max(FEW, seen / 2))
    some = distinct[:MOST_VALUES].to_pylist()
    named = few and any(map(LEADING_ZERO.match, some))
    if 0 < n_words < seen / 2 and not named:
        raise NicestError(
            f"expected numbers in column {shown(name)}, got {brief(repr(distinct[int(words.argmax())].as_py()), 60)}"
            f" among them; correct the cell, or {leave_out(name)}"
        )
    if not n_words and not named:
        values, counts = _counted(numbers, counts)
        whole = bool(len(values)) and (values == np.floor(values)).all() and np.abs(values).max() < 2.0**63
        return _of_numbers(name, "int64" if whole else "double", values, counts, by_type, notes)
    if n_words == seen:
        moments, moment = as_moments(distinct)
        if moment:
            return _of_numbers(name, moment, *_counted(moments, counts), by_type, notes)
    example = f"{len(distinct)} different texts such as {brief(repr(some[0]), 60)}"
    numbered = not named and len(some) > 2 and sum(bool(re.match(r"\W*\d", text)) for text in some) > len(some) / 2
    advice = "write numbers as 1234.5, without units, and dates as 2026-01-31" if numbered else ""
    if max(map(len, some)) > LONGEST:
        raise LeftOut(f"free text: texts of more than {LONGEST} characters")
    if not few:
        raise LeftOut(f"free text or identifiers: {example}{advice and '; '}{advice}")
    if numbered:
        notes.append(
            f"column {shown(name)} holds {example}: they are treated as unordered categories; {advice}, or"
            f" {leave_out(name)} if that is wrong"
        )
    return Category(name, kind, tuple(sorted(some)))


def _counted(numbers: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add the counts of equal numbers, which are sorted; NaN are left out."""
    there = ~np.isnan(numbers)
    values, places = np.unique(numbers[there], return_inverse=True)
    return values, np.bincount(places, counts[there], len(values)).astype(np.int64)


def _of_numbers(
    name: str, kind: str, values: np.ndarray, counts: np.ndarray, by_type: bool, notes: list[str]
) -> Column:
    """Infer a column from its distinct numbers, increasing, and how often each comes."""
    n, moment = int(counts.sum()), bool(MOMENT.search(kind))
    if not n:
        raise LeftOut("missing in all rows")
    if moment and "<value out of range" in str(as_cells(values[[0, -1]], np.zeros(2, bool), kind).cast("string")):
        raise LeftOut("dates outside the years that can be written")
    if not np.isfinite(values[[0, -1]]).all():
        bad = values[0] if np.isinf(values[0]) else values[-1]
        raise NicestError(
            f"expected finite numbers, got {bad} in column {shown(name)}; drop those rows, or leave the cells empty"
        )
    if by_type and kind.startswith(("double", "float", "halffloat", "decimal")):
        return _number(Real, name, kind, values, counts, 0.0, plain=True)
    whole = bool((values == np.floor(values)).all())
    if not moment and len(values) <= FEW and n >= 10 * len(values):
        return Category(name, kind, tuple((values + 0.0).tolist()))
    if len(values) == n >= NUMBERED and whole and values[-1] - values[0] == n - 1 and not moment:
        notes.append(
            f"column {shown(name)} holds the consecutive integers {values[0]:.0f} to {values[-1]:.0f}, as row numbers"
            f" do. The model learns it like any other column; {leave_out(name)} if it identifies rows"
        )
    step = _step(values, n, whole)
    return _number(Moment if moment else Integer if step else Real, name, kind, values, counts, step)


def _step(values: np.ndarray, n: int, whole: bool) -> float:
    """Return the width of the grid on which increasing numbers lie, 0.0 if there is none or it is too fine."""
    reach = float(values[-1]) - float(values[0])
    if len(values) < 2 or not math.isfinite(reach) or not (whole or n >= REPEATED * len(values)):
        return 0.0
    decimals = 0 if whole else _decimals(values, "double")
    if decimals is not None and max(-values[0], values[-1]) * 10.0**decimals < INTEGERS:
        counted = (values * 10.0**decimals).round().astype(np.int64)
        divisor = int(np.gcd.reduce(counted - counted[0]))
        if (counted[-1] - counted[0]) // divisor <= (FINEST if whole else GRID):
            return divisor / 10.0**decimals
    if whole or reach / np.diff(values).min() > GRID:
        return 0.0
    step = float(reach / round(reach / np.diff(values).min()))  # as of integers that were shifted and rounded
    counts = (values - values[0]) / step
    return step if np.abs(counts - counts.round()).max() < OFF_GRID / 2 else 0.0


def _decimals(values: np.ndarray, kind: str) -> int | None:
    """Return the most decimals that any number has, in the precision of its type; None if they are too many."""
    single = {"float": np.float32, "halffloat": np.float16}.get(kind, np.float64)
    largest, rest = float(np.abs(values).max()), values
    for decimals in range(DECIMALS + 1):
        power = 10.0**decimals
        if largest * power >= INTEGERS:
            return None
        rest = rest[((rest * power).round() / power).astype(single) != rest.astype(single)]
        if not len(rest):
            return decimals
    return None


def _number(
    kind: type[Number],
    name: str,
    type: str,
    values: np.ndarray,
    counts: np.ndarray,
    step: float,
    *,
    plain: bool = False,
) -> Number:
    """Describe a column of numbers: scale, decimals, knots, and unless it is `plain`, spikes and bounds."""
    n, low, high = int(counts.sum()), float(values[0]), float(values[-1])
    offset, scale = _standard(values, counts) if math.isfinite(high - low) else (0.0, 0.0)
    if scale < np.finfo(float).tiny:
        raise NicestError(
            f"column {shown(name)} has numbers from {low:g} to {high:g}, a range too small or too large for float64;"
            f" give it another unit, or {leave_out(name)}"
        )
    if step:  # then every code is a multiple of the step
        offset = float(values[np.abs(values - offset).argmin()])
    spikes = [] if plain or low == high else _spikes(values, counts)
    floor = ceiling = None
    if not plain and low < high:
        floor = 0.0 if low >= 0 and _ends_at(values, counts) else low if low in spikes else None
        ceiling = 1.0 if floor == 0 and high <= 1 and _ends_at(1 - values[::-1], counts[::-1]) else None
        ceiling = high if ceiling is None and high in spikes else ceiling
    levels = np.linspace(0, 1, 33 if n >= 5000 else 16 if n >= 500 else 8)
    levels[[0, -1]] = 0.005, 0.995  # outliers bend nothing
    knots = np.unique(np.float32((quantile(values, counts, levels) - offset) / scale)).astype(float)
    decimals = _decimals(values, type)
    return kind(
        name, type, low, high, offset, scale, step, decimals, tuple(spikes), floor, ceiling, tuple(knots.tolist())
    )


def _standard(values: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation of numbers, those beyond the outer hundredths moved to their ends."""
    middle = float(quantile(values, counts, np.array([0.5]))[0])
    with np.errstate(over="ignore"):
        unit = float(np.abs(values - middle).max()) or 1.0
        each = (values - middle) / unit
    for low, high in (quantile(each, counts, np.array([TAIL, 1 - TAIL])), (each[0], each[-1])):
        clipped = each.clip(low, high)
        mean = float(np.average(clipped, weights=counts))
        if deviation := math.sqrt(np.average((clipped - mean) ** 2, weights=counts)):
            return middle + mean * unit, deviation * unit
    return middle, 1.0


def quantile(values: np.ndarray, counts: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the numbers at some levels, of increasing numbers that come so often."""
    total = counts.cumsum()
    return values[np.searchsorted(total, levels * total[-1]).clip(max=len(values) - 1)]


def _spikes(values: np.ndarray, counts: np.ndarray) -> list[float]:
    """Return the most frequent numbers: those in a twentieth of the rows, and fewer at an end where all is cut off."""
    n = counts.sum()
    least = np.full(len(values), max(10, COMMON * n))
    least[[0, -1]] = np.minimum(least[0], max(10, CAPPED * n, 5 * np.median(counts)))
    often = np.flatnonzero(counts >= least)
    often = often[np.argsort(-counts[often], kind="stable")][:MOST_SPIKES]
    return sorted((values[often] + 0.0).tolist())


def _ends_at(distances: np.ndarray, counts: np.ndarray) -> bool:
    """Return True if numbers reach a bound, and do not merely become rare before it.

    They do if the nearest hundredth of them lies within a tenth of the way from the bound to their median.
    `distances` to the bound increase.
    """
    near, middle = quantile(distances, counts, np.array([0.01, 0.5]))
    return bool(near <= NEAR * (middle - near))
