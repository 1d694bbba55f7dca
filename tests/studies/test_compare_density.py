"""The comparison of densities: the split, the units, and methods that find densities which are known."""

from functools import partial

import numpy as np
import pytest
from scipy import stats

from nicest import NICE
from nicest.studies import compare_density as module
from nicest.studies.compare_density import METHODS, standardised, trial, validation
from nicest.studies.datasets import Table


def test_a_fifth_is_tested_in_units_of_the_training_rows():
    rows = np.random.default_rng(0).normal([5, -3], [2, 0.1], size=(100, 2))
    seen = []

    def method(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
        seen.append((train, test))
        return stats.norm.logpdf(test).sum(1)

    found = trial(method, Table(rows), 1)
    (train, test), (again, _) = seen[0], (trial(method, Table(rows), 1), seen[-1])[1]
    assert (len(train), len(test)) == (80, 20)
    assert np.array_equal(train, again)
    np.testing.assert_allclose([train.mean(0), train.std(0)], [[0, 0], [1, 1]], atol=1e-12)
    order = np.random.default_rng(1).permutation(100)
    mean, spread = rows[order[20:]].mean(0), rows[order[20:]].std(0)
    expected = stats.norm.logpdf(rows[order[:20]], mean, spread).sum(1).mean() + np.log(spread).sum()
    assert found[""]["nats"] == pytest.approx(expected)


def test_a_column_that_is_constant_in_training_keeps_its_unit():
    train, test = standardised(np.full((4, 1), 7.0), np.array([[7.0], [9.0]]))
    assert train.ravel().tolist() == [0] * 4
    assert test.ravel().tolist() == [0, 2]


def test_rows_that_choose_are_not_fitted():
    rows = np.arange(200.0)[:, None]
    rest, valid = validation(rows, 0)
    assert (len(rest), len(valid)) == (150, 50)
    assert sorted(np.concatenate([rest, valid]).ravel()) == rows.ravel().tolist()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_a_known_density(method: str, monkeypatch: pytest.MonkeyPatch):
    """Two round clusters: within 0.3 nats of the truth, which one Gaussian misses by 0.9."""
    if method.startswith("zuko"):
        pytest.importorskip("zuko")
    monkeypatch.setattr(module, "STEPS", 200)
    monkeypatch.setattr(module, "BATCH", 200)
    monkeypatch.setattr(module, "NICE", partial(NICE, effort="low", law="additive"))
    rng = np.random.default_rng(0)
    centre = rng.choice([-3.0, 3.0], size=(1200, 1)) * np.ones((1, 2))
    train, test = np.split(centre + rng.normal(size=(1200, 2)), [1000])
    exact = np.logaddexp(*(stats.norm.logpdf(test, place).sum(1) for place in (-3, 3))) - np.log(2)
    scores = METHODS[method](*standardised(train, test), 0) - np.log(train.std(0)).sum()
    assert scores.shape == (200,)
    assert np.mean(exact - scores) == pytest.approx(0, abs=0.3)
    one = stats.multivariate_normal(train.mean(0), np.cov(train.T)).logpdf(test)
    assert np.mean(exact - one) > 0.8
