"""Mixtures of Gaussians of several sizes: a smooth density to hold beside that of a flow."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple, Self

import numpy as np

SIZES = (1, 2, 4, 8, 16, 32)  # components of the mixtures
FLOOR = 0.1  # of the spread of a column: no direction of a component is narrower
FEWEST = 4  # rows for every component
NUMBERS = 1e6  # in all covariances of a mixture, at most
WORK = 2e7  # rows times columns squared in a round of EM, at most: more rows are drawn from
MOST, LEAST = 5_000, 500  # rows that a mixture is fitted to
ROUNDS = 50  # of EM
AT_ONCE = 2_000  # rows that are scored at once


class Gaussians(NamedTuple):
    """The geometric mean of the densities of some mixtures, of standardised columns.

    All components of all mixtures stand one after the other, C of them; mixture i has `sizes[i]`. With R_c `roots`,
    the precision of component c is R_c R_cᵀ.
    """

    mean: np.ndarray  # (D,)
    spread: np.ndarray  # (D,)
    sizes: np.ndarray  # (M,)
    weights: np.ndarray  # (C,)
    centres: np.ndarray  # (C, D)
    roots: np.ndarray  # (C, D, D)

    @classmethod
    def fit(cls, rows: np.ndarray, seed: int) -> Self:
        """Mixtures of 1, 2, 4, 8, 16 and 32 components with full covariances, fewer of few rows or of many columns.

        They are the same in whatever order the rows come.
        """
        from sklearn.mixture import GaussianMixture

        count, dim = rows.shape
        rows = rows[np.lexsort(rows.T)]
        enough = int(np.clip(WORK / dim**2, LEAST, MOST))
        if count > enough:
            rows = rows[np.sort(np.random.default_rng(seed).choice(count, enough, replace=False))]
        mean, spread = rows.mean(0), rows.std(0)
        spread[spread == 0] = 1
        y = (rows - mean) / spread
        sizes = [k for k in SIZES if k == 1 or (k * FEWEST <= len(y) and k * dim**2 <= NUMBERS)]
        found: list[Any] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that EM did not converge, or that rows are the same
            for k in sizes:
                mixture = GaussianMixture(k, reg_covar=FLOOR**2, max_iter=ROUNDS, random_state=seed % 2**32)
                found.append(mixture.fit(y))
        weights, centres, roots = (
            np.concatenate([getattr(each, name) for each in found])
            for name in ("weights_", "means_", "precisions_cholesky_")
        )
        return cls(mean, spread, np.array(sizes), weights, centres, roots)

    def log_prob(self, rows: np.ndarray) -> np.ndarray:
        """The mean of their log-densities at rows (N, D), (N,), in nats of standardised columns."""
        parts = [self._log_prob(rows[i : i + AT_ONCE]) for i in range(0, len(rows), AT_ONCE)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _log_prob(self, rows: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            y = (rows - self.mean) / self.spread
            heights = np.log(self.weights) + np.log(np.diagonal(self.roots, axis1=1, axis2=2)).sum(1)
            squares = [(((y - c) @ r) ** 2).sum(1) for c, r in zip(self.centres, self.roots, strict=True)]
            each = heights[:, None] - 0.5 * (np.array(squares) + rows.shape[1] * math.log(2 * math.pi))
            ends = np.cumsum(self.sizes)[:-1]
            mixed = [np.logaddexp.reduce(part, axis=0) for part in np.split(each, ends)]
            found: np.ndarray = np.mean(mixed, axis=0)
        return np.where(np.isnan(found), -np.inf, found)
