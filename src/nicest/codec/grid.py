"""Act on grid points with the layers of a flow, such that every step can be inverted exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest.codec.stack import Corrupt, Stack, Unencodable, uniform
from nicest.flows import (
    Additive,
    Affine,
    AffineSpline,
    Bijection,
    Chain,
    ChannelMixing,
    Coupling,
    Elementwise,
    Law,
    Mixing,
    Spline,
    Squeeze,
    TriangularAffine,
    Within,
)

BITS = 12  # binary digits of a grid point between layers
EXTRA = 10  # additional digits to which `Grid.bend` resolves an increasing function
LARGEST = 1 << 36  # upper limit on the number of fine points in an interval
ANYWHERE = (-(1 << 40), 1 << 40)  # limits of grid points
FUNCTION_ERROR = 2.0**-46  # relative error of an elementwise function that another machine may make
NETWORK_ERROR = 2.0**-40  # relative error of a network in float64 that another machine may make
GROUP, OUTPUTS = 16, 1 << 17  # rows of a network's first batch, and outputs of a later one: they should fit the cache
DOUBLINGS = 40  # of the search range for the cell that `bend` started from

Map = Callable[[Tensor], Tensor]


class Grid:
    """Points k 2^-BITS on which layers act, and the stack of bits that they draw from.

    Points are int64 tensors whose first dimension runs over rows. A layer is a sequence of exact steps: it shifts
    points by whole cells (`cells`), permutes them, or applies an increasing function to each (`bend`).

    While encoding, rows are rejected with `Unencodable` if a machine with slightly different rounding could compute
    other integers for them. While decoding, impossible values raise `Corrupt`.

    Parameters
    ----------
    stack : Stack
        Source and sink of bits.
    rows : int
        Number of rows in the batch.
    encoding : bool
        True in the direction from data to latent.
    """

    def __init__(self, stack: Stack, rows: int, *, encoding: bool) -> None:
        self.stack, self.rows, self.encoding = stack, rows, encoding

    def real(self, i: Tensor) -> Tensor:
        """Convert points to float64."""
        return i.double().mul_(2.0**-BITS)

    def cells(self, t: Tensor) -> Tensor:
        """Round real numbers to whole cells; they may carry the error of a network."""
        return self._round(t, BITS, NETWORK_ERROR)

    def rounded(self, t: Tensor) -> Tensor:
        """Round the output of a network to float64 numbers that are the same on every machine."""
        return self.real(self.cells(t))

    def network(self, m: Callable[[Tensor, Tensor | None], Tensor], i: Tensor, context: Tensor | None) -> Tensor:
        """Evaluate a network at points, in batches that fit the cache of a CPU."""
        outputs, at, size = list[Tensor](), 0, len(i) if i.is_cuda else GROUP
        while at < len(i):
            rows = slice(at, at + size)
            outputs.append(m(self.real(i[rows]), None if context is None else context[rows]))
            at, size = at + size, max(GROUP, OUTPUTS // max(1, outputs[0][0].numel()))
        return torch.cat(outputs)

    def apply(self, layer: Bijection | Law, i: Tensor, context: Tensor | None = None) -> Tensor:
        """Apply `to_grid` while encoding and `from_grid` while decoding."""
        return (to_grid if self.encoding else from_grid)(layer, i, self, context)

    def map(self, i: Tensor, g: Map, inverse: Map) -> Tensor:
        """Apply `bend` while encoding and `unbend` while decoding."""
        return self.bend(i, g) if self.encoding else self.unbend(i, g, inverse)

    def scale(self, i: Tensor, d: Tensor) -> Tensor:
        """Multiply by d > 0 while encoding, and divide while decoding."""
        return self.map(i, lambda a: a * d, lambda y: y / d)

    def bend(self, i: Tensor, g: Map, bits: int = BITS) -> Tensor:
        """Apply an increasing elementwise function g to points.

        g takes cell i to the interval from g(i) to g(i + 1), whose ends are rounded to a grid with `EXTRA` more
        digits. Bits from the stack choose a point in the interval, and its extra digits go back to the stack. The
        net cost is -log2 of the mean slope in the cell. `bits` are the binary digits of i.
        """
        low, high = self._edge(i, g, bits), self._edge(i + 1, g, bits)
        size = high.sub_(low)
        self.require_between(size, 1, LARGEST + 1)
        z = low.add_(self.stack.pop(size))
        self.stack.push_to(uniform(EXTRA), z & ((1 << EXTRA) - 1))
        return z >> EXTRA

    def unbend(self, j: Tensor, g: Map, inverse: Map, bits: int = BITS, limits: tuple[int, int] = ANYWHERE) -> Tensor:
        """Invert `bend`: find the points within `limits` (low <= i < high) that it took to j.

        `inverse` is the inverse of g, and need only be approximate.
        """
        z = (j << EXTRA) + self.stack.pop_from(uniform(EXTRA), j.shape).to(j.device)
        near = inverse(z.double().mul_(2.0 ** -(BITS + EXTRA))) * 2.0**bits
        self.require_between(near.abs(), -math.inf, ANYWHERE[1])
        i = near.floor_().long().clamp_(limits[0], limits[1] - 1)
        i, low, high = self._find_cell(i, z, g, bits, limits)
        self.require_between(high - low, -math.inf, LARGEST + 1)
        self.stack.push(z - low, high - low)
        return i

    def _find_cell(
        self, i: Tensor, z: Tensor, g: Map, bits: int, limits: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cell whose interval contains z, with its interval; start at i, double, bisect."""
        end = i + 1
        low, high = self._edge(i, g, bits), self._edge(end, g, bits)
        for k in range(DOUBLINGS):
            above, below = low > z, high <= z
            if not bool((above | below).any()):
                break
            i = torch.where(above, i - (1 << k), i).clamp_min(limits[0])
            end = torch.where(below, end + (1 << k), end).clamp_max(limits[1])
            low, high = self._edge(i, g, bits), self._edge(end, g, bits)
        else:
            raise Corrupt
        while k and bool((end - i > 1).any()):
            middle = (i + end) >> 1
            edge = self._edge(middle, g, bits)
            above = edge > z
            i, end = torch.where(above, i, middle), torch.where(above, middle, end)
            low, high = torch.where(above, low, edge), torch.where(above, edge, high)
        return i, low, high

    def _edge(self, i: Tensor, g: Map, bits: int) -> Tensor:
        return self._round(g(i.double().mul_(2.0**-bits)), BITS + EXTRA, FUNCTION_ERROR)

    def _round(self, t: Tensor, bits: int, error: float) -> Tensor:
        """Round t to integer multiples of 2^-bits; reject rows where this relative error could change the result."""
        scaled = t * 2.0**bits
        whole = scaled.round()
        if self.encoding and t.ndim > 1:
            distance = (scaled - whole).abs_().add_(scaled.abs_(), alpha=error)
            self.require_between(distance, -math.inf, 0.5 - error * 2.0**bits)
        else:
            self.require_between(scaled.abs_().mul_(error), -math.inf, 0.5)
        return whole.long()

    def require_between(self, t: Tensor, low: float, high: float) -> None:
        """Reject rows with a number below `low`, not below `high`, or NaN."""
        # the extremes are cheaper than a mask, which is seldom needed
        if t.numel() and not (bool(t.max() < high) and (low == -math.inf or bool(t.min() >= low))):
            self.require((t < high) & (t >= low))

    def require(self, valid: Tensor) -> None:
        """Reject rows with a False: raise `Unencodable` or, while decoding, `Corrupt`."""
        if bool(valid.all()):
            return
        if not self.encoding:
            raise Corrupt
        if valid.ndim < 2:  # a parameter of the flow, which concerns all rows
            raise Unencodable(np.ones(self.rows, dtype=bool))
        raise Unencodable(~valid.reshape(self.rows, -1).all(1).cpu().numpy())


