"""The data's side of the codec: from stored rows to points of a grid, and back; what a value may be drawn from goes to
a stack of bits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nicest.flows import Units
from nicest.inference.stack import Damaged, StackGrid, fixed

FINER, COARSER = 10, 4  # bits by which the grid of a dequantised pixel is finer than its level; without a first layer
CELL_BITS, FINEST = 18, 34  # bits after the point of the columns of a table: as the first layer sees them, and at first
NEAR = (1 << 3, 1 << 10, 1 << 20, 1 << 40)  # floats about a guess, among which the first at a point is looked for
MISSING = np.iinfo(np.int64).min


class Cells(ABC):
    """Rows (n, D) of whole numbers, as points of a grid of 2^-fine."""

    fine: int
    dtype: np.dtype[Any]

    @abstractmethod
    def to_grid(self, rows: np.ndarray, grid: StackGrid) -> Tensor:
        """A point in the interval of each value, drawn by bits from the stack."""

    @abstractmethod
    def from_grid(self, i: Tensor, grid: StackGrid, missing: np.ndarray | None) -> np.ndarray:
        """The rows that `to_grid` took to i, of which the bits go back to the stack."""

    @property
    @abstractmethod
    def among(self) -> tuple[int, int]:
        """Between which points all values lie."""

    @abstractmethod
    def example(self) -> np.ndarray:
        """A row."""


class Levels(Cells):
    """Grey levels."""

    def __init__(self, units: Units, *, plain: bool, bits: int, device: torch.device) -> None:
        """`plain`: no layer comes before those on the grid of 2^-bits."""
        low, high = units.interval
        self.dim, self.levels = units.dim, units.levels
        wide = math.ceil(math.log2(units.levels / (high - low)))
        self.fine = bits if plain and wide + COARSER <= bits else wide + FINER
        edges = units.place(torch.arange(units.levels + 1.0, dtype=torch.float64)[:, None].expand(-1, units.dim))
        self.edges = (edges[:, 0] * 2.0**self.fine).round().long().to(device)
        self.ends = int(self.edges[0]), int(self.edges[-1])
        steps = set(self.edges.diff().tolist())
        step = steps.pop() if len(steps) == 1 else 0
        self.shift = step.bit_length() - 1 if 1 < step < 1 << 13 and not step & (step - 1) else 0  # levels of 2^shift
        self.dtype = np.dtype(np.uint8 if units.levels <= 256 else np.uint16).newbyteorder("<")

    def to_grid(self, rows: np.ndarray, grid: StackGrid) -> Tensor:
        level = torch.from_numpy(rows if rows.itemsize == 1 else rows.astype(np.int32)).to(self.edges.device).long()
        if self.shift:
            noise = grid.stack.pop_from(fixed(self.shift), rows.shape).to(level.device)
            return (level << self.shift).add_(self.ends[0]).add_(noise)
        i = self.edges[level]
        return i + grid.stack.pop(self.edges[level + 1] - i)

    def from_grid(self, i: Tensor, grid: StackGrid, missing: np.ndarray | None) -> np.ndarray:
        grid.require_below(i, self.among[1], least=self.among[0])
        if self.shift:
            i = i - self.ends[0]
            level = i >> self.shift
            grid.stack.push_to(fixed(self.shift), i.bitwise_and_((1 << self.shift) - 1))
        else:
            level = torch.searchsorted(self.edges, i, right=True) - 1
            first = self.edges[level]
            grid.stack.push(i - first, self.edges[level + 1] - first)
        return level.to(torch.uint8 if self.dtype.itemsize == 1 else torch.int32).cpu().numpy().astype(self.dtype)

    @property
    def among(self) -> tuple[int, int]:
        return self.ends

    def example(self) -> np.ndarray:
        return np.zeros((1, self.dim), self.dtype)


class Grain(NamedTuple):
    """What a whole number k of a column is.

    `decimals` None: k steps, or the k-th category, as the model counts them. `decimals` p: the number k 10^-p. -1: the
    k-th number of float64, counted from 0. `origin` is taken off a number before the model sees it.
    """

    decimals: int | None = None
    origin: float = 0.0

    def numbers(self, k: np.ndarray) -> np.ndarray:
        """The numbers that k stands for."""
        if self.decimals is None or self.decimals >= 0:
            return k.astype(np.float64) / 10.0 ** (self.decimals or 0)
        return _flipped(k).view(np.float64)

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """The k nearest to numbers."""
        if self.decimals is None or self.decimals >= 0:
            near = numbers * 10.0 ** (self.decimals or 0)
            return np.where(np.abs(near) < 2.0**53, near, 0.0).round().astype(np.int64)
        return _flipped(np.ascontiguousarray(numbers, dtype=np.float64).view(np.int64))

    def exact(self, numbers: np.ndarray) -> np.ndarray:
        """Which numbers are those of their nearest k, bit for bit."""
        found: np.ndarray = self.numbers(self.places(numbers)).view(np.int64) == numbers.view(np.int64)
        return found


def _flipped(k: np.ndarray) -> np.ndarray:
    """The bits of floats in an order that rises with them, or back: those of negative ones are turned over."""
    found: np.ndarray = np.where(k < 0, k ^ np.int64(np.iinfo(np.int64).max), k)
    return found


class Table(Cells):
    """Cells of a table, each a whole number by the `Grain` of its column, or `MISSING`.

    A value has an interval of the real line: that of its atom or its step, or what lies nearer to it than to other
    numbers of so many decimals. In a column of floats a value has a cell of the grid, and its place among the floats in
    it is coded by equal probabilities. A missing cell is drawn from where the column has its mass: its bits come back.
    """

    fine, dtype = CELL_BITS, np.dtype("<i8")

    def __init__(self, units: Units, grains: Sequence[Grain]) -> None:
        self.units, self.grains = units, tuple(grains)
        low, high = units.box()
        self.low, self.high = low[0].double(), high[0].double()
        inner = torch.where(self.low.isfinite(), self.low, -1.0)
        outer = torch.where(self.low.isfinite() & self.high.isfinite(), self.high, 1.0)
        self.anywhere = self._point(torch.stack([inner, outer]))
        self.floats = [d for d, grain in enumerate(self.grains) if grain.decimals == -1]
        self.origins = np.array([self.grains[d].origin for d in self.floats])

    def to_grid(self, rows: np.ndarray, grid: StackGrid) -> Tensor:
        missing = rows == MISSING
        low, high = self._spans(np.where(missing, 0, rows), missing)
        grid.require((high > low) & (high - low < 1 << 36) & (low.abs() < 1 << 45) & (high.abs() < 1 << 45))
        i = low + grid.stack.pop(high - low)
        found, rest, size = self._at(i, rows)
        grid.require(torch.from_numpy((found == rows) | missing))
        if self.floats:
            some = torch.from_numpy(~missing[:, self.floats])
            grid.require(((size > 0) & (size < 1 << 60)) | ~some)
            grid.stack.push_wide(rest[some], size[some])
        grid.stack.push_to(fixed(FINEST - CELL_BITS), i & ((1 << (FINEST - CELL_BITS)) - 1))
        return i >> (FINEST - CELL_BITS)

    def from_grid(self, i: Tensor, grid: StackGrid, missing: np.ndarray | None) -> np.ndarray:
        missing = np.zeros(i.shape, dtype=bool) if missing is None else missing
        i = (i.cpu() << (FINEST - CELL_BITS)) + grid.stack.pop_from(fixed(FINEST - CELL_BITS), i.shape)
        rows, first, size = self._at(i, None)
        if self.floats:
            some = torch.from_numpy(~missing[:, self.floats])
            if bool((size[some] < 1).any()):
                raise Damaged
            part = torch.from_numpy(rows[:, self.floats])
            part[some] = first[some] + grid.stack.pop_wide(size[some])
            rows[:, self.floats] = part.numpy()
        low, high = self._spans(np.where(missing, 0, rows), missing)
        if bool(((i < low) | (i >= high)).any()):
            raise Damaged
        grid.stack.push(i - low, high - low)
        rows[missing] = MISSING
        return rows

    @property
    def among(self) -> tuple[int, int]:
        return -(1 << 40), 1 << 40

    def example(self) -> np.ndarray:
        return np.full((1, self.units.dim), MISSING)

    def _codes(self, k: np.ndarray, off: float = 0.0) -> Tensor:
        """The model's numbers of k + off; off is of columns with decimals."""
        columns = []
        for d, grain in enumerate(self.grains):
            numbers = grain.numbers(k[:, d])
            if grain.decimals is not None and grain.decimals >= 0:
                numbers = (k[:, d].astype(np.float64) + off) / 10.0**grain.decimals
            columns.append(numbers - grain.origin)
        return torch.from_numpy(np.stack(columns, 1))

    def _spans(self, k: np.ndarray, missing: np.ndarray) -> tuple[Tensor, Tensor]:
        """From which point to which an interval goes."""
        x = self._codes(k)
        y0, y1 = (self.units.enter(x, noise=torch.full_like(x, u)).double() for u in (0.0, 1.0))
        low, high = self._point(y0), self._point(y1)
        free = y0 == y1  # of a density, neither an atom nor a step
        near, far = (
            self._point(self.units.enter(self._codes(k, off), noise=torch.zeros_like(x)).double())
            for off in (-0.5, 0.5)
        )
        lattice = torch.tensor([grain.decimals is not None and grain.decimals >= 0 for grain in self.grains])
        low, high = torch.where(free & lattice, near, low), torch.where(free & lattice, far, high)
        if self.floats:
            floats = torch.tensor([grain.decimals == -1 for grain in self.grains])
            one = self._point(y0, inside=True)
            low, high = torch.where(free & floats, one, low), torch.where(free & floats, one + 1, high)
        gone = torch.from_numpy(missing)
        return torch.where(gone, self.anywhere[0], low), torch.where(gone, self.anywhere[1], high)

    def _point(self, y: Tensor, *, inside: bool = False) -> Tensor:
        """The first point whose middle is not below y, or the one that y is inside of."""
        at = torch.maximum(torch.minimum(y, self.high), self.low) * 2.0**FINEST
        at = at.floor() if inside else (at - 0.5).ceil()
        return at.nan_to_num(0.0).clamp(-(2.0**50), 2.0**50).long()

    def _at(self, i: Tensor, rows: np.ndarray | None) -> tuple[np.ndarray, Tensor, Tensor]:
        """The value of each point; of floats also the first that lies there, or the place of those given among them,
        and how many there are."""
        y = (i.double() + 0.5) * 2.0**-FINEST
        x = self.units.leave(y.to(self.units.scale)).double().numpy()
        columns = [grain.places(x[:, d] + grain.origin) for d, grain in enumerate(self.grains)]
        found = np.stack(columns, 1)
        if not self.floats:
            empty = torch.empty((len(i), 0), dtype=torch.long)
            return found, empty, empty
        own = i[:, self.floats]
        first, last = np.split(self._floats_from(torch.cat([own, own + 1])), 2)
        atom, k = first == last, found[:, self.floats]  # a point of an atom has no floats
        size = torch.from_numpy(np.where(atom, 1, last - first))
        if rows is None:
            return found, torch.from_numpy(np.where(atom, k, first)), size
        given = rows[:, self.floats]
        found[:, self.floats] = np.where((given >= first) & (given < last), given, k)
        return found, torch.from_numpy(np.where(atom, 0, given - first)), size

    def _floats_from(self, i: Tensor) -> np.ndarray:
        """The first float, as its place, whose point is i or a later one, in each column of floats; by bisection."""
        floats, wanted, x = Grain(-1), i.numpy(), torch.zeros((len(i), self.units.dim), dtype=torch.float64)

        def reached(k: np.ndarray) -> np.ndarray:
            x[:, self.floats] = torch.from_numpy(floats.numbers(k) - self.origins)
            point = self._point(self.units.place(x).double(), inside=True)[:, self.floats]
            found: np.ndarray = point.numpy() >= wanted
            return found

        most = int(floats.places(np.array([np.finfo(np.float64).max]))[0])
        low, high = np.full(i.shape, -most, np.int64), np.full(i.shape, most, np.int64)
        x[:, self.floats] = i.double() * 2.0**-FINEST
        guess = floats.places(self.units.leave(x).double().numpy()[:, self.floats] + self.origins).clip(-most, most)
        for near in NEAR:
            for k in ((guess - near).clip(-most), (guess + near).clip(max=most)):
                there = reached(k)
                low, high = np.where(there, low, np.maximum(low, k + 1)), np.where(there, np.minimum(high, k), high)
            low = np.minimum(low, high)
            if ((high >> 1) - (low >> 1) <= near).all():
                break
        while (low < high).any():
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            there = reached(middle)
            low, high = np.where(there, low, middle + 1), np.where(there, middle, high)
        return low
