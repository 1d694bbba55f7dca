"""What a column of a table is to a model, and how that is kept beside it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nicest.errors import NicestError
from nicest.messages import brief, listed, shown

Kind = Literal["real", "steps", "values"]


class Support(NamedTuple):
    """Which values columns have, in the numbers of the model; one entry for each column.

    steps       in which its numbers are whole, 0 where they are continuous
    atoms       values with a probability of their own: all of a category's, and spikes
    categories  whether its atoms are all it has
    unordered   whether these have no order, as texts have none
    bounds      the least and the largest value there can be, infinite where nothing says so
    """

    steps: tuple[float, ...]
    atoms: tuple[tuple[float, ...], ...]
    categories: tuple[bool, ...]
    unordered: tuple[bool, ...]
    bounds: tuple[tuple[float, float], ...]

    @property
    def most_atoms(self) -> int:
        """Of a column, and 1 at least where any is bounded; 0 where columns are plain numbers or whole steps."""
        return max(*map(len, self.atoms), int(any(math.isfinite(low) for low, _ in self.bounds)))


@dataclass(frozen=True)
class Column:
    """What the numbers of a column mean.

    real    a continuous number; the model has its density, in the column's own unit
    steps   whole steps of `step`, counted from `low`; the model has the probability of each count
    values  one of `values`, whose number is its place among them; the model has the probability of each

    `spikes` are numbers that come so often that each has a probability of its own, in a column of reals or steps.
    No value lies below `floor` or above `ceiling`, where the column has them. `type` is Arrow's name for the cells,
    which samples get back. `low` and `high` are of the rows of training; `low`, or `origin` where there is one, is
    taken off before the cells are rounded to float32.
    """

    name: str
    type: str
    kind: Kind
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0
    values: tuple[Any, ...] = ()
    origin: float | None = None
    spikes: tuple[float, ...] = ()
    floor: float | None = None
    ceiling: float | None = None

    @property
    def taken_off(self) -> float:
        return self.low if self.origin is None else self.origin

    @property
    def discrete(self) -> bool:
        return self.kind != "real"

    @property
    def constant(self) -> bool:
        """Whether a discrete column has one value: its probability is 1, and a density needs no such column."""
        return self.most == 0

    @property
    def most(self) -> float:
        """The largest whole number of the cells of training; none is where they are continuous."""
        if self.kind == "steps":
            return (self.high - self.low) / self.step
        return len(self.values) - 1 if self.values else math.inf

    @property
    def bounds(self) -> tuple[float, float]:
        """Where a missing cell may lie, in the numbers of the model: up to the end of the last whole number."""
        return (0.0, self.most + 1 - 1e-3) if self.discrete else self.limits

    @property
    def limits(self) -> tuple[float, float]:
        """Floor and ceiling, in the numbers of the model."""
        low = -math.inf if self.floor is None else self.code(self.floor)
        return low, math.inf if self.ceiling is None else self.code(self.ceiling)

    def code(self, value: Any) -> Any:
        """Encode a number, or an array of numbers, in steps from the offset of the column."""
        return (value - self.taken_off) / (self.step or 1.0)

    def outside(self, numbers: Any) -> Any:
        """Which numbers lie below the floor or above the ceiling."""
        low, high = (end if end is not None else sign * math.inf for end, sign in ((self.floor, -1), (self.ceiling, 1)))
        return (numbers < low) | (numbers > high)


def as_given(column: Column) -> Column:
    """A column that others are predicted from: texts and booleans stay what they are, all else is plain numbers."""
    if column.values and isinstance(column.values[0], str | bool):
        return column
    low, high = (column.values[0], column.values[-1]) if column.values else (column.low, column.high)
    return Column(column.name, column.type, "real", low, high, origin=column.origin)


def support(columns: Sequence[Column], targets: Sequence[int] = ()) -> Support:
    """Which values the columns have; with `targets`, the others are given, and nothing is said of them."""
    if targets:
        given = Column("", "double", "real")
        columns = [column if i in targets else given for i, column in enumerate(columns)]
    return Support(
        tuple(float(column.kind == "steps") for column in columns),
        tuple(
            tuple(map(float, range(len(column.values)))) or tuple(column.code(each) for each in column.spikes)
            for column in columns
        ),
        tuple(bool(column.values) for column in columns),
        tuple(isinstance(next(iter(column.values), 0), str) for column in columns),
        tuple(column.limits for column in columns),
    )


def parsed_bounds(texts: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Bounds by the names of their columns, from texts such as "0 <= age" or "0 <= share <= 1"."""
    found = {}
    for text in texts:
        low, name, *high = (each.strip() for each in text.split("<=")) if text.count("<=") in (1, 2) else ("", "")
        try:
            found[name] = (float(low), float(*high) if high else math.inf)
        except ValueError:
            raise NicestError(f'expected bounds such as "0 <= age" or "0 <= share <= 1", got {shown(text)}') from None
    return found


