"""Heads and small models in float64, and quadrature: what the tests of tables compare with."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from nicest.data.columns import Head
from nicest.tables.heads import Numbers
from nicest.tables.model import FAR, TableModel


def number_head(
    loc: Sequence[float],
    log_scale: Sequence[float],
    logits: Sequence[float],
    *,
    atoms: Sequence[float] = (),
    low: float = -FAR,
    high: float = FAR,
    step: float = 0.0,
    unit: float = 1.0,
) -> Numbers:
    """Return the distribution of one cell: K components; the first `logits` are those of the atoms."""
    log_p = torch.tensor(logits, dtype=torch.float64).log_softmax(0)
    tensors = (torch.tensor([[each]], dtype=torch.float64) for each in (loc, log_scale))
    constants = (torch.tensor([each], dtype=torch.float64) for each in (low, high, step, np.log(unit)))
    places = torch.tensor([list(atoms)], dtype=torch.float64)
    n = len(atoms)
    return Numbers(log_p[None, None, :n], log_p[None, None, n:], *tensors, places, *constants, True, step > 0)


def column(values: Sequence[float] | np.ndarray | Tensor) -> Tensor:
    """Return values (N,) as N rows of one cell, (N, 1)."""
    return torch.as_tensor(values, dtype=torch.float64)[:, None]


def nodes(low: float, high: float, n: int = 6000) -> tuple[np.ndarray, np.ndarray]:
    """Return points of (low, high), at most 60 from 0, and the weights of their trapezoidal rule after substitution."""
    if low < -60 and high > 60:
        x = np.linspace(-60, 60, 2 * n)
        return x, np.full(2 * n, x[1] - x[0])
    if low < -60 or high > 60:  # x = end +- exp(s)
        s = np.linspace(-40, np.log(90), n)
        sign = 1.0 if high > 60 else -1.0
        return (low if high > 60 else high) + sign * np.exp(s), np.exp(s) * (s[1] - s[0])
    s = np.linspace(-36, 36, n)
    share = 1 / (1 + np.exp(-s))
    return low + (high - low) * share, (high - low) * share * (1 - share) * (s[1] - s[0])


def grid(step: float, low: float, high: float) -> np.ndarray:
    """Return the multiples of a step in [low, high], at most 60 from 0."""
    first, last = max(low, -60.0), min(high, 60.0)
    return np.arange(np.ceil(first / step - 1e-6), np.floor(last / step + 1e-6) + 1) * step


def small_model(
    heads: Sequence[Head], targets: Sequence[int] = (), *, seed: int = 0, strength: float = 0.7, **settings: object
) -> TableModel:
    """Return an untrained model in float64 with strong random weights, so that every cell depends on every other."""
    sizes = {"width": 8, "depth": 1, "components": 3, "dropout": 0.0, "members": 1, "orders": 2, "favour": 0.5}
    torch.manual_seed(seed)
    model = TableModel(heads, SimpleNamespace(**sizes | settings), targets).double().eval()
    with torch.no_grad():
        for weights in (model.network.leave.weight, model.network.leave.flat_bias):
            weights += strength * torch.randn_like(weights)
        factors = model.network.factors
        factors.loadings.copy_(0.5 * torch.randn_like(factors.loadings))
        factors.noise.copy_(0.2 + torch.rand_like(factors.noise))
    return model


def all_rows(*values: Sequence[float]) -> Tensor:
    """Return every row of discrete columns."""
    return torch.cartesian_prod(*(torch.tensor(each, dtype=torch.float64) for each in values)).reshape(-1, len(values))
