"""The columns of a table: what the cells of each mean, and the numbers that a network sees instead of them."""

from __future__ import annotations

import json
import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from nicest.data.cells import MOMENT, Unfit, as_cells, as_numbers_of, as_places, has_pyarrow, parse_number
from nicest.errors import NicestError
from nicest.messages import brief, listed, nearest, shown

SINGLE = 2.0**-23  # relative distance of neighbouring float32 numbers
OFF_GRID = 0.01  # steps by which a decimal may lie off its grid, such as 0.8226 between -0.177 and 1.823
INTEGERS = 2.0**53  # up to here float64 holds every integer


class Head(NamedTuple):
    """What the encoded values of a column can be: all that a network knows of it.

    Attributes
    ----------
    categories : int
        If positive, values are 0..categories-1, each with a probability.
    values : tuple of float
        Standardised number of each category, for categories with an order; else empty.
    step : float
        If positive, values are multiples of `step`, each with a probability.
    atoms : tuple of float
        Increasing values with a probability of their own, next to the density.
    low, high : float
        No value lies below or above; multiples of `step` if there is one.
    knots : tuple of float
        Increasing quantiles at which an input feature bends.
    scale : float
        One encoded unit in the column's own unit: log-densities subtract log(scale).
    """

    categories: int = 0
    values: tuple[float, ...] = ()
    step: float = 0.0
    atoms: tuple[float, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    knots: tuple[float, ...] = ()
    scale: float = 1.0


@dataclass(frozen=True)
class Column(ABC):
    """A column of a table: its name, and Arrow's name for the type of its cells."""

    name: str
    type: str

    def __post_init__(self) -> None:
        """Check the fields, which may come from a file; raise a ValueError."""
        for each in fields(self):
            value, kind = getattr(self, each.name), str(each.type)
            if kind == "str":
                sound = isinstance(value, str)
            elif kind == "tuple[float, ...]":
                sound = isinstance(value, tuple) and all(map(_finite, value)) and list(value) == sorted(set(value))
            else:
                sound = kind.startswith("tuple") or _finite(value) or (value is None and "None" in kind)
            if not sound:
                raise ValueError(f"{each.name} is {shown(value, 40)}")

    @property
    @abstractmethod
    def constant(self) -> bool:
        """True if the column has one value only, which gets probability 1."""

    @property
    @abstractmethod
    def discrete(self) -> bool:
        """True if every value has a probability; False if the column has a density, with atoms or without."""

    @abstractmethod
    def encode(self, cells: Any) -> np.ndarray:
        """Encode cells, (N,), of Arrow or numpy.

        Returns
        -------
        numpy.ndarray
            (N,) float64: NaN for a missing cell; plus or minus infinity for a value that the column cannot have:
            an unseen category, a number between the steps or beyond the bounds, another value of a constant column.

        Raises
        ------
        Unfit
            If the cells are of another type than those of training.
        """

    @abstractmethod
    def plain(self, codes: np.ndarray) -> np.ndarray:
        """Decode to (N,) float64 numbers with NaN, or to objects with None; dates and times are numbers."""

    @abstractmethod
    def head(self) -> Head:
        """Return what the encoded values can be."""

    @abstractmethod
    def parse(self, text: str) -> float:
        """Encode the value of a condition; raise a ValueError with the kind of value that was expected."""

    @abstractmethod
    def extent(self) -> str:
        """Describe the values of the column in words: "holds 'a', 'b'"."""

    def decode(self, codes: np.ndarray) -> Any:
        """Decode (N,) encoded values to cells like those of training: Arrow's, or numpy's where pyarrow is absent."""
        plain = self.plain(codes)
        return as_cells(plain, np.isnan(codes), self.type) if has_pyarrow() else plain


@dataclass(frozen=True)
class Category(Column):
    """One of several texts, booleans or numbers; encoded as its index in `values`, which is sorted."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = {type(each) for each in self.values}
        if kinds not in ({str}, {bool}, {float}) or list(self.values) != sorted(set(self.values)):
            raise ValueError("no such values")
        if self.numeric and not all(map(math.isfinite, self.values)):
            raise ValueError("no such values")

    @property
    def numeric(self) -> bool:
        """True if the categories are numbers, which have an order."""
        return isinstance(self.values[0], float)

    @property
    def constant(self) -> bool:
        return len(self.values) == 1

    @property
    def discrete(self) -> bool:
        return True

    def encode(self, cells: Any) -> np.ndarray:
        if not self.numeric:
            return as_places(cells, self.values)
        numbers, known = as_numbers_of(cells, self.type), np.array(self.values)
        places = self._position(numbers).round()
        near = known[np.nan_to_num(places).astype(int)]
        # a float32 of the value is the value; neighbours stay apart
        slack = np.minimum(SINGLE * np.abs(near), 1e-3 * np.min(np.diff(known), initial=math.inf))
        with np.errstate(invalid="ignore"):
            return np.where(np.abs(numbers - near) > slack, np.copysign(np.inf, numbers), places)

    def _position(self, numbers: np.ndarray) -> np.ndarray:
        """Interpolate the indices of the values; NaN stays NaN."""
        return np.interp(numbers, self.values, np.arange(len(self.values)))

    def plain(self, codes: np.ndarray) -> np.ndarray:
        places = np.nan_to_num(codes).round().clip(0, len(self.values) - 1).astype(int)
        if self.numeric:
            return np.where(np.isnan(codes), np.nan, np.array(self.values)[places])
        return np.where(np.isnan(codes), None, np.array(self.values, dtype=object)[places])

    def head(self) -> Head:
        values = np.array(self.values) if self.numeric else np.empty(0)
        largest = np.abs(values).max(initial=0.0) or 1.0
        values = values / largest - (values / largest).mean() if len(values) else values
        values = values / (values.std() or 1.0) if len(values) else values
        return Head(categories=len(self.values), values=tuple(values.tolist()))

    def parse(self, text: str) -> float:
        """Encode a value; a number between two categories lies halfway between their codes."""
        if self.numeric:
            number = parse_number(text, self.type)
            code = float(self.encode(np.array([number]))[0])
            return code if math.isfinite(code) else float(np.searchsorted(self.values, number)) - 0.5
        if isinstance(self.values[0], bool):
            if text.lower() not in ("true", "false"):
                raise ValueError("true or false")
            value: Any = text.lower() == "true"
        else:
            value = text
        return float(self.values.index(value)) if value in self.values else -0.5

    def extent(self) -> str:
        return f"holds {listed(self.values)}"


@dataclass(frozen=True)
class Number(Column):
    """A column of numbers x, encoded as (x - offset) / scale; abstract.

    Attributes
    ----------
    low, high : float
        Least and largest number of training.
    offset, scale : float
        About the mean and the standard deviation, without the outliers.
    step : float
        If positive, every number is `offset` plus a multiple of `step`.
    decimals : int or None
        Most decimals of a number of training; None: more than 15.
    spikes : tuple of float
        Numbers so frequent that each has a probability of its own.
    floor, ceiling : float or None
        No number can lie below or above.
    knots : tuple of float
        Quantiles of the encoded numbers.
    """

    low: float
    high: float
    offset: float = 0.0
    scale: float = 1.0
    step: float = 0.0
    decimals: int | None = None
    spikes: tuple[float, ...] = ()
    floor: float | None = None
    ceiling: float | None = None
    knots: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        floor, ceiling = self.bounds
        if not (floor <= self.low <= self.high <= ceiling and self.scale > 0 <= self.step):
            raise ValueError("no such numbers")
        if self.decimals is not None and not 0 <= self.decimals <= 15:
            raise ValueError("no such decimals")

    @property
    def constant(self) -> bool:
        return self.low == self.high

    @property
    def discrete(self) -> bool:
        return self.step > 0

    @property
    def bounds(self) -> tuple[float, float]:
        """Floor and ceiling, infinite where there is none."""
        return (
            -math.inf if self.floor is None else self.floor,
            math.inf if self.ceiling is None else self.ceiling,
        )

    def code(self, numbers: Any) -> Any:
        """Encode numbers without any check."""
        return (numbers - self.offset) / self.scale

    def encode(self, cells: Any) -> np.ndarray:
        numbers = as_numbers_of(cells, self.type)
        floor, ceiling = self.bounds
        with np.errstate(all="ignore"):
            codes = self.code(numbers)
            unusable = (numbers < floor) | (numbers > ceiling)
            if self.constant:
                unusable |= np.abs(numbers - self.low) > SINGLE * abs(self.low)
                codes = np.where(unusable | np.isnan(codes), codes, 0.0)
            elif self.step:
                counts = (numbers - self.offset) / self.step
                slack = OFF_GRID if self.decimals != 0 else 1e-6 + np.minimum(SINGLE * np.abs(counts), OFF_GRID)
                unusable |= np.abs(counts - counts.round()) > slack
                codes = counts.round() * (self.step / self.scale)
        return np.where(unusable, np.copysign(np.inf, codes), codes)

    def plain(self, codes: np.ndarray) -> np.ndarray:
        exact = codes.astype(np.float64)
        if self.step:
            return self._rounded(self.offset + (exact * (self.scale / self.step)).round() * self.step)
        numbers = exact * self.scale + self.offset
        if codes.dtype == np.float32:
            numbers = _without_noise(numbers, np.abs(exact) * SINGLE * self.scale)
        numbers = self._rounded(numbers).clip(*self.bounds)
        for spike in self.spikes:  # float32 may not hold its last digits
            numbers = np.where(np.float32(codes) == np.float32(self.code(spike)), spike, numbers)
        return numbers

    def _rounded(self, numbers: np.ndarray) -> np.ndarray:
        if self.decimals is None:
            return numbers
        power = 10.0**self.decimals
        with np.errstate(invalid="ignore", over="ignore"):
            return np.where(np.abs(numbers) * power < INTEGERS, (numbers * power).round() / power, numbers)

    def head(self) -> Head:
        step = self.step / self.scale
        low, high = map(self.code, self.bounds)
        if step:  # a little slack: a bound may be a grid point itself
            low, high = (
                each if math.isinf(each) else inward(each / step + sign * 1e-6) * step
                for each, inward, sign in ((low, math.ceil, -1), (high, math.floor, 1))
            )
        atoms = tuple(float(self.code(each)) for each in self.spikes)
        return Head(step=step, atoms=atoms, low=low, high=high, knots=self.knots, scale=self.scale)

    def number(self, text: str) -> float:
        """Return the number that a text stands for; raise a ValueError with what was expected."""
        return parse_number(text, self.type)

    def parse(self, text: str) -> float:
        """Encode a number, which may lie between two steps."""
        return float(self.code(self.number(text)))

    def plausible(self, codes: np.ndarray) -> np.ndarray:
        """Clip drawn values: steps to the range of training, others to 0 if no number of training is negative."""
        low, high = (self.low, self.high) if self.step else (0.0 if self.low >= 0 else -math.inf, math.inf)
        return codes.clip(*np.array([self.code(low), self.code(high)], codes.dtype))

    def extent(self) -> str:
        if self.step or self.constant or MOMENT.search(self.type):
            ends = [self.low, self.high]
            if MOMENT.search(self.type):
                found = as_cells(np.array(ends), np.zeros(2, bool), self.type).cast("string").to_pylist()
            else:
                found = [f"{each:.15g}" for each in ends]
            steps = f", in steps of {self.step:g}" if self.step else ""
            return f"holds {found[0]} to {found[1]}{steps}"
        low, high = self.domain
        above = f" or above {high:g}" if math.isfinite(high) else ""
        return f"has no values below {low:g}{above}"

    @property
    def domain(self) -> tuple[float, float]:
        """Range in which a condition may ask for numbers: that of training for steps, else the bounds."""
        if self.step or self.constant:
            return self.low, self.high
        return max(self.bounds[0], 0.0 if self.low >= 0 else -math.inf), self.bounds[1]


@dataclass(frozen=True)
class Real(Number):
    """Continuous numbers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step:
            raise ValueError("a step of continuous numbers")


@dataclass(frozen=True)
class Integer(Number):
    """Whole steps: integers, or decimals on a grid such as 0.05, 0.1, 0.15."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.step:
            raise ValueError("no step")


@dataclass(frozen=True)
class Moment(Number):
    """Dates, times and spans of time, as the numbers that Arrow stores."""


KINDS: dict[str, type[Column]] = {"real": Real, "integer": Integer, "category": Category, "moment": Moment}


class Schema(tuple[Column, ...]):
    """The columns of a table, in order."""

    def __new__(cls, columns: Iterable[Column] = ()) -> Self:
        return super().__new__(cls, columns)

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
                raise NicestError(
                    f"{source}: expected {error.expected} in column {shown(column.name)}, as in training,"
                    f" got {error.found}"
                ) from error
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
        missing, extra = (
            [name for name in self.names if name not in have],
            [name for name in names if name not in known],
        )
        if missing:
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

    def plausible(self, rows: np.ndarray) -> np.ndarray:
        """Clip drawn rows (N, D) to what training holds: see `Number.plausible`."""
        parts = [
            column.plausible(rows[:, i]) if isinstance(column, Number) else rows[:, i] for i, column in enumerate(self)
        ]
        return np.stack(parts, axis=1) if parts else rows

    def to_json(self) -> list[dict[str, Any]]:
        """Return plain dictionaries for a JSON file."""
        kinds = {kind: name for name, kind in KINDS.items()}
        rows = [{"kind": kinds[type(column)]} | asdict(column) for column in self]
        return [
            {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in row.items()
                if value not in ((), None)
            }
            for row in rows
        ]

    @classmethod
    def from_json(cls, rows: Any, source: Path | str) -> Schema:
        """Restore what `to_json` returned; raise a NicestError if it is something else."""
        try:
            columns = [_column(dict(row)) for row in rows]
            if len({column.name for column in columns}) < len(columns) or not isinstance(rows, list):
                raise ValueError("a name comes twice")
        except (TypeError, ValueError, KeyError, LookupError, AttributeError, OverflowError) as error:
            raise NicestError(
                f"{source}: expected the columns of a table, got something else ({brief(error)})"
            ) from error
        return cls(columns)


def _column(row: dict[str, Any]) -> Column:
    kind = KINDS[row.pop("kind")]
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    tuples = {"values", "spikes", "knots"} & found.keys()
    if not all(isinstance(found[name], tuple) for name in tuples):
        raise ValueError("there is no list")
    plain = {name for each in fields(kind) if each.type in ("float", "float | None") for name in [each.name]}
    return kind(
        **{name: float(value) if name in plain and value is not None else value for name, value in found.items()}
    )


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _without_noise(numbers: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Round numbers to the decimals that lie above the rounding error of float32."""
    with np.errstate(all="ignore"):
        power = 10.0 ** np.floor(np.log10(noise))  # of the last digit that counts
        many = (1 / power).round()
        rounded = np.where(power < 1, (numbers * many).round() / many, (numbers / power).round() * power)
        return np.where((power > 1e-15) & (power < 1e15), rounded, numbers)


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
