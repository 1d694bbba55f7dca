"""Compare densities with the true ones, of which the rows were drawn: NICE, and a mixture chosen by BIC.

Example: python -m benchmarks compare known --seeds 5 --out known.json
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.special import logsumexp
from sklearn.mixture import GaussianMixture

from benchmarks.compare import Comparison, Figures
from benchmarks.compare_density import Method
from benchmarks.datasets import Generator
from nicest.estimators.nice import NICE
from nicest.estimators.table import NICETable

TRAIN, TEST, COMPONENTS = 2_000, 10_000, range(1, 9)


class Known(NamedTuple):
    """Training rows, and test rows with their true log-densities."""

    rows: np.ndarray
    test: np.ndarray
    nats: np.ndarray
    left_out: tuple[str, ...] = ()


def gaussians(means: np.ndarray, covariances: np.ndarray, rng: Generator) -> Known:
    """Draw from Gaussians of equal weights."""
    laws = [stats.multivariate_normal(*each) for each in zip(means, covariances, strict=True)]
    draws = np.stack([law.rvs(TRAIN + TEST, random_state=rng) for law in laws])
    rows = draws[rng.integers(len(laws), size=TRAIN + TEST), np.arange(TRAIN + TEST)]
    train, test = np.split(rows, [TRAIN])
    return Known(train, test, logsumexp([law.logpdf(test) for law in laws], axis=0) - np.log(len(laws)))


def one_gaussian(rng: Generator) -> Known:
    """Draw from a Gaussian in five dimensions with random correlations."""
    mixing = rng.normal(size=(5, 5))
    return gaussians(rng.normal(size=(1, 5)), (mixing @ mixing.T)[None], rng)


def three_gaussians(rng: Generator) -> Known:
    """Draw from three Gaussians in the plane, one of them a narrow one."""
    covariances = np.array([[[1, 0.8], [0.8, 1]], [[0.5, -0.3], [-0.3, 0.4]], [[0.05, 0], [0, 0.05]]])
    return gaussians(np.array([[-2.0, 0], [2, 1], [0, -2]]), covariances, rng)


def trial(method: Method, table: Known, seed: int) -> Mapping[str, Figures]:
    """Return how much the mean log-density of the test rows is below the true one."""
    return {"": {"gap": float(np.mean(table.nats - method(table.rows, table.test, seed)))}}


def of_estimator(kind: type, train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """Score by an estimator of nicest."""
    return np.asarray(kind(random_state=seed, device="cpu").fit(train).score_samples(test))


def mixture(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """Score by the mixture with the best BIC."""
    fitted = [GaussianMixture(k, random_state=seed).fit(train) for k in COMPONENTS]
    return min(fitted, key=lambda each: each.bic(train)).score_samples(test)


def comparison() -> Comparison:
    """Return the comparison."""
    methods = {"NICETable": partial(of_estimator, NICETable), "NICE": partial(of_estimator, NICE), "mixture": mixture}
    tables = {"Gaussian": one_gaussian, "three Gaussians": three_gaussians}
    unit = f"Gap of the mean log-density to the true one, in nats, after {TRAIN} rows"
    return Comparison("known", unit, {"gap": 4, "seconds": 1}, False, tables, methods, trial)
