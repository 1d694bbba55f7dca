"""The methods and metrics of the comparisons, against known values."""

from functools import partial
from types import ModuleType

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import odeint

from benchmarks import (
    compare_classification,
    compare_density,
    compare_imputation,
    compare_known,
    compare_outliers,
    compare_regression,
    compare_synthesis,
)
from benchmarks.compare_imputation import Guess, crps_of, ends, measures
from benchmarks.compare_posteriors import c2st
from benchmarks.datasets import Table
from benchmarks.simulators import TASKS, infected
from nicest.data.columns import Category
from nicest.estimators import table as estimators
from nicest.recipes.recipe import Recipe
from nicest.tables import sizes


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train small networks for a moment."""

    def sized(*given: object) -> Recipe:
        table = {"members": 1, "width": 32, "dropout": 0.0}
        return sizes.sized(*given).changed({"table": table, "train": {"epochs": 60}}, "table")  # type: ignore[arg-type]

    monkeypatch.setattr(estimators, "sized", sized)


LINE = np.random.default_rng(0).normal(size=(240, 1)) + 0.3 * np.random.default_rng(1).normal(size=(240, 3))


@pytest.mark.usefixtures("_short")
def test_nice_learns_in_every_comparison():
    """Three columns along a line: a Gaussian with independent columns would have -4.3 nats."""

    def found(module: ModuleType, method: str, table: Table) -> dict[str, float]:
        return module.trial(module.METHODS[method], table, 0)[""]  # type: ignore[no-any-return]

    table = Table(LINE, ("x1", "x2", "x3"))
    far = Table(np.concatenate([LINE, LINE[:20] + np.array([4, -4, 4])]), labels=np.repeat([0, 1], [240, 20]))
    assert found(compare_density, "NICETable", table)["nats"] > -3.6
    assert found(compare_outliers, "NICETable", far)["auc"] > 0.99
    assert found(compare_regression, "NICERegressor", table)["rmse"] < 0.7
    assert found(compare_regression, "NICETable", table)["crps"] < 0.4
    assert found(compare_classification, "NICEClassifier", table)["log-loss"] < np.log(3)
    assert 0.5 <= found(compare_synthesis, "NICETable", table)["auc"] < 0.95
    hidden = compare_imputation.comparison(holes=True, hidden=0.2)
    imputed = hidden.trial(hidden.methods["NICETable"], table, 0)[""]
    assert imputed["rmse"] < 0.8
    assert 0.75 < imputed["coverage"] <= 1
    assert imputed["crps"] < 0.6 * imputed["width"]


def test_density_is_that_of_a_fifth_of_the_rows():
    rows = np.random.default_rng(0).normal([5, -3], [2, 0.1], size=(100, 2))
    found = compare_density.trial(lambda train, test, seed: stats.norm.logpdf(test).sum(1), Table(rows), 1)
    test = rows[np.random.default_rng(1).permutation(100)][:20]
    assert found[""]["nats"] == pytest.approx(stats.norm.logpdf(test).sum(1).mean())


@pytest.mark.usefixtures("_short")
def test_nats_of_a_table_are_in_units_of_standardised_columns_and_discrete_ones_have_none():
    rows = np.column_stack([LINE[:, 0], LINE[:, 1] > 0])
    score = partial(compare_density.nice_table, discrete="values")
    first, second = (score(each[40:], each[:40], 0) for each in (rows, rows * np.array([100, 7]) + 3))
    np.testing.assert_allclose(first, second, atol=0.02)


def test_the_true_densities_are_known():
    for law in (compare_known.one_gaussian, compare_known.three_gaussians):
        known = law(np.random.default_rng(0))
        gap = compare_known.trial(compare_known.mixture, known, 0)[""]["gap"]
        assert 0 < gap < 0.03


def test_imputation_errors_are_those_of_the_hidden_cells():
    truth, missing = np.array([[1.0, 10], [2, 20]]), np.array([[True, False], [False, True]])
    values, high = truth + np.array([[1, 99], [99, 10]]), truth + np.array([[1, 1], [1, -0.5]])
    guess = Guess(values, lambda: np.stack([truth - 1, high]), lambda truth: np.full(truth.shape, 2.0))
    found = measures(guess, truth, missing, np.array([1.0, 10]))
    assert found == pytest.approx({"rmse": 1.0, "coverage": 0.5, "width": (2 + 0.05) / 2, "crps": (2 + 0.2) / 2})


def test_draws_have_exact_intervals_and_scores():
    draws = np.random.default_rng(0).normal(size=(20, 20_000))
    low, high = ends(draws[:19])
    assert ((low <= draws[19]) & (draws[19] <= high)).mean() == pytest.approx(0.9, abs=0.01)
    truth = 0.7  # the CRPS of N(0, 1) is z (2 Φ(z) - 1) + 2 φ(z) - 1 / √π
    exact = truth * (2 * stats.norm.cdf(truth) - 1) + 2 * stats.norm.pdf(truth) - 1 / np.sqrt(np.pi)
    assert crps_of(draws, np.full(20_000, truth)).mean() == pytest.approx(exact, abs=0.005)
    assert compare_regression.gaussian(np.zeros(1), np.ones(1), np.array([truth])).crps == pytest.approx(exact)


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


def test_classes_are_labels_or_terciles_and_categories_become_columns():
    colours = Category("colour", "string", ("blue", "red"))
    table = Table(
        np.column_stack([np.arange(60.0), np.arange(60) % 2, np.arange(60.0)]), ("a", "c", "b"), texts={1: colours}
    )
    split = compare_classification.with_classes(table)
    assert np.array_equal(split.labels, np.repeat([0, 1, 2], 20))
    assert split.names == ("a", "c")
    known, _ = compare_classification.dummies(split, split.rows)
    assert np.array_equal(known[:, 1:] > 0, np.column_stack([np.arange(60) % 2 == 0, np.arange(60) % 2 == 1]))
    for name in ("boosting", "forest", "logistic regression"):
        found = compare_classification.trial(compare_classification.METHODS[name], table, 0)[""]
        assert found["accuracy"] > 0.8
        assert np.isfinite(found["log-loss"])


def test_classifiers_reach_the_accuracy_of_the_best_one():
    """N(0, 1) and N(1, 1): the AUC is Φ(1/√2) = 0.760; at distance 2 the accuracy is Φ(1) = 0.841."""
    real, same, moved = np.random.default_rng(0).normal(size=(3, 2000, 2))
    told_apart = partial(compare_synthesis.told_apart, table=Table(real), seed=0)
    assert told_apart(real, moved + np.array([1, 0])) == pytest.approx(0.760, abs=0.03)
    assert told_apart(real, same) < 0.53
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
