"""Quadrature of densities over every kind of column, in float64.

A column is a set of nodes: values x, places u in the interval of a discrete value, and weights. Nodes are evenly spaced
in a variable s in which densities are smooth and fall to 0 at both ends, where the trapezoidal rule is very accurate.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nicest.flows import Density


class Nodes(NamedTuple):
    """Values, places in the intervals of discrete values, and weights; each (n,)."""

    x: Tensor
    u: Tensor
    weight: Tensor


def evenly(low: float, high: float, n: int) -> tuple[Tensor, float]:
    return torch.linspace(low, high, n, dtype=torch.float64), (high - low) / (n - 1)


def continuous(x: Tensor, weight: Tensor) -> Nodes:
    return Nodes(x, torch.full_like(x, 0.5), weight)


def reals(n: int = 8001, reach: float = 8.0) -> Nodes:
    """Cover the real line: x = sinh s."""
    s, step = evenly(-reach, reach, n)
    return continuous(s.sinh(), step * s.cosh())


def above(low: float, n: int = 8001, *, reach: float = 60.0, scale: float = 1.0) -> Nodes:
    """Cover (low, ∞), or (-∞, low) with a negative scale: x = low + scale exp(s)."""
    s, step = evenly(-reach, min(reach, 9.0), n)
    return continuous(low + scale * s.exp(), step * abs(scale) * s.exp())


def between(low: float, high: float, n: int = 8001, *, reach: float = 60.0) -> Nodes:
    """Cover (low, high): x = low + (high - low) sigmoid(s)."""
    s, step = evenly(-reach, min(reach, 36.0), n)
    return continuous(low + (high - low) * s.sigmoid(), step * (high - low) * s.sigmoid() * (-s).sigmoid())


def values(of: Sequence[float], n: int = 4001, *, reach: float = 60.0) -> Nodes:
    """Cover the intervals of discrete values, some of which end at a bound: u = sigmoid(s)."""
    s, step = evenly(-reach, min(reach, 36.0), n)
    return _each(of, s.sigmoid(), step * s.sigmoid() * (-s).sigmoid())


def steps(of: Sequence[float], n: int = 100) -> Nodes:
    """Cover the intervals of discrete values that end at no bound: the midpoint rule."""
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return _each(of, u, torch.full_like(u, 1 / n))


def _each(of: Sequence[float], u: Tensor, weight: Tensor) -> Nodes:
    x = torch.tensor(of, dtype=torch.float64)
    return Nodes(x.repeat_interleave(len(u)), u.repeat(len(x)), weight.repeat(len(x)))


def join(*parts: Nodes) -> Nodes:
    """Join the parts of one column, such as a spike and the numbers around it."""
    return Nodes(*(torch.cat(each) for each in zip(*parts, strict=True)))


@torch.no_grad()
def total(density: Density, *columns: Nodes, context: Tensor | None = None) -> float:
    """Integrate and sum a density over the product of the columns."""
    x, u, weight = (torch.cartesian_prod(*each).view(-1, len(columns)) for each in zip(*columns, strict=True))
    p = density.log_prob(x, context, noise=u).exp()
    assert bool(p.isfinite().all())
    return math.fsum((p * weight.prod(1)).tolist())
