"""Missing cells filled in for a start: draws from a Gaussian copula of the cells that are there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

ROUNDS = 20  # of expectation and maximisation
RIDGE = 1e-3  # of the variance: columns may depend on each other
ENOUGH = 5000  # rows that the copula is fitted to
WORK = 4_000_000  # of wide tables so many numbers in their D x D matrices, but at least ten rows for each column
AT_ONCE = 1 << 22  # numbers in the matrices of some rows


def fill(rows: np.ndarray, whole: np.ndarray, seed: int = 0) -> np.ndarray:
    """Rows (N, D) whose NaN cells are drawn given the other cells of their row; what is there stays.

    Every column becomes normal scores by the ranks of its cells, their mean and covariance are found by EM (Dempster,
    Laird & Rubin 1977), and what is drawn becomes a number between two of its column, or in `whole` columns (D,) one of
    them. Every column needs a cell that is there.
    """
    from scipy.special import ndtr, ndtri

    rng, (n, dim) = np.random.default_rng(seed), rows.shape
    missing, scores = np.isnan(rows), np.full((n, dim), np.nan)
    for d, there in enumerate(~missing.T):
        count = int(there.sum())
        order = np.lexsort((rng.random(count), rows[there, d]))  # equal cells in any order
        ranks = np.empty(count)
        ranks[order] = np.arange(count)
        scores[there, d] = ndtri((ranks + 0.5) / count)
    enough = min(ENOUGH, max(10 * dim, WORK // dim**2))
    mean, covariance = _fit(scores[rng.permutation(n)[:enough]])
    filled, holed = rows.copy(), np.flatnonzero(missing.any(1))
    drawn = np.concatenate(
        [expected + np.einsum("nij,nj->ni", root, rng.standard_normal(expected.shape))
         for expected, _, root in _conditional(scores[holed], mean, covariance)]
        or [np.empty((0, dim))]
    )  # fmt: skip
    for d in range(dim):
        column = np.sort(rows[~missing[:, d], d])
        place = ndtr(drawn[:, d]) * len(column) - 0.5
        if whole[d]:
            found = column[place.round().clip(0, len(column) - 1).astype(int)]
        else:
            found = np.interp(place, np.arange(len(column)), column)
        filled[holed, d] = np.where(missing[holed, d], found, rows[holed, d])
    return filled


def _fit(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of rows with NaN, by maximum likelihood."""
    n, dim = scores.shape
    mean, covariance = np.zeros(dim), np.eye(dim)
    for _ in range(ROUNDS if np.isnan(scores).any() else 1):
        parts = list(_conditional(scores, mean, covariance))
        expected = np.concatenate([each for each, _, _ in parts])
        mean = expected.mean(0)
        away = expected - mean
        covariance = (away.T @ away + sum(spread.sum(0) for _, spread, _ in parts)) / n + RIDGE * np.eye(dim)
    return mean, covariance


def _conditional(
    scores: np.ndarray, mean: np.ndarray, covariance: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of some rows at once: what is missing as expected, (N, D), its covariance and a root of that, (N, D, D).

    With Λ the inverse of the covariance, what is missing in a row has the covariance (Λ_MM)⁻¹ given the rest.
    """
    dim, precision = len(mean), np.linalg.inv(covariance)
    step = max(1, AT_ONCE // dim**2)
    for part in (scores[i : i + step] for i in range(0, len(scores), step)):
        hidden = np.isnan(part)
        h = hidden.astype(float)
        block = h[:, :, None] * precision * h[:, None, :] + np.eye(dim) * (1 - h)[:, None, :]
        root = np.linalg.inv(np.linalg.cholesky(block)).transpose(0, 2, 1) * h[:, None, :]
        spread = root @ root.transpose(0, 2, 1)
        pull = h * (np.where(hidden, 0.0, part - mean) @ precision)
        yield np.where(hidden, mean - np.einsum("nij,nj->ni", spread, pull), part), spread, root
