"""The kinds of columns: what their cells are, and the numbers that a network sees instead of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from nicest.data.cells import MOMENT, as_cells, as_numbers_of, as_places, has_pyarrow, parse_number
from nicest.messages import listed, shown

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
        if self.numeric and not np.isfinite(self.values).all():
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
        places = np.interp(numbers, known, np.arange(len(known))).round()
        near = known[np.nan_to_num(places).astype(int)]
        # a float32 of the value is the value; neighbours stay apart
        slack = np.minimum(SINGLE * np.abs(near), 1e-3 * np.min(np.diff(known), initial=math.inf))
        with np.errstate(invalid="ignore"):
            found: np.ndarray = np.where(np.abs(numbers - near) > slack, np.copysign(np.inf, numbers), places)
        return found

    def plain(self, codes: np.ndarray) -> np.ndarray:
        values = np.array(self.values, dtype=np.float64 if self.numeric else object)
        cells = values[np.nan_to_num(codes).round().clip(0, len(values) - 1).astype(int)]
        cells[np.isnan(codes)] = np.nan if self.numeric else None
        return cells

    def head(self) -> Head:
        if not self.numeric:
            return Head(categories=len(self.values))
        values = np.array(self.values) / (np.abs(self.values).max() or 1.0)
        values = (values - values.mean()) / (values.std() or 1.0)
        return Head(categories=len(values), values=tuple(values.tolist()))

    def parse(self, text: str) -> float:
        """Encode a value; a number between two categories lies halfway between their codes."""
        if self.numeric:
            number = parse_number(text, self.type)
            code = float(self.encode(np.array([number]))[0])
            return code if math.isfinite(code) else float(np.searchsorted(self.values, number)) - 0.5
        value: str | bool = text
        if isinstance(self.values[0], bool):
            if text.lower() not in ("true", "false"):
                raise ValueError("true or false")
            value = text.lower() == "true"
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
        if not 0 <= (self.decimals or 0) <= 15 or (self.step > 0) < isinstance(self, Integer):
            raise ValueError("no such steps or decimals")
        if isinstance(self, Real) and self.step:
            raise ValueError("steps of continuous numbers")

    @property
    def constant(self) -> bool:
        return self.low == self.high

    @property
    def discrete(self) -> bool:
        return self.step > 0

    @property
    def bounds(self) -> tuple[float, float]:
        """Floor and ceiling, infinite where there is none."""
        low, high = self.floor, self.ceiling
        return -math.inf if low is None else low, math.inf if high is None else high

    def code(self, numbers: Any) -> Any:
        """Encode numbers without any check."""
        return (numbers - self.offset) / self.scale

    def encode(self, cells: Any) -> np.ndarray:
        numbers = as_numbers_of(cells, self.type)
        with np.errstate(all="ignore"):
            for exact in {*self.spikes, *self.bounds, *([self.low] if self.constant else [])}:  # cells may be float32
                numbers = np.where(
                    np.abs(numbers - exact) <= min(SINGLE * abs(exact), SINGLE * self.scale), exact, numbers
                )
            codes = self.code(numbers)
            unusable = (numbers < self.bounds[0]) | (numbers > self.bounds[1])
            if self.constant:
                unusable |= (numbers < self.low) | (numbers > self.low)
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
            numbers = _without_noise(numbers, np.spacing(np.abs(codes)).astype(float) * self.scale)
        numbers = self._rounded(numbers).clip(*self.bounds)
        for spike in self.spikes:  # float32 may not hold its last digits
            numbers = np.where(np.float32(codes) == np.float32(self.code(spike)), spike, numbers)
        return numbers + 0.0  # -0.0 becomes 0.0

    def _rounded(self, numbers: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = numbers * 10.0 ** (self.decimals or 0)
            fits = np.abs(scaled) < (0 if self.decimals is None else INTEGERS)
            return np.where(fits, scaled.round() / 10.0 ** (self.decimals or 0), numbers)

    def head(self) -> Head:
        low, high = map(self.code, self.bounds)
        atoms, step = self.code(np.array(self.spikes)), self.step / self.scale
        if step:
            atoms = (atoms / step).round() * step
            low = math.ceil(low / step - OFF_GRID) * step if math.isfinite(low) else low
            high = math.floor(high / step + OFF_GRID) * step if math.isfinite(high) else high
        return Head(step=step, atoms=tuple(atoms.tolist()), low=low, high=high, knots=self.knots, scale=self.scale)

    def parse(self, text: str) -> float:
        """Encode a number, which may lie between two steps."""
        return float(self.code(parse_number(text, self.type)))

    def plausible(self, codes: np.ndarray) -> np.ndarray:
        """Clip drawn values: steps to the range of training, others to 0 if no number of training is negative."""
        low, high = (self.low, self.high) if self.step else (0.0 if self.low >= 0 else -math.inf, math.inf)
        return codes.clip(*np.array([self.code(low), self.code(high)], codes.dtype))

    def extent(self) -> str:
        low, high = self.domain
        if MOMENT.search(self.type):
            first, last = (
                as_cells(np.array([self.low, self.high]), np.zeros(2, bool), self.type).cast("string").to_pylist()
            )
        else:
            first, last = f"{low:.15g}", f"{high:.15g}"
        if self.step or self.constant or MOMENT.search(self.type):
            return f"holds {first} to {last}" + (f", in steps of {self.step:g}" if self.step else "")
        return f"has no values below {first}" + (f" or above {last}" if math.isfinite(high) else "")

    @property
    def domain(self) -> tuple[float, float]:
        """Range in which a condition may ask for numbers: that of training for steps, else the bounds."""
        if self.step or self.constant:
            return self.low, self.high
        return max(self.bounds[0], 0.0 if self.low >= 0 else -math.inf), self.bounds[1]


@dataclass(frozen=True)
class Real(Number):
    """Continuous numbers."""


@dataclass(frozen=True)
class Integer(Number):
    """Whole steps: integers, or decimals on a grid such as 0.05, 0.1, 0.15."""


@dataclass(frozen=True)
class Moment(Number):
    """Dates, times and spans of time, as the numbers that Arrow stores."""


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _without_noise(numbers: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Round numbers to the decimals that float32 holds, given the distance of its neighbouring values."""
    with np.errstate(all="ignore"):
        power = 10.0 ** np.ceil(np.log10(noise))  # of the last digit that counts
        many = (1 / power).round()
        rounded = np.where(power < 1, (numbers * many).round() / many, (numbers / power).round() * power)
        return np.where((power > 1e-15) & (power < 1e15), rounded, numbers)
