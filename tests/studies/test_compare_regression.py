"""The comparison of predictions as distributions: what is scored, and that each method is a density."""

from functools import partial

import numpy as np
import pytest
from scipy import stats

from nicest import NICERegressor
from nicest.studies import compare_regression
from nicest.studies.compare_regression import METHODS, REGRESSION, Predicted, gaussian, trial
from nicest.studies.datasets import Table

PRESENT = [name for name in METHODS if name in REGRESSION.methods]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"effort": "low", "epochs": 12, "members": 2, "width": 8, "learning_rate": 0.03}
    monkeypatch.setattr(compare_regression, "NICERegressor", partial(NICERegressor, **small))
    forest = partial(compare_regression.RandomForestRegressor, n_jobs=1)
    monkeypatch.setattr(compare_regression, "RandomForestRegressor", lambda _, **options: forest(20, **options))
    monkeypatch.setattr(
        compare_regression,
        "HistGradientBoostingRegressor",
        partial(compare_regression.HistGradientBoostingRegressor, max_iter=10),
    )


def rows(n: int = 150) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 2))
    return np.column_stack([x, 100 + 5 * (x[:, 0] + 0.5 * rng.normal(size=n))])


def test_figures_are_of_the_last_column_of_a_fifth_of_the_rows_standardised():
    seen = []

    def truth(X: np.ndarray, y: np.ndarray, unseen: np.ndarray, observed: np.ndarray, seed: int) -> Predicted:
        seen.append((X, y, unseen, observed))
        return gaussian(np.zeros(len(observed)), np.ones(len(observed)), observed)

    figures = trial(truth, Table(rows()), 0)[""]
    ((X, y, unseen, observed),) = seen
    assert (X.shape, unseen.shape) == ((120, 2), (30, 2))
    assert (y.mean(), y.std()) == (pytest.approx(0, abs=1e-9), pytest.approx(1))
    assert figures["nats"] == pytest.approx(stats.norm.logpdf(observed).mean())
    assert figures["rmse"] == pytest.approx(np.sqrt((observed**2).mean()))
    assert figures["coverage"] == pytest.approx((np.abs(observed) <= stats.norm.ppf(0.95)).mean())
    closed = observed * (2 * stats.norm.cdf(observed) - 1) + 2 * stats.norm.pdf(observed) - 1 / np.sqrt(np.pi)
    assert figures["crps"] == pytest.approx(closed.mean(), rel=0.01)


@pytest.mark.parametrize("name", PRESENT)
def test_every_method_gives_densities_and_beats_a_guess(name: str):
    figures = trial(METHODS[name], Table(rows()), 0)[""]
    assert figures["rmse"] < 0.9
    assert figures["nats"] > -1.6
    assert 0.5 < figures["coverage"] <= 1


@pytest.mark.parametrize("name", PRESENT)
def test_densities_integrate_to_one(name: str):
    """Of one row that is asked about at every place of a grid."""
    table = rows(100)
    grid = np.linspace(60, 140, 2001 if name == "NICE" else 8001)
    unseen = np.zeros((len(grid), 2))
    found = METHODS[name](table[:, :2], table[:, 2], unseen, grid, 0)
    assert np.trapezoid(np.exp(found.nats), grid) == pytest.approx(1, abs=0.02)
