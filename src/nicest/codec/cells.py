"""Convert rows of grey levels to grid points and back.

A level owns an interval of the real line. Encoding draws a point in it with bits from the stack, and decoding returns
those bits.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from nicest.codec.grid import BITS, Grid
from nicest.codec.stack import uniform
from nicest.flows import Units

FINER, COARSER = 10, 4  # binary digits of a pixel's grid beyond those of its level, with and without a first layer


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

    def from_grid(self, i: Tensor, grid: Grid) -> np.ndarray:
        """Return the levels of points, and the bits they were drawn with to the stack."""
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
