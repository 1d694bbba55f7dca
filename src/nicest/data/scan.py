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
NEAR = 0.1  # see `Tally._ends_at`
FEW = 20  # different numbers in a column of fractions that is not continuous, each in ten rows or more
FINEST = 1 << 20  # steps across a column of whole numbers: where there are more, they do not matter
LONGEST = 1000  # characters of a text
SMALLEST, LARGEST = 1e-30, 1e30  # across a continuous column, that float32 holds it


@dataclass
class Tally:
    """What was seen of one column."""

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
    sample: np.ndarray = field(default_factory=lambda: np.empty(0))  # the first cells
    common: Counter[float] = field(default_factory=Counter)  # of those that come often among them, how often in all
    rising: bool = True  # every number exceeds the one before it

    def add_numbers(self, numbers: np.ndarray) -> None:
        """Take note of cells, missing ones left out."""
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
        if len(self.numbers) <= FEW:
            self.numbers |= set(np.unique(numbers)[: FEW + 1].tolist())
        if not len(self.sample):
            self.sample = numbers
            values, counts = np.unique(numbers, return_counts=True)
            often = np.argsort(-counts, kind="stable")[: 2 * MOST_SPIKES]
            self.common.update({float(values[i]): 0 for i in often if counts[i] >= COMMON / 2 * len(numbers)})
        for value in self.common:
            self.common[value] += int((numbers == value).sum())

    def column(self, path: Path) -> Column:
        """The column, after all of it was seen."""
        where = f"column {shown(self.name)}"
        if not self.seen:
            raise NicestError(f"{path}: {where} is missing in all rows; {leave_out(self.name)}")
        if str(self.type) == "bool":
            return Column(self.name, "bool", "values", 0, 1, 1.0, (False, True))
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
        """The column with the spikes and the bounds that its cells show."""
        if column.values:
            return column
        often = [value for value, n in self.common.most_common(MOST_SPIKES) if n >= max(10, COMMON * self.seen)]
        spikes = tuple(sorted(often))
        low = 0.0 if self.low >= 0 and self._ends_at(0.0) else None
        capped = () if column.step else spikes  # of which nothing lies beyond
        low = self.low if low is None and self.low in capped else low
        high = 1.0 if low == 0 and self.high <= 1 and self._ends_at(1.0) else None
        high = self.high if high is None and low is not None and self.high in capped else high
        return replace(column, spikes=spikes, floor=low, ceiling=high)

    def _ends_at(self, bound: float) -> bool:
        """Whether the cells come so near to a bound that they end there, and do not merely run out before it.

        So it is if the hundredth of them which is nearest to it lies within a tenth of the way to their median.
        """
        away = np.abs(self.sample - bound)
        near, middle = np.quantile(away, [0.01, 0.5])
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
