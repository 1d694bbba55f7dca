"""Compare predictive distributions of the last column: NICE, NGBoost, quantile boosting, a forest.

CRPS, log-density, RMSE and the coverage of 90% intervals on held-out rows. NGBoost needs the package ngboost.

Example: python -m benchmarks compare regression --data my-tables --out regression.json
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor

from benchmarks.compare import Comparison, Figures
from benchmarks.compare_imputation import crps_of
from benchmarks.datasets import TABLES, Table, split
from nicest.data.columns import Real
from nicest.estimators.predictors import NICERegressor
from nicest.estimators.table import NICETable
from nicest.tables.marginal import Marginal

LEVEL = 0.9  # of the predicted intervals
QUANTILES = np.linspace(0.05, 0.95, 19)  # levels of the quantiles that boosting fits
NARROWEST = 1e-3  # least distance of two quantiles, in standard deviations of the column


class Predicted(NamedTuple):
    """Predictions for the test rows: means, interval ends, and CRPS and log-density of the truth, each (N,).

    A distribution without a density, as of a discrete column, has no `nats`.
    """

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    crps: np.ndarray
    nats: np.ndarray | None = None


Method = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int], Predicted]  # X, y, X and y of the test, seed


def trial(method: Method, table: Table, seed: int) -> Mapping[str, Figures]:
    """Return CRPS, log-density, RMSE and coverage of 90% intervals on a fifth of the rows; y is standardised."""
    train, test = split(table.rows, seed)
    y, unit = test[:, -1], float(train[:, -1].std())
    found = method(train[:, :-1], train[:, -1], test[:, :-1], y, seed)
    figures = {
        "crps": float(found.crps.mean()) / unit,
        "rmse": float(np.sqrt(np.mean((found.mean - y) ** 2))) / unit,
        "coverage": float(np.mean((y >= found.low) & (y <= found.high))),
    }
    return {"": figures if found.nats is None else figures | {"nats": float(found.nats.mean()) + np.log(unit)}}


def nice(
    X: np.ndarray,
    y: np.ndarray,
    unseen: np.ndarray,
    truth: np.ndarray,
    seed: int,
    *,
    discrete: Literal["values", "types"] = "values",
) -> Predicted:
    """Predict by `NICERegressor`; by types, y has a density, also where few values are in it."""
    model = NICERegressor(discrete=discrete, random_state=seed, device="cpu").fit(X, y)
    return of_marginal(model.predict_distribution(unseen), truth)


def nice_table(X: np.ndarray, y: np.ndarray, unseen: np.ndarray, truth: np.ndarray, seed: int) -> Predicted:
    """Predict by `NICETable`, which is not told what the target is."""
    model = NICETable(random_state=seed, device="cpu").fit(np.column_stack([X, y]))
    return of_marginal(model.predict_distribution(np.column_stack([unseen, truth])), truth)


def of_marginal(found: Marginal, truth: np.ndarray) -> Predicted:
    """Return the predictions of a distribution of nicest."""
    has_density = isinstance(found.column, Real) and not found.column.spikes
    low, high = found.interval(LEVEL).T
    return Predicted(found.mean(), low, high, found.crps(truth), found.log_prob(truth) if has_density else None)


def gaussian(mean: np.ndarray, deviation: np.ndarray, truth: np.ndarray) -> Predicted:
    """Return the predictions of Gaussians."""
    law, z = stats.norm(mean, deviation), (truth - mean) / deviation
    crps = deviation * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi))
    low, high = law.interval(LEVEL)
    return Predicted(mean, low, high, crps, law.logpdf(truth))


def forest(X: np.ndarray, y: np.ndarray, unseen: np.ndarray, truth: np.ndarray, seed: int) -> Predicted:
    """Predict a Gaussian around the mean of 300 trees, with the standard deviation of their out-of-bag errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows without out-of-bag predictions
        trees = RandomForestRegressor(300, oob_score=True, random_state=seed).fit(X, y)
    mean = trees.predict(unseen)
    return gaussian(mean, np.full(len(mean), np.sqrt(np.nanmean((trees.oob_prediction_ - y) ** 2))), truth)


def boosting(X: np.ndarray, y: np.ndarray, unseen: np.ndarray, truth: np.ndarray, seed: int) -> Predicted:
    """Predict by boosted models for 19 quantiles and for the mean.

    The density is constant between quantiles and has exponential tails.
    """

    def fitted(**options: object) -> np.ndarray:
        return HistGradientBoostingRegressor(random_state=seed, **options).fit(X, y).predict(unseen)

    narrowest = NARROWEST * y.std()
    knots = np.sort(np.stack([fitted(loss="quantile", quantile=share) for share in QUANTILES], 1), axis=1)
    knots = np.maximum.accumulate(knots + np.arange(len(QUANTILES)) * narrowest * 1e-3, axis=1)
    inside = np.diff(QUANTILES) / np.maximum(np.diff(knots, axis=1), narrowest)
    place = np.clip((knots <= truth[:, None]).sum(1) - 1, 0, inside.shape[1] - 1)
    nats = np.log(inside[np.arange(len(truth)), place])
    for end, density, share, sign in (
        (0, inside[:, 0], QUANTILES[0], -1),
        (-1, inside[:, -1], 1 - QUANTILES[-1], 1),
    ):
        away = sign * (truth - knots[:, end])
        nats = np.where(away > 0, np.log(density) - density / share * away, nats)
    return Predicted(fitted(), knots[:, 0], knots[:, -1], crps_of(knots.T, truth), nats)


def ngboost(X: np.ndarray, y: np.ndarray, unseen: np.ndarray, truth: np.ndarray, seed: int) -> Predicted:
    """Predict the Gaussians of NGBoost."""
    from ngboost import NGBRegressor

    law = NGBRegressor(random_state=seed, verbose=False).fit(X, y).pred_dist(unseen)
    return gaussian(law.loc, law.scale, truth)


METHODS: dict[str, Method] = {
    "NICERegressor": nice,
    "NICERegressor, types": partial(nice, discrete="types"),
    "NICETable": nice_table,
    "NGBoost": ngboost,
    "quantile boosting": boosting,
    "forest": forest,
}


def comparison() -> Comparison:
    """Return the comparison."""
    unit = "The last column, standardised, predicted from the others on held-out rows: CRPS"
    figures = {"crps": 4, "nats": 3, "rmse": 4, "coverage": 3, "seconds": 1}
    return Comparison("regression", unit, figures, False, TABLES, METHODS, trial, {"NGBoost": "ngboost"})
