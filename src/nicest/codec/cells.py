"""Convert rows of data to grid points and back: pixels, and the cells of a table.

A value owns an interval of the real line. Encoding draws a point in it with bits from the stack, and decoding returns
those bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nicest.codec.grid import ANYWHERE, BITS, LARGEST, Grid
from nicest.codec.stack import Corrupt, uniform
from nicest.flows import Units

FINER, COARSER = 10, 4  # binary digits of a pixel's grid beyond those of its level, with and without a first layer
CELL_BITS, FINEST = 18, 34  # binary digits of table cells: as the first layer reads them, and as they are drawn
SHIFT = FINEST - CELL_BITS
NEAR = (1 << 3, 1 << 10, 1 << 20, 1 << 40)  # distances from the guess at which the first float of a point is searched
MISSING = np.iinfo(np.int64).min


class PixelCells:
    """Grey levels as points k 2^-bits on a device.

    If `plain`, the flow has no elementwise first layer, so that pixels may lie on the grid of the layers.
    """

    def __init__(self, units: Units, *, plain: bool, device: torch.device) -> None:
        low, high = units.interval
        self.dim, levels = units.dim, units.levels
        level_bits = math.ceil(math.log2(levels / (high - low)))
        self.bits = BITS if plain and level_bits + COARSER <= BITS else level_bits + FINER
        edges = units.place(torch.arange(levels + 1.0, dtype=torch.float64)[:, None].expand(-1, self.dim))[:, 0]
        self.edges = (edges * 2.0**self.bits).round().long().to(device)
        self.limits = int(self.edges[0]), int(self.edges[-1])
        width, *others = set(self.edges.diff().tolist())
        # equal widths of 2^shift, which need no lookup
        self.shift = width.bit_length() - 1 if not others and 1 < width < 1 << 13 and not width & (width - 1) else 0
        self.dtype = np.dtype(np.uint8 if levels <= 256 else np.uint16).newbyteorder("<")
        self.example = np.zeros((1, self.dim), self.dtype)

    def to_grid(self, rows: np.ndarray, grid: Grid) -> Tensor:
        """Draw a point in the interval of each level; rows are (B, D)."""
        level = torch.from_numpy(rows if rows.itemsize == 1 else rows.astype(np.int32)).to(self.edges.device).long()
        if self.shift:
            noise = grid.stack.pop_from(uniform(self.shift), rows.shape).to(level.device)
            return (level << self.shift).add_(self.limits[0]).add_(noise)
        i = self.edges[level]
        return i + grid.stack.pop(self.edges[level + 1] - i)

    def from_grid(self, i: Tensor, grid: Grid, missing: np.ndarray) -> np.ndarray:
        """Return the levels of points, and the bits they were drawn with to the stack; `missing` is ignored."""
        grid.require_between(i, *self.limits)
        if self.shift:
            i = i - self.limits[0]
            level = i >> self.shift
            grid.stack.push_to(uniform(self.shift), i.bitwise_and_((1 << self.shift) - 1))
        else:
            level = torch.searchsorted(self.edges, i, right=True) - 1
            first = self.edges[level]
            grid.stack.push(i - first, self.edges[level + 1] - first)
        return level.to(torch.uint8 if self.dtype.itemsize == 1 else torch.int32).cpu().numpy().astype(self.dtype)


class Quantizer(NamedTuple):
    """The numbers that the integers k of a table column stand for.

    Parameters
    ----------
    decimals : int or None
        None: k steps, or category k, as the model counts them. p >= 0: the number k 10^-p. -1: float64 number k,
        counted from 0 in increasing order.
    offset : float
        Subtracted from a number before the model reads it.
    """

    decimals: int | None = None
    offset: float = 0.0

    @property
    def floats(self) -> bool:
        """True if every float64 has its own k."""
        return self.decimals == -1

    def numbers(self, k: np.ndarray) -> np.ndarray:
        """Return the numbers of k, as float64."""
        return _reorder(k).view(np.float64) if self.floats else k.astype(np.float64) / 10.0 ** (self.decimals or 0)

    def nearest(self, numbers: np.ndarray) -> np.ndarray:
        """Return the k nearest to numbers."""
        if self.floats:
            return _reorder(np.ascontiguousarray(numbers, dtype=np.float64).view(np.int64))
        scaled = numbers * 10.0 ** (self.decimals or 0)
        return np.where(np.abs(scaled) < 2.0**53, scaled, 0.0).round().astype(np.int64)

    def exact(self, numbers: np.ndarray) -> np.ndarray:
        """Return True for numbers that equal the number of their nearest k, bit for bit."""
        found: np.ndarray = self.numbers(self.nearest(numbers)).view(np.int64) == numbers.view(np.int64)
        return found


def _reorder(k: np.ndarray) -> np.ndarray:
    """Convert between the bits of floats and integers in the same order: flip the bits of negative floats."""
    found: np.ndarray = np.where(k < 0, k ^ np.int64(np.iinfo(np.int64).max), k)
    return found


class TableCells:
    """Cells of a table, integers of the `Quantizer` of their column or `MISSING`, as points.

    The interval of a value is that of its atom or step, or the numbers nearer to it than to others with so many
    decimals. In a column of floats, a value owns one point, and its rank among the floats at this point is coded with
    equal probabilities. A missing cell is drawn from the bulk of its column, and costs nothing.
    """

    bits, dtype, limits = CELL_BITS, np.dtype("<i8"), ANYWHERE

    def __init__(self, units: Units, quantizers: Sequence[Quantizer]) -> None:
        self.units, self.quantizers = units, tuple(quantizers)
        low, high = units.box()
        self.low, self.high = low[0].double(), high[0].double()
        inner = torch.where(self.low.isfinite(), self.low, -1.0)
        outer = torch.where(self.low.isfinite() & self.high.isfinite(), self.high, 1.0)
        self.bulk = self._point(torch.stack([inner, outer]))
        self.floats = [d for d, each in enumerate(quantizers) if each.floats]
        self.float_offsets = np.array([quantizers[d].offset for d in self.floats])
        self.example = np.full((1, units.dim), MISSING)

    def to_grid(self, rows: np.ndarray, grid: Grid) -> Tensor:
        """Draw a point in the interval of each value; rows are (B, D)."""
        missing = rows == MISSING
        low, high = self._intervals(np.where(missing, 0, rows), missing)
        grid.require((high > low) & (high - low < LARGEST) & (low.abs() < 1 << 45) & (high.abs() < 1 << 45))
        i = low + grid.stack.pop(high - low)
        found, first, count = self._values(i)
        given = torch.from_numpy(rows[:, self.floats])
        here = ((given >= first) & (given < first + count)).numpy()
        found[:, self.floats] = np.where(here, given, found[:, self.floats])
        grid.require(torch.from_numpy((found == rows) | missing))
        if self.floats:
            known = torch.from_numpy(~missing[:, self.floats])
            grid.require(((count > 0) & (count < 1 << 60)) | ~known)
            grid.stack.push_wide((given - first)[known], count[known])
        grid.stack.push_to(uniform(SHIFT), i & ((1 << SHIFT) - 1))
        return i >> SHIFT

    def from_grid(self, i: Tensor, grid: Grid, missing: np.ndarray) -> np.ndarray:
        """Return the values at points, and the bits they were drawn with to the stack; `missing` is (B, D)."""
        i = (i.cpu() << SHIFT) + grid.stack.pop_from(uniform(SHIFT), i.shape)
        rows, first, count = self._values(i)
        if self.floats:
            known = torch.from_numpy(~missing[:, self.floats])
            if bool((count[known] < 1).any()):
                raise Corrupt
            part = torch.from_numpy(rows[:, self.floats])
            part[known] = first[known] + grid.stack.pop_wide(count[known])
            rows[:, self.floats] = part.numpy()
        low, high = self._intervals(np.where(missing, 0, rows), missing)
        if bool(((i < low) | (i >= high)).any()):
            raise Corrupt
        grid.stack.push(i - low, high - low)
        rows[missing] = MISSING
        return rows

    def _intervals(self, k: np.ndarray, missing: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the first point of each interval and the first point after it."""
        x = self._numbers(k)
        y0, y1 = (self.units.enter(x, noise=torch.full_like(x, u)).double() for u in (0.0, 1.0))
        low, high = self._point(y0), self._point(y1)
        density = y0 == y1  # neither an atom nor a step
        below, above = (
            self._point(self.units.enter(self._numbers(k, by), noise=torch.zeros_like(x)).double())
            for by in (-0.5, 0.5)
        )
        decimal = density & torch.tensor([not each.floats and each.decimals is not None for each in self.quantizers])
        low, high = torch.where(decimal, below, low), torch.where(decimal, above, high)
        if self.floats:
            real = density & torch.tensor([each.floats for each in self.quantizers])
            point = self._point(y0, inside=True)
            low, high = torch.where(real, point, low), torch.where(real, point + 1, high)
        hidden = torch.from_numpy(missing)
        return torch.where(hidden, self.bulk[0], low), torch.where(hidden, self.bulk[1], high)

    def _numbers(self, k: np.ndarray, by: float = 0.0) -> Tensor:
        """Return the model's numbers of k, or of k + by in columns with decimals."""
        columns = []
        for d, each in enumerate(self.quantizers):
            shifted = each.decimals is not None and not each.floats
            columns.append(each.numbers(k[:, d] + by if shifted else k[:, d]) - each.offset)
        return torch.from_numpy(np.stack(columns, 1))

    def _point(self, y: Tensor, *, inside: bool = False) -> Tensor:
        """Return the first point whose middle is not below y, or the one that contains y (`inside`)."""
        at = torch.maximum(torch.minimum(y, self.high), self.low) * 2.0**FINEST
        at = at.floor() if inside else (at - 0.5).ceil()
        return at.nan_to_num(0.0).clamp(-(2.0**50), 2.0**50).long()

    def _values(self, i: Tensor) -> tuple[np.ndarray, Tensor, Tensor]:
        """Return the value at each point and, for columns of floats, the first float there and the number of floats."""
        y = (i.double() + 0.5) * 2.0**-FINEST
        x = self.units.leave(y.to(self.units.scale)).double().numpy()
        values = np.stack([each.nearest(x[:, d] + each.offset) for d, each in enumerate(self.quantizers)], 1)
        points = i[:, self.floats]
        if not self.floats:
            return values, points, points
        first, after = np.split(self._first_float(torch.cat([points, points + 1])), 2)
        atom = first == after  # no float lies at the point of an atom: its only value counts as one
        first = np.where(atom, values[:, self.floats], first)
        return values, torch.from_numpy(first), torch.from_numpy(np.where(atom, 1, after - first))

    def _first_float(self, i: Tensor) -> np.ndarray:
        """Find, by bisection, the index of the first float at point i or a later one, in each column of floats."""
        floats, wanted, x = Quantizer(-1), i.numpy(), torch.zeros((len(i), self.units.dim), dtype=torch.float64)

        def reached(k: np.ndarray) -> np.ndarray:
            x[:, self.floats] = torch.from_numpy(floats.numbers(k) - self.float_offsets)
            point = self._point(self.units.place(x).double(), inside=True)[:, self.floats]
            found: np.ndarray = point.numpy() >= wanted
            return found

        most = int(floats.nearest(np.array([np.finfo(np.float64).max]))[0])
        low, high = np.full(i.shape, -most, np.int64), np.full(i.shape, most, np.int64)
        x[:, self.floats] = i.double() * 2.0**-FINEST
        guess = floats.nearest(self.units.leave(x).double().numpy()[:, self.floats] + self.float_offsets)
        guess = guess.clip(-most, most)
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