@functools.singledispatch
def to_grid(layer: Bijection | Law, i: Tensor, grid: Grid, context: Tensor | None = None) -> Tensor:
    """Apply a layer, or a coupling law, to grid points, (B, D) of int64; return such points.

    A layer whose class attribute `elementwise` is True, and any law, works without registration. For another layer
    of your own, register both directions: `to_grid.register(MyLayer)` and `from_grid.register(MyLayer)`.

    Parameters
    ----------
    layer : Bijection or Law
        Dispatched on by its class.
    i : Tensor of int64, shape (B, D)
        Grid points.
    grid : Grid
        Provides the exact steps.
    context : Tensor, shape (B, C), optional
        Context of the layer; for a law, the output of the conditioner.

    Raises
    ------
    NotImplementedError
        If no exact form is registered for the class.
    """
    return _by_element(layer, i, grid, context)


@functools.singledispatch
def from_grid(layer: Bijection | Law, j: Tensor, grid: Grid, context: Tensor | None = None) -> Tensor:
    """Invert `to_grid`; same parameters."""
    return _by_element(layer, j, grid, context)


def _by_element(layer: Bijection | Law, i: Tensor, grid: Grid, context: Tensor | None) -> Tensor:
    if not getattr(layer, "elementwise", False):
        raise NotImplementedError(f"{type(layer).__name__} has no exact form on a grid")
    return grid.map(i, *_increasing(layer, context))


@functools.singledispatch
def _increasing(layer: Bijection | Law, context: Any) -> tuple[Map, Map]:
    """Return an elementwise function of rows, and its inverse, at this context."""
    return lambda a: layer.forward(a, context)[0], lambda y: layer.inverse(y, context)[0]


@_increasing.register(Spline)
def _spline(law: Spline, b: Tensor) -> tuple[Map, Map]:
    knots = law.knots(b)  # once for all calls, which makes decoding with small networks twice as fast
    return lambda a: law.rise(a, knots)[0], lambda y: law.find(y, knots)[0]


