"""The distribution of one column's cell in every row, in the column's own unit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nicest.data.columns import Category, Column, Number
from nicest.errors import NicestError
from nicest.messages import shown
from nicest.tables.heads import Categories, Numbers

AT_ONCE = 20_000  # rows of quantiles, moments and scores that are computed at once


class Marginal:
    """p(x_i | the observed other cells) of one column for N rows.

    Numbers are in the column's own unit; those of dates and times are Arrow's. Columns of texts and booleans have
    probabilities only.
    """

    def __init__(self, column: Column, head: Numbers | Categories) -> None:
        self.column, self.head = column, head
        self.values = np.array(column.values if isinstance(column, Category) else ())

    def __len__(self) -> int:
        return len(self.head.log_probs if isinstance(self.head, Categories) else self.head.loc)

    @property
    def numeric(self) -> bool:
        """True if the column has numbers, with means and quantiles."""
        return isinstance(self.column, Number) or (isinstance(self.column, Category) and self.column.numeric)

    def probabilities(self) -> np.ndarray:
        """Return the probability of each of the column's values, (N, C), in the order of `values`."""
        if not isinstance(self.head, Categories):
            raise NicestError(f"column {shown(self.column.name)} has a density, not a few values with probabilities")
        return self.head.log_probs.exp().numpy()

    def best(self) -> np.ndarray:
        """Return the encoded best guess, (N,): the mean of a density, the median of steps, the likeliest category."""
        if isinstance(self.head, Categories):
            return self.head.log_probs.argmax(-1).double().numpy()
        if isinstance(self.column, Number) and not self.column.discrete:
            mean = _by_rows(self.head, lambda head: head.moments()[0])
            low, high = float(self.head.low), float(self.head.high)
            return mean.clip(low, high)
        return _by_rows(self.head, lambda head: head.quantile(torch.full_like(head.loc[..., 0], 0.5)))

    def mean(self) -> np.ndarray:
        """Return the means, (N,)."""
        if self._weights is not None:
            return self._weights @ self.values
        return self._own(_by_rows(self._numbers(), lambda head: head.moments()[0]))

    def std(self) -> np.ndarray:
        """Return the standard deviations, (N,)."""
        if self._weights is not None:
            return np.sqrt(np.clip(self._weights @ self.values**2 - self.mean() ** 2, 0, None))
        return self._scale * np.sqrt(_by_rows(self._numbers(), lambda head: head.moments()[1]))

    def median(self) -> np.ndarray:
        """Return the medians, (N,)."""
        return self.quantile(0.5)

    def quantile(self, share: Any) -> np.ndarray:
        """Return quantiles: (N,) of one share, (N, Q) of Q of them."""
        shares = np.asarray(share, dtype=float)
        if not ((shares > 0) & (shares < 1)).all():
            raise ValueError(f"expected shares between 0 and 1, got {share}")
        if shares.ndim:
            return np.stack([self.quantile(each) for each in shares], -1)
        if self._weights is not None:
            reached = self._weights.cumsum(-1) >= float(shares) - 1e-12
            return self.values[reached.argmax(-1)]

        def of(head: Numbers) -> Tensor:
            return head.quantile(torch.full_like(head.loc[..., 0], float(shares)))

        return self.column.plain(_by_rows(self._numbers(), of))  # as the data: spikes, steps and decimals are exact

    def interval(self, level: float = 0.9) -> np.ndarray:
        """Return the ends of the central intervals that hold at least `level` of the probability, (N, 2)."""
        return self.quantile([(1 - level) / 2, (1 + level) / 2])

    def cdf(self, x: Any) -> np.ndarray:
        """Return P(X <= x) for one number, or one for each row, (N,)."""
        x = np.broadcast_to(np.asarray(x, dtype=float), len(self))
        if self._weights is not None:
            return (self._weights * (self.values <= x[:, None])).sum(-1)
        return _by_rows(self._numbers(), lambda head, code: head.cdf(code), self._codes(x))

    def cdf_of(self, codes: np.ndarray, *, strict: bool = False) -> np.ndarray:
        """Return P(X <= x), or with `strict` P(X < x), of encoded cells, (N,)."""
        if self._weights is not None:
            below = np.arange(self._weights.shape[1]) <= codes[:, None] - strict
            return (self._weights * below).sum(-1)
        return _by_rows(self._numbers(), lambda head, code: head.cdf(code, strict=strict), codes.astype(np.float32))

    def log_prob(self, x: Any) -> np.ndarray:
        """Return log-densities, or log-probabilities of discrete values, of one value or one for each row, (N,)."""
        codes = self.column.encode(np.broadcast_to(np.asarray(x), len(self)))
        return self.log_prob_of(codes)

    def log_prob_of(self, codes: np.ndarray) -> np.ndarray:
        """Return log-densities or log-probabilities of encoded cells, (N,)."""
        if isinstance(self.head, Categories):
            return self.head.log_prob(torch.from_numpy(codes.astype(np.float64))).numpy()
        return _by_rows(self.head, lambda head, code: head.log_prob(code), codes.astype(np.float32))

    def crps(self, y: Any) -> np.ndarray:
        """Return the continuous ranked probability score of the truth, (N,), in the column's unit."""
        y = np.broadcast_to(np.asarray(y, dtype=float), len(self))
        if self._weights is not None:
            levels, gaps = self._weights.cumsum(-1), np.diff(self.values)
            distance = (self._weights * np.abs(self.values - y[:, None])).sum(-1)
            return distance - (levels * (1 - levels))[:, :-1] @ gaps  # E|X - y| - E|X - X'| / 2
        return self._scale * _by_rows(self._numbers(), lambda head, code: head.crps(code), self._codes(y))

    def sample(self, n: int = 1, seed: int = 0) -> np.ndarray:
        """Draw n values for every row, (N, n); of texts and booleans, these."""
        generator = torch.Generator().manual_seed(seed)
        drawn = np.stack([self.head.sample(generator).view(-1).numpy() for _ in range(n)], -1)
        return np.stack([self.column.plain(each) for each in drawn.T], -1)

    @property
    def _weights(self) -> np.ndarray | None:
        """Probabilities of ordered categories, (N, C); None for other numbers."""
        if not isinstance(self.head, Categories):
            return None
        if not self.numeric:
            raise NicestError(f"column {shown(self.column.name)} has no numbers: ask for its probabilities")
        return self.head.log_probs.exp().double().numpy()

    def _numbers(self) -> Numbers:
        assert isinstance(self.head, Numbers)
        return self.head

    @property
    def _scale(self) -> float:
        assert isinstance(self.column, Number)
        return self.column.scale

    def _own(self, codes: np.ndarray) -> np.ndarray:
        """Return encoded numbers in the column's unit."""
        assert isinstance(self.column, Number)
        return codes * self.column.scale + self.column.offset

    def _codes(self, x: np.ndarray) -> np.ndarray:
        """Encode numbers, which may lie anywhere; float32 as the model has them, so that atoms are met."""
        assert isinstance(self.column, Number)
        return self.column.code(x).astype(np.float32)


def _by_rows(head: Numbers, function: Any, cells: np.ndarray | None = None) -> np.ndarray:
    """Apply a function of a head (and of cells, (N,)) to some rows at a time; return (N,) float64."""
    found = []
    for start in range(0, len(head.loc), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        part = head.rows(rows)
        more = () if cells is None else (torch.from_numpy(cells[rows, None]).double(),)
        found.append(function(part, *more).reshape(-1))
    return torch.cat(found).double().numpy() if found else np.empty(0)
