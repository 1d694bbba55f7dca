"""Compare predictive distributions of the last column: NICE, boosting and forests."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor

from benchmarks.compare import Comparison, Figures
from benchmarks.compare_density import TEST, standardised
from benchmarks.datasets import TABLES, Table
from nicest.inference.predictive import crps
from nicest.predictors import NICERegressor

LEVEL = 0.9  # of the predicted intervals
QUANTILES = np.linspace(0.05, 0.95, 19)  # levels of the quantiles that boosting fits
POINTS = 200  # quantiles of a Gaussian from which its CRPS is computed
NARROWEST = 1e-3  # least distance of two quantiles, in standard deviations of the column


class Predicted(NamedTuple):
    """Predictions for the test rows: log-density of the truth, means, interval ends, and quantiles (N, M)."""

    nats: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    points: np.ndarray


Method = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int], Predicted]


def trial(method: Method, table: Table, seed: int) -> Mapping[str, Figures]:
    """Return log-density, CRPS, RMSE and coverage of 90% intervals on a fifth of the rows, standardised."""
    test, train = np.split(np.random.default_rng(seed).permutation(table.rows), [len(table.rows) // TEST])
    train, test = standardised(train, test)
    y = test[:, -1]
    found = method(train[:, :-1], train[:, -1], test[:, :-1], y, seed)
    score = crps(torch.from_numpy(found.points), torch.from_numpy(y)).mean()
    figures = {
        "nats": float(found.nats.mean()),
        "crps": float(score),
        "rmse": float(np.sqrt(np.mean((found.mean - y) ** 2))),
        "coverage": float(np.mean((y >= found.low) & (y <= found.high))),
    }
    return {"": figures}


def nice(X: np.ndarray, y: np.ndarray, unseen: np.ndarray, truth: np.ndarray, seed: int) -> Predicted:
    ahead = NICERegressor(random_state=seed).fit(X, y).predict_distribution(unseen)
    low, high = ahead.quantile([(1 - LEVEL) / 2, (1 + LEVEL) / 2]).T
    return Predicted(ahead.log_prob(truth), ahead.mean(), low, high, ahead.points())


def gaussian(mean: np.ndarray, deviation: np.ndarray, truth: np.ndarray) -> Predicted:
    law = stats.norm(mean, deviation)
    points = law.mean()[:, None] + law.std()[:, None] * stats.norm.ppf((np.arange(POINTS) + 0.5) / POINTS)
    low, high = law.interval(LEVEL)
    return Predicted(law.logpdf(truth), mean, low, high, points)


def forest(X: np.ndarray, y: np.ndarray, unseen: np.ndarray, truth: np.ndarray, seed: int) -> Predicted:
    """Predict a Gaussian around the mean of 300 trees, with the standard deviation of their out-of-bag errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows without out-of-bag predictions
        trees = RandomForestRegressor(300, oob_score=True, random_state=seed).fit(X, y)
    mean = trees.predict(unseen)
    spread = float(np.sqrt(np.nanmean((trees.oob_prediction_ - y) ** 2)))
    return gaussian(mean, np.full(len(mean), spread), truth)


def boosting(X: np.ndarray, y: np.ndarray, unseen: np.ndarray, truth: np.ndarray, seed: int) -> Predicted:
    """Predict by boosted models for 19 quantiles and for the mean.

    The density is constant between quantiles and has exponential tails.
    """

    def fitted(**options: object) -> np.ndarray:
        return HistGradientBoostingRegressor(random_state=seed, **options).fit(X, y).predict(unseen)

    knots = np.sort(np.stack([fitted(loss="quantile", quantile=share) for share in QUANTILES], 1), axis=1)
    knots = np.maximum.accumulate(knots + np.arange(len(QUANTILES)) * NARROWEST * 1e-3, axis=1)
    widths = np.maximum(np.diff(knots, axis=1), NARROWEST)
    inside = np.diff(QUANTILES) / widths
    place = np.clip((knots <= truth[:, None]).sum(1) - 1, 0, widths.shape[1] - 1)
    nats = np.log(inside[np.arange(len(truth)), place])
    for end, density, share, sign in (
        (0, inside[:, 0], QUANTILES[0], -1),
        (-1, inside[:, -1], 1 - QUANTILES[-1], 1),
    ):
        away = sign * (truth - knots[:, end])
        nats = np.where(away > 0, np.log(density) - density / share * away, nats)
    return Predicted(nats, fitted(), knots[:, 0], knots[:, -1], knots)


def ngboost(X: np.ndarray, y: np.ndarray, unseen: np.ndarray, truth: np.ndarray, seed: int) -> Predicted:
    from ngboost import NGBRegressor

    law = NGBRegressor(random_state=seed, verbose=False).fit(X, y).pred_dist(unseen)
    return gaussian(law.loc, law.scale, truth)


METHODS: dict[str, Method] = {"NICE": nice, "NGBoost": ngboost, "quantile boosting": boosting, "forest": forest}
ABSENT = {} if find_spec("ngboost") else {"NGBoost": "ngboost is not installed: pip install ngboost"}
COMPARISON = Comparison(
    name="regression",
    unit="The last column predicted from the others on held-out rows: mean log-density in nats, standardised columns",
    figures={"nats": 3, "crps": 4, "rmse": 4, "coverage": 3, "seconds": 1},
    highest=True,
    tables=TABLES,
    methods={name: method for name, method in METHODS.items() if name not in ABSENT},
    trial=trial,
    absent=ABSENT,
)