def with_bounds(
    columns: Sequence[Column], bounds: Mapping[str, tuple[float, float | None]], source: Path | str
) -> tuple[Column, ...]:
    """The columns, some with bounds that were given in place of those that their cells show."""
    if absent := sorted(map(str, bounds.keys() - {column.name for column in columns})):
        raise NicestError(f"{source}: found no column {listed(absent)} to bound")
    found = []
    for column in columns:
        if column.name in bounds:
            low, above = bounds[column.name]
            high = math.inf if above is None else above
            what = f"{source}: column {shown(column.name)}"
            if not (math.isfinite(low) and low < high):
                raise NicestError(f"{what}: expected a finite lower bound, and one above it or none, got {low}, {high}")
            if column.values:
                raise NicestError(f"{what} holds only {len(column.values)} distinct values, so bounds do not apply")
            if not low <= column.low <= column.high <= high:
                raise NicestError(
                    f"{what} has numbers from {column.low:g} to {column.high:g}, beyond its bounds {low:g} and {high:g}"
                )
            column = replace(column, floor=float(low), ceiling=float(high) if math.isfinite(high) else None)
        found.append(column)
    return tuple(found)


def leave_out(name: str) -> str:
    """What to do about a column, quoted as Python and a shell do."""
    if len(name) > 100:
        return "leave it out by data.drop"
    quoted = json.dumps([name], ensure_ascii=False)
    plain = "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in quoted)  # as TOML has it
    return f"leave it out: set {shlex.quote('data.drop=' + plain)}"


def require_columns(names: Sequence[str], columns: Sequence[Column], source: Path | str) -> list[str]:
    """Refuse a table without all columns of the training data, and return the names of its additional columns."""
    have, known = set(names), {column.name for column in columns}
    missing = [column.name for column in columns if column.name not in have]
    extra = [name for name in names if name not in known]
    if missing:
        more = f", and has {listed(extra)}, which it had not" if extra else ""
        raise NicestError(f"{source}: lacks {listed(missing)}, which training had{more}")
    return extra


def columns_to_json(columns: Sequence[Column]) -> list[dict[str, Any]]:
    rows = [vars(column) | {"values": list(column.values), "spikes": list(column.spikes)} for column in columns]
    return [{name: value for name, value in row.items() if value not in ([], None)} for row in rows]


def columns_from_json(rows: Any, source: str) -> tuple[Column, ...]:
    """What `columns_to_json` gave, checked."""
    try:
        if not isinstance(rows, list) or not all(
            isinstance(row.get(name, []), list) for row in rows for name in ("values", "spikes")
        ):
            raise ValueError("there is no list")
        lists = ("values", "spikes")
        columns = tuple(Column(**row | {name: tuple(row.get(name, ())) for name in lists}) for row in rows)
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
    numbers, kinds = (column.low, column.high, column.step, column.taken_off), {type(value) for value in column.values}
    if not (isinstance(column.name, str) and isinstance(column.type, str)):
        raise ValueError("names or types are missing")
    if not all(isinstance(each, int | float) and math.isfinite(float(each)) for each in numbers):
        raise ValueError("numbers are missing")
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
    ends = [each for each in (column.floor, column.ceiling) if each is not None]
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in (*column.spikes, *ends)):
        raise ValueError("no such spikes or bounds")
    if ends != sorted(ends) or (column.ceiling is not None and column.floor is None) or (ends and column.values):
        raise ValueError("no such bounds")
    if list(column.spikes) != sorted(set(column.spikes)) or (column.spikes and column.values):
        raise ValueError("no such spikes")
