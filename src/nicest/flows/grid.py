"""A flow on a grid: integers in, integers out, exactly invertible, so that it can code data without loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from torch import Tensor

Map = Callable[[Tensor], Tensor]


class Grid(ABC):
    """What a layer needs to act on points of a grid, `Bijection.to_grid` and `Bijection.from_grid`.

    Points are int64 tensors whose first dimension runs over rows. A layer is made of three exact steps: it moves points
    by a number of cells (`cells`), reorders them, or maps each by an increasing function (`bend`, undone by `unbend`).
    What a network gives is `rounded` first, so that another machine finds the same numbers.
    """

    @abstractmethod
    def real(self, i: Tensor) -> Tensor:
        """Points as real numbers."""

    @abstractmethod
    def cells(self, t: Tensor) -> Tensor:
        """Real numbers as the nearest number of cells."""

    @abstractmethod
    def network(self, m: Callable[[Tensor, Tensor | None], Tensor], i: Tensor, context: Tensor | None) -> Tensor:
        """What a network gives at points."""

    @abstractmethod
    def rounded(self, b: Tensor) -> Tensor:
        """Real numbers, rounded to what every machine agrees on."""

    @abstractmethod
    def bend(self, i: Tensor, g: Map, inverse: Map) -> Tensor:
        """The points g(i), of a g that increases and acts on each number alone."""

    @abstractmethod
    def unbend(self, j: Tensor, g: Map, inverse: Map) -> Tensor:
        """The points i that `bend` took to j."""


def shear(grid: Grid, i: Tensor, matrix: Tensor, rows: Iterable[int], sign: int) -> Tensor:
    """x_k ± Σ_j M_kj x_j, one k after the other, of points (B, D): a unit triangular matrix, or its inverse."""
    i = i.clone()
    for k in rows:
        i[:, k] += sign * grid.cells(grid.real(i) @ matrix[k])
    return i


def unit_upper(grid: Grid, i: Tensor, above: Tensor, *, undo: bool = False) -> Tensor:
    """(1 + M) x for M strictly upper triangular, or its inverse."""
    order = range(len(above))
    return shear(grid, i, above, reversed(order), -1) if undo else shear(grid, i, above, order, 1)


def unit_lower(grid: Grid, i: Tensor, below: Tensor, *, undo: bool = False) -> Tensor:
    """(1 + M) x for M strictly lower triangular, or its inverse."""
    order = range(len(below))
    return shear(grid, i, below, order, -1) if undo else shear(grid, i, below, reversed(order), 1)


def scaled(grid: Grid, i: Tensor, scale: Tensor, *, undo: bool = False) -> Tensor:
    """scale ⊙ x, or x / scale."""
    step = grid.unbend if undo else grid.bend
    return step(i, lambda a: a * scale, lambda y: y / scale)
