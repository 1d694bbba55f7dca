"""Missing cells filled in for a start: draws from a Gaussian copula of the cells that are there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

ROUNDS = 100  # of expectation and maximisation, at most
SETTLED = 1e-3  # change of any covariance in a round, below which they end
RIDGE = 1e-3  # of the variance: columns may depend on each other
ENOUGH = 5000  # rows that the copula is fitted to
AT_ONCE = 1 << 22  # numbers in the matrices of some rows


class Part(NamedTuple):
    """Some rows: where their missing cells are, (n, k), which of these count, what is expected there, and a root.

    A root (n, k, k) times its transpose is the covariance of the missing cells, given the others of the row.
    """

    rows: np.ndarray
    places: np.ndarray
    counts: np.ndarray
    expected: np.ndarray
    root: np.ndarray

    @property
    def cells(self) -> tuple[np.ndarray, np.ndarray]:
        """The row and the column of every missing cell."""
        return np.repeat(self.rows, self.counts.sum(1)), self.places[self.counts]


def fill(complete: np.ndarray, incomplete: np.ndarray, discrete: np.ndarray) -> np.ndarray:
    """Incomplete rows (N, D), with their missing values, NaN, drawn given the observed values of their row.

    Every column becomes normal scores by the ranks of its values; EM finds their mean and covariance (Dempster, Laird
    & Rubin 1977). A score that is drawn becomes a number between two values of its column, or beyond the largest and
    the smallest; in `discrete` columns (D,), one of its values. Every column needs an observed value.
    """
    from scipy.special import ndtr, ndtri

    rng, rows = np.random.default_rng(0), np.concatenate([complete, incomplete])
    missing, scores = np.isnan(rows), np.full(rows.shape, np.nan)
    for d, there in enumerate(~missing.T):
        count = int(there.sum())
        order = np.lexsort((rng.random(count), rows[there, d]))  # equal cells in any order
        ranks = np.empty(count)
        ranks[order] = np.arange(count)
        scores[there, d] = ndtri((ranks + 0.5) / count)
    mean, covariance = fit(scores[rng.permutation(len(rows))[:ENOUGH]])
    drawn = scores[len(complete) :]
    for part in conditional(drawn, mean, covariance):
        noise = rng.standard_normal(part.expected.shape)
        drawn[part.cells] = (part.expected + np.einsum("nij,nj->ni", part.root, noise))[part.counts]
    filled = incomplete.copy()
    for d, gone in enumerate(np.isnan(incomplete).T):
        column = np.sort(rows[~missing[:, d], d])
        place = ndtr(drawn[gone, d]) * len(column) - 0.5
        if discrete[d]:
            filled[gone, d] = column[place.round().clip(0, len(column) - 1).astype(int)]
        else:
            filled[gone, d] = np.interp(place, np.arange(len(column)), column) + beyond(column, drawn[gone, d])
    return filled


def beyond(column: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """How far beyond the ends of a sorted column scores beyond theirs lie, by the slope of its outer tenths.

    Cells may be missing just where they are large.
    """
    from scipy.special import ndtri

    n = len(column)
    end, inner = ndtri(1 - 0.5 / n), ndtri(1 - (0.5 + n // 10) / n)
    rise = (column[-1] - column[-1 - n // 10], column[n // 10] - column[0])
    low, high = (each / max(end - inner, 1e-9) if n >= 10 else 0.0 for each in rise[::-1])
    return high * np.maximum(scores - end, 0.0) - low * np.maximum(-end - scores, 0.0)


def fit(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of rows with NaN, by maximum likelihood."""
    n, dim = scores.shape
    mean, covariance = np.zeros(dim), np.eye(dim)
    for _ in range(ROUNDS if np.isnan(scores).any() else 1):
        expected, spread = scores.copy(), np.zeros(dim * dim)
        for part in conditional(scores, mean, covariance):
            expected[part.cells] = part.expected[part.counts]
            pairs = part.places[:, :, None] * dim + part.places[:, None, :]
            both = part.counts[:, :, None] & part.counts[:, None, :]
            covariances = part.root @ part.root.transpose(0, 2, 1)
            spread += np.bincount(pairs[both], covariances[both], dim * dim)
        mean = expected.mean(0)
        away = expected - mean
        before, covariance = covariance, (away.T @ away + spread.reshape(dim, dim)) / n + RIDGE * np.eye(dim)
        if np.abs(covariance - before).max() < SETTLED:
            break
    return mean, covariance


def conditional(scores: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> Iterator[Part]:
    """The missing cells of rows, some rows at once, those with about as many missing cells together.

    With Λ the inverse of the covariance, what is missing in a row has the covariance (Λ_MM)⁻¹ given the rest.
    """
    precision, missing = np.linalg.inv(covariance), np.isnan(scores)
    away = np.where(missing, 0.0, scores - mean)
    order = np.argsort(missing.sum(1), kind="stable")[::-1]
    order = order[: int(missing.any(1).sum())]
    while len(order):
        k = int(missing[order[0]].sum())
        rows, order = np.split(order, [max(1, AT_ONCE // k**2)])
        places = np.argsort(~missing[rows], axis=1, kind="stable")[:, :k]
        counts = np.take_along_axis(missing[rows], places, 1)
        both = counts[:, :, None] & counts[:, None, :]
        block = np.where(both, precision[places[:, :, None], places[:, None, :]], np.eye(k))
        root = np.linalg.inv(np.linalg.cholesky(block)).transpose(0, 2, 1)
        pull = np.where(counts, np.take_along_axis(away[rows] @ precision, places, 1), 0.0)
        expected = mean[places] - np.einsum("nij,nkj,nk->ni", root, root, pull, optimize=True)
        yield Part(rows, places, counts, expected, root)
