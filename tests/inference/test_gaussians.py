"""Mixtures of Gaussians beside a flow, against scipy's densities."""

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from nicest.inference.gaussians import FLOOR, Gaussians


def rows(n: int = 300, dim: int = 3) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, dim)) @ rng.normal(size=(dim, dim)) + np.where(rng.random((n, 1)) < 0.5, 5, -5)


def test_it_is_the_mean_of_the_log_densities_of_mixtures():
    x = rows()
    found, at = Gaussians.fit(x, 0), x[:20] * 1.3
    assert found.sizes.tolist() == [1, 2, 4, 8, 16, 32]
    y, expected, start = (at - x.mean(0)) / x.std(0), [], 0
    for size in found.sizes:
        part = slice(start, start + size)
        covariances = np.linalg.inv(found.roots[part] @ found.roots[part].transpose(0, 2, 1))
        each = [multivariate_normal(c, v).logpdf(y) for c, v in zip(found.centres[part], covariances, strict=True)]
        assert found.weights[part].sum() == pytest.approx(1)
        expected.append(logsumexp(each, axis=0, b=found.weights[part][:, None]))
        start += size
    np.testing.assert_allclose(found.log_prob(at), np.mean(expected, 0))


def test_of_one_component_it_is_the_gaussian_of_mean_and_covariance():
    x = rows(7)
    found = Gaussians.fit(x, 0)
    assert found.sizes.tolist() == [1]
    y = (x - x.mean(0)) / x.std(0)
    truth = multivariate_normal(np.zeros(3), np.cov(y.T, bias=True) + FLOOR**2 * np.eye(3))
    np.testing.assert_allclose(found.log_prob(x), truth.logpdf(y))


def test_no_direction_is_narrower_than_the_floor_and_the_order_of_rows_does_not_matter():
    x = np.column_stack([rows(200, 2), np.zeros(200)])
    x[:150, 0] = 1  # most of a column, and all of another
    found, again = Gaussians.fit(x, 0), Gaussians.fit(x[::-1], 0)
    widest = np.linalg.eigvalsh(found.roots @ found.roots.transpose(0, 2, 1)).max()
    assert widest <= 1 / FLOOR**2 * (1 + 1e-9)
    np.testing.assert_allclose(found.log_prob(x), again.log_prob(x))


def test_a_row_beyond_all_numbers_has_no_density():
    far = np.array([[1e200, 0, 0], [np.finfo(float).max, -np.finfo(float).max, 0]])
    assert np.isneginf(Gaussians.fit(rows(), 0).log_prob(far)).all()
