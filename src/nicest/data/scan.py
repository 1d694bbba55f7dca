"""A pass over a table: what its columns hold, its complete rows and its incomplete ones."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nicest.data.cells import NUMBER, as_moments, as_numbers, encode, family
from nicest.data.columns import Column, as_given, leave_out, parsed_bounds, with_bounds
from nicest.data.tables import TableFile
from nicest.errors import NicestError
from nicest.messages import brief, listed, shown

MOST_VALUES = 100  # different strings in a column
COMMON = 0.05  # share of the rows from which a number is a spike
MOST_SPIKES = 8
CANDIDATES = 64  # most frequent numbers of a batch that may be spikes
MANTISSA = 46  # last bits of a float64 that a histogram of distances ignores: 6 of 52 are left
NEAR = 0.1  # see `Tally._ends_at`
FEW = 20  # different numbers in a column of fractions that is not continuous, each in ten rows or more
FINEST = 1 << 20  # steps across a column of whole numbers: where there are more, they do not matter
LONGEST = 1000  # characters of a text
SMALLEST, LARGEST = 1e-30, 1e30  # across a continuous column, that float32 holds it


@dataclass
class Tally:
    """Statistics of one column, of bounded size whatever the number of rows."""

    name: str
    type: Any
    by_type: bool = False
    given: bool = False  # others are predicted from it: it needs no density
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
    moments: set[str] = field(default_factory=set)  # types of the dates that all texts so far are; "" of other texts
    common: Counter[float] = field(default_factory=Counter)  # counts of the most frequent numbers
    distances: dict[float, Counter[int]] = field(default_factory=lambda: {0.0: Counter(), 1.0: Counter()})  # to bounds
    rising: bool = True  # every number exceeds the one before it

    def add_numbers(self, numbers: np.ndarray) -> None:
        """Add cells, without missing ones. The order in which cells are added does not change spikes or bounds."""
        finite = np.isfinite(numbers)
        if not finite.all():
            self.infinite = float(numbers[~finite][0])
            numbers = numbers[finite]
        if not len(numbers):
            return
        self.rising = self.rising and float(numbers[0]) > self.high and bool((np.diff(numbers) > 0).all())
        self.low, self.high = min(self.low, float(numbers.min())), max(self.high, float(numbers.max()))
        self.whole = self.whole and bool((numbers == np.floor(numbers)).all()) and max(-self.low, self.high) < 2**53
        if self.whole:
            whole = numbers.astype(np.int64)
            self.first = int(whole[0]) if self.first is None else self.first
            self.divisor = math.gcd(self.divisor, int(np.gcd.reduce(whole - self.first)))
        values, counts = np.unique(numbers, return_counts=True)
        if len(self.numbers) <= FEW:
            self.numbers |= set(values[: FEW + 1].tolist())
        self._count_common(values, counts)
        if self.low >= 0:
            self._add_distances(0.0, values, counts)
            if self.high <= 1:
                self._add_distances(1.0, 1 - values[::-1], counts[::-1])

    def _count_common(self, values: np.ndarray, counts: np.ndarray) -> None:
        """Count the most frequent numbers of a batch, and those of earlier batches.

        A number in 5 % of all rows is among the most frequent of some batch, and is counted from its first batch with
        a count of note, whatever the order of the rows.
        """
        often = np.argsort(-counts, kind="stable")[:CANDIDATES]
        followed = np.union1d(values[often], np.fromiter(self.common, float))
        places = np.searchsorted(values, followed).clip(max=len(values) - 1)
        found = np.where(values[places] == followed, counts[places], 0)
        self.common.update(dict(zip(followed.tolist(), found.tolist(), strict=True)))
        if len(self.common) > 20 * CANDIDATES:
            self.common = Counter(dict(self.common.most_common(10 * CANDIDATES)))

    def _add_distances(self, bound: float, sorted_distances: np.ndarray, counts: np.ndarray) -> None:
        """Add distances to a bound to a histogram whose bins have a relative width of 1/64, for `_ends_at`."""
        bins, first = np.unique(np.abs(sorted_distances).view(np.int64) >> MANTISSA, return_index=True)
        self.distances[bound].update(dict(zip(bins.tolist(), np.add.reduceat(counts, first).tolist(), strict=True)))

    def column(self, path: Path) -> Column:
        """The column, after all of it was seen."""
        where = f"column {shown(self.name)}"
        if not self.seen:
            raise NicestError(f"{path}: {where} is missing in all rows; {leave_out(self.name)}")
        if str(self.type) == "bool":
            values = tuple(bool(each) for each in sorted(self.numbers))
            return Column(self.name, "bool", "values", 0, len(values) - 1, 1.0, values)
        if 0 < self.not_numbers < self.seen / 2:
            raise NicestError(
                f"{path}: expected numbers in {where}, got {brief(self.example, 60)!r} among them; correct the cell,"
                f" or {leave_out(self.name)}"
            )
        dates = self.moments - {""} if len(self.moments) == 1 and self.not_numbers == self.seen else set()
        if self.not_numbers and not dates:
            return self._of_texts(path)
        if self.infinite:
            raise NicestError(
                f"{path}: expected finite numbers, got {self.infinite} in {where}; drop those rows,"
                " or leave the cells empty"
            )
        kind = str(self.type)
        if family(self.type) == "text":  # all of whose cells are numbers, as in a .csv file
            kind = dates.pop() if dates else "int64" if self.whole and not self.missing else "double"
        integers = self.whole and not self.by_type and kind.startswith(("int", "uint"))
        if integers and self.rising and self.seen >= NUMBERED:
            warnings.warn(
                f"{path}: {where} rises from row to row, as row numbers do. The model learns it like any other column,"
                f" and new rows beyond {self.high:.0f} get low densities; {leave_out(self.name)} if it identifies rows",
                stacklevel=4,
            )
        floats = self.by_type and kind.startswith(("double", "float", "halffloat", "decimal"))
        if not floats and (column := self.discrete(kind)):
            return self.with_support(column)
        if self.low == self.high and not self.given:
            raise NicestError(
                f"{path}: {where} is constant, {self.low:g}: its density is infinite; {leave_out(self.name)}"
            )
        if self.low < self.high and not SMALLEST < self.high - self.low < LARGEST:
            spread = f"has numbers from {self.low:g} to {self.high:g}, a range too small or too large for float32"
            raise NicestError(f"{path}: {where} {spread}; give it another unit, or {leave_out(self.name)}")
        column = Column(self.name, kind, "real", self.low, self.high)
        return column if self.by_type else self.with_support(column)

    def with_support(self, column: Column) -> Column:
        """Return the column with the spikes and the bounds of its cells."""
        if column.values:
            return column
        often = [(-n, value) for value, n in self.common.items() if n >= max(10, COMMON * self.seen)]
        spikes = tuple(sorted(value for _, value in sorted(often)[:MOST_SPIKES]))
        low = 0.0 if self.low >= 0 and self._ends_at(0.0) else None
        capped = () if column.step else spikes  # of which nothing lies beyond
        low = self.low if low is None and self.low in capped else low
        high = 1.0 if low == 0 and self.high <= 1 and self._ends_at(1.0) else None
        high = self.high if high is None and low is not None and self.high in capped else high
        return replace(column, spikes=spikes, floor=low, ceiling=high)

    def _ends_at(self, bound: float) -> bool:
        """Return True if the cells reach a bound, and do not merely become rare before it.

        They do if the nearest hundredth of them lies within a tenth of the way from the bound to their median.
        """
        bins, counts = np.array(sorted(self.distances[bound].items())).T
        edges, ranks = (bins << MANTISSA).view(np.float64), np.array([0.01, 0.5]) * (counts.sum() - 1)
        low, high = (edges[np.searchsorted(counts.cumsum(), each(ranks), side="right")] for each in (np.floor, np.ceil))
        near, middle = low + ranks % 1 * (high - low)
        return bool(near <= NEAR * (middle - near))

    def discrete(self, kind: str) -> Column | None:
        """The column if its numbers are whole steps or few values; None if they are continuous."""
        if self.whole:
            step = float(self.divisor or 1)
            if (self.high - self.low) / step <= FINEST:
                return Column(self.name, kind, "steps", self.low, self.high, step)
        elif len(self.numbers) <= FEW and self.seen >= 10 * len(self.numbers):
            return Column(self.name, kind, "values", 0, len(self.numbers) - 1, 1.0, tuple(sorted(self.numbers)))
        return None

    def _of_texts(self, path: Path) -> Column:
        counted = sum(bool(re.match(r"\W*\d", text)) for text in self.texts)
        numbered = len(self.texts) > 2 and counted > len(self.texts) / 2
        written = "write numbers as 1234.5, without units, and dates as 2026-01-31, or " if numbered else ""
        where, example = f"{path}: column {shown(self.name)} holds", brief(self.example, 60)
        what = f"more than {MOST_VALUES} different strings" if len(self.texts) > MOST_VALUES else ""
        if what or max(map(len, self.texts)) > LONGEST:
            what = what or f"strings of more than {LONGEST} characters"
            advice = f"{written}{leave_out(self.name)}"
            raise NicestError(f"{where} {what}, such as {example!r}, which cannot be modelled; {advice}")
        if numbered:
            warnings.warn(
                f"{where} {len(self.texts)} different strings, such as {example!r}: they are treated as unordered"
                f" categories; {written}{leave_out(self.name)} if that is wrong",
                stacklevel=4,
            )
        values = tuple(sorted(self.texts))
        return Column(self.name, str(self.type), "values", 0, len(values) - 1, 1.0, values)


NUMBERED = 50  # rows from which integers that rise from row to row are taken for row numbers


def scan(path: Path, drop: Sequence[str] = (), target: Sequence[str] = ()) -> tuple[Column, ...]:
    """What the columns of a table hold: one pass over the file. With a `target`, the other columns are given."""
    file, dropped = TableFile(path), set(drop)
    if absent := sorted(dropped - set(file.names)):
        raise NicestError(f"{path}: found no column {listed(absent)} to drop; it has {listed(file.names)}")
    if path.suffix.lower() == ".csv" and all(re.match(NUMBER, name.strip(), re.IGNORECASE) for name in file.names):
        warnings.warn(
            f"{path}: the first line gives the names of the columns, and all of them are numbers, such as"
            f" {shown(file.names[0])}: if it is a row, put a line of names before it",
            stacklevel=3,
        )
    kept = [file.schema.field(name) for name in file.names if name not in dropped]
    names = [each.name for each in kept]
    return columns_of(kept, file.batches(names), path, given=set(names) - set(target) if target else ())


def columns_of(
    fields: Sequence[Any], batches: Iterable[Any], path: Path, *, by_type: bool = False, given: Collection[str] = ()
) -> tuple[Column, ...]:
    """What columns hold: Arrow's fields and all their record batches, looked at once.

    With `by_type`, floats are continuous whatever they hold. Columns that are `given` may be constant.
    """
    tallies, rows = [Tally(each.name, each.type, by_type=by_type, given=each.name in given) for each in fields], 0
    for tally in tallies:
        if not family(tally.type):
            raise NicestError(
                f"{path}: expected numbers or strings in column {shown(tally.name)}, got {brief(tally.type, 60)};"
                f" {leave_out(tally.name)}"
            )
    for batch in batches:
        rows += batch.num_rows
        for tally, cells in zip(tallies, batch.columns, strict=True):
            _look(tally, cells)
    if not rows:
        raise NicestError(f"{path}: expected rows, got only the names of {len(tallies)} columns")
    if rows == 1:
        raise NicestError(f"{path}: expected at least 3 rows, to train, validate and test on, got 1")
    return tuple(tally.column(path) for tally in tallies)


def _look(tally: Tally, cells: Any) -> None:
    """Take note of the cells of one column."""
    if str(cells.type) == "string_view":  # which Arrow can do little with
        cells = cells.cast("string")
    cells = cells.drop_null()
    if str(cells.type) == "bool":
        tally.seen += len(cells)
        tally.numbers |= set(cells.unique().to_pylist())
        return
    numbers, words = as_numbers(cells)
    if family(cells.type) == "text":
        if len(tally.texts) <= MOST_VALUES:
            tally.texts |= set(cells.unique().slice(0, MOST_VALUES + 1).to_pylist()) - {None}
        if words.any():
            tally.not_numbers += int(words.sum())
            tally.example = cells[int(words.argmax())].as_py()
            if words.all() and "" not in tally.moments:
                moments, kind = as_moments(cells)
                tally.moments.add(kind)
                tally.add_numbers(moments)
    there = numbers[~np.isnan(numbers)]
    tally.seen += len(there) + int(words.sum())
    tally.missing += len(cells) - len(there) - int(words.sum())
    tally.add_numbers(there)


def read_table(
    path: Path, drop: Sequence[str] = (), bounds: Sequence[str] = (), target: Sequence[str] = ()
) -> tuple[np.ndarray, np.ndarray, tuple[Column, ...]]:
    """The complete rows of a table (N, D), the incomplete ones with NaN, and its columns; empty rows are left out.

    With `target` columns, which are to be predicted, the others are columns that are given.
    """
    columns = with_bounds(scan(path, drop, target), parsed_bounds(bounds), path)
    if target:
        columns = tuple(column if column.name in target else as_given(column) for column in columns)
    none = np.empty((0, len(columns)), np.float32)
    complete, incomplete = [none], [none]
    for batch in TableFile(path).batches([column.name for column in columns]):
        rows = encode(batch, columns, path).rows
        missing = np.isnan(rows)
        complete.append(rows[~missing.any(1)])
        incomplete.append(rows[missing.any(1) & ~missing.all(1)])
    return np.concatenate(complete), np.concatenate(incomplete), columns