@_increasing.register(AffineSpline)
def _affine_spline(law: AffineSpline, b: Tensor) -> tuple[Map, Map]:
    b1, b2 = b[..., : Affine.size], b[..., Affine.size :]
    g, inverse = _increasing(law.spline, b2)
    return lambda a: g(law.affine.forward(a, b1)[0]), lambda y: law.affine.inverse(inverse(y), b1)[0]


def split_first(layer: Bijection) -> tuple[Bijection | None, Bijection]:
    """Split off the first layer of a (nested) chain, if it is elementwise; return it, or None, and the rest."""
    if layer.elementwise:
        return layer, Chain()
    if isinstance(layer, Chain) and len(layer):
        head, *tail = layer
        first, rest = split_first(head)
        if first is not None:
            return first, Chain(rest, *tail)
    return None, layer


@from_grid.register(Chain)
@to_grid.register(Chain)
def _chain(layer: Chain, i: Tensor, grid: Grid, context: Tensor | None = None) -> Tensor:
    for each in layer if grid.encoding else reversed(layer):
        i = grid.apply(each, i, context)
    return i


@from_grid.register(Law)
@to_grid.register(Law)
def _law(law: Law, i: Tensor, grid: Grid, b: Tensor) -> Tensor:
    return grid.map(i, *_increasing(law, grid.rounded(b)))


@from_grid.register(Additive)
@to_grid.register(Additive)
def _additive(law: Additive, i: Tensor, grid: Grid, b: Tensor) -> Tensor:
    step = grid.cells(b)[..., 0]
    return i + step if grid.encoding else i - step


@from_grid.register(Coupling)
@to_grid.register(Coupling)
def _coupling(layer: Coupling, i: Tensor, grid: Grid, context: Tensor | None = None) -> Tensor:
    i1, i2 = layer.partition.split(i)
    return layer.partition.merge(i1, grid.apply(layer.law, i2, grid.network(layer.m, i1, context)))


@from_grid.register(Elementwise)
@to_grid.register(Elementwise)
def _elementwise(layer: Elementwise, i: Tensor, grid: Grid, context: Tensor | None = None) -> Tensor:
    b = layer.parameters_at(grid.real(i), context)
    return grid.map(i, *_increasing(layer.law, b if layer.conditioner is None else grid.rounded(b)))


@from_grid.register(Within)
@to_grid.register(Within)
def _within(layer: Within, i: Tensor, grid: Grid, context: Tensor | None = None) -> Tensor:
    i1, i2 = layer.partition.split(i)
    if layer.network is not None:
        context = grid.rounded(grid.network(layer.m, i1, context))  # type: ignore[arg-type]
    return layer.partition.merge(i1, grid.apply(layer.inner, i2, context))


@from_grid.register(Mixing)
@to_grid.register(Mixing)
def _mixing(layer: Mixing, i: Tensor, grid: Grid, context: Tensor | None = None) -> Tensor:
    d = layer.log_diagonal.exp()  # L (U D⁻¹) (D P x) + b: a scaling and two unit triangular matrices
    upper, lower = layer.lu.triu(1) / d, layer.lu.tril(-1)
    if grid.encoding:
        i = _shear(grid, grid.scale(i[:, layer.order.argsort()], d), upper, lower=False)
        return _shear(grid, i, lower, lower=True) + grid.cells(layer.b)
    i = _shear(grid, i - grid.cells(layer.b), lower, lower=True)
    return grid.scale(_shear(grid, i, upper, lower=False), d)[:, layer.order]


@from_grid.register(TriangularAffine)
@to_grid.register(TriangularAffine)
def _triangular(layer: TriangularAffine, i: Tensor, grid: Grid, context: Tensor | None = None) -> Tensor:
    d = layer.log_diagonal.exp()  # (L D⁻¹) (D x) + b
    lower = layer.below.tril(-1) / d
    if grid.encoding:
        return _shear(grid, grid.scale(i, d), lower, lower=True) + grid.cells(layer.b)
    return grid.scale(_shear(grid, i - grid.cells(layer.b), lower, lower=True), d)


def _shear(grid: Grid, i: Tensor, matrix: Tensor, *, lower: bool) -> Tensor:
    """Multiply rows (B, D) by 1 + M while encoding, else by its inverse, by component; M is strictly triangular."""
    i, order = i.clone(), range(len(matrix))
    for k in reversed(order) if lower == grid.encoding else order:
        step = grid.cells((grid.real(i) @ matrix[k])[:, None])  # 2-D: rows near a rounding edge are rejected
        i[:, k] += (step if grid.encoding else -step)[:, 0]
    return i


@from_grid.register(ChannelMixing)
@to_grid.register(ChannelMixing)
def _channel_mixing(layer: ChannelMixing, i: Tensor, grid: Grid, context: Tensor | None = None) -> Tensor:
    return layer._rows(grid.apply(layer.mixing, layer._each_pixel(i)))


@from_grid.register(Squeeze)
@to_grid.register(Squeeze)
def _squeeze(layer: Squeeze, i: Tensor, grid: Grid, context: Tensor | None = None) -> Tensor:
    return (layer.forward if grid.encoding else layer.inverse)(i)[0]
