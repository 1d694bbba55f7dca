"""The methods and metrics of the comparisons, against known values."""

from functools import partial

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import odeint

from benchmarks import compare_density, compare_imputation, compare_outliers, compare_regression, compare_synthesis
from benchmarks.compare_imputation import Guess, ends, measures
from benchmarks.compare_posteriors import c2st
from benchmarks.datasets import Table
from benchmarks.simulators import TASKS, infected
from nicest import NICE, NICERegressor
from nicest.data.columns import Column
from nicest.inference import impute
from nicest.train.fit_table import fit_table


@pytest.fixture
def _low_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (compare_density, compare_imputation, compare_outliers):
        monkeypatch.setattr(each, "NICE", partial(NICE, effort="low", law="additive"))
    short = {"effort": "low", "epochs": 12, "members": 2, "width": 8, "learning_rate": 0.03}
    monkeypatch.setattr(compare_regression, "NICERegressor", partial(NICERegressor, **short))
    low = partial(fit_table, given={"train": {"effort": "low", "epochs": 3}})
    monkeypatch.setattr(compare_synthesis, "fit_table", low)
    chains = impute.impute_rows.__kwdefaults__ | {"draws": 16, "steps": 20, "warmup": 20}
    monkeypatch.setattr(impute.impute_rows, "__kwdefaults__", chains)


@pytest.mark.usefixtures("_low_effort")
def test_nice_learns_in_every_comparison():
    """Three columns along a line: a Gaussian with independent columns would have -4.3 nats."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(240, 1)) + 0.3 * rng.normal(size=(240, 3))
    table = Table(rows, labels=np.zeros(240))
    far = Table(np.concatenate([rows, rows[:20] + np.array([4, -4, 4])]), labels=np.repeat([0, 1], [240, 20]))
    assert compare_density.trial(compare_density.METHODS["NICE"], table, 0)[""]["nats"] > -3.5
    assert compare_outliers.trial(compare_outliers.METHODS["NICE"], far, 0)[""]["auc"] > 0.99
    assert compare_imputation.trial(compare_imputation.METHODS["NICE"], table, 0, holes=True)[""]["rmse"] < 0.7
    assert compare_regression.trial(compare_regression.METHODS["NICE"], table, 0)[""]["rmse"] < 0.7
    assert 0.5 <= compare_synthesis.trial(compare_synthesis.METHODS["NICE"], table, 0)[""]["auc"] < 0.9


def test_density_is_that_of_a_fifth_of_the_rows_in_standardised_columns():
    rows = np.random.default_rng(0).normal([5, -3], [2, 0.1], size=(100, 2))
    found = compare_density.trial(lambda train, test, seed: stats.norm.logpdf(test).sum(1), Table(rows), 1)
    test, train = np.split(rows[np.random.default_rng(1).permutation(100)], [20])
    expected = stats.norm.logpdf(test, train.mean(0), train.std(0)).sum(1).mean() + np.log(train.std(0)).sum()
    assert found[""]["nats"] == pytest.approx(expected)


def test_imputation_errors_are_those_of_the_hidden_cells():
    truth, missing = np.array([[1.0, 10], [2, 20]]), np.array([[True, False], [False, True]])
    guess = Guess(truth + np.array([[1, 99], [99, 10]]), truth - 1, truth + np.array([[1, 1], [1, -0.5]]))
    found = measures(guess, truth, missing, np.array([1.0, 10]))
    assert found == pytest.approx({"rmse": 1.0, "coverage": 0.5, "width": (2 + 0.05) / 2})


def test_intervals_of_few_draws_contain_another_draw():
    draws = np.random.default_rng(0).normal(size=(20, 20_000))
    low, high = ends(draws[:19])
    assert ((low <= draws[19]) & (draws[19] <= high)).mean() == pytest.approx(0.9, abs=0.01)


def test_the_area_counts_ties_half_and_accepts_minus_infinity():
    is_inlier = np.array([True, True, False, False])
    assert compare_outliers.area(is_inlier, np.array([2.0, 1.0, 1.0, -np.inf])) == pytest.approx(3.5 / 4)


@pytest.mark.parametrize("name", ["quantile boosting", "forest"])
def test_predicted_densities_integrate_to_one(name: str):
    rng = np.random.default_rng(0)
    x, grid = rng.normal(size=(100, 2)), np.linspace(80, 120, 40_001)
    y = 100 + 5 * (x[:, 0] + 0.5 * rng.normal(size=100))
    found = compare_regression.METHODS[name](x, y, np.zeros((len(grid), 2)), grid, 0)
    assert np.trapezoid(np.exp(found.nats), grid) == pytest.approx(1, abs=0.02)


def test_classifiers_reach_the_accuracy_of_the_best_one():
    """N(0, 1) and N(1, 1): the AUC is Φ(1/√2) = 0.760; at distance 2 the accuracy is Φ(1) = 0.841."""
    columns = (Column("x", "double", "real"), Column("y", "double", "real"))
    real, same, moved = np.random.default_rng(0).normal(size=(3, 2000, 2))
    assert compare_synthesis.told_apart(real, moved + np.array([1, 0]), columns, 0) == pytest.approx(0.760, abs=0.03)
    assert compare_synthesis.told_apart(real, same, columns, 0) < 0.53
    assert c2st(real, same) == pytest.approx(0.5, abs=0.03)
    assert c2st(real, moved + np.array([2, 0])) == pytest.approx(stats.norm.cdf(1), abs=0.02)


def test_the_epidemic_is_that_of_scipy():
    theta = TASKS["sir"].draw(20, np.random.default_rng(0))[0]

    def slope(state: list[float], t: float, beta: float, gamma: float) -> list[float]:
        new = beta * state[0] * state[1] / 1e6
        return [-new, new - gamma * state[1], gamma * state[1]]

    start, days = [1e6 - 1, 1, 0], np.arange(161.0)
    exact = [odeint(slope, start, days, tuple(each), rtol=1e-10, atol=1e-8)[::17, 1] for each in theta]
    np.testing.assert_allclose(infected(theta), exact, rtol=1e-5, atol=1e-3)
