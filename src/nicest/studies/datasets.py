"""Tables that come with scikit-learn or are drawn from a formula, as continuous rows: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import stats
from sklearn import datasets

Generator = np.random.Generator


def _dequantised(x: np.ndarray, step: np.ndarray | float, rng: Generator) -> np.ndarray:
    """Values that were rounded to multiples of `step`, spread over it evenly: else their density is infinite."""
    return x + step * rng.uniform(-0.5, 0.5, x.shape)


def _diabetes(rng: Generator) -> np.ndarray:
    """Nine columns of scikit-learn's diabetes, all but the sex."""
    x = np.delete(datasets.load_diabetes(scaled=False).data, 1, axis=1)
    return _dequantised(x, np.array([1, 0.1, 1, 1, 0.2, 1, 0.01, 0.0001, 1]), rng)


def _copula(rng: Generator, n: int = 2_000, dim: int = 8) -> np.ndarray:
    """A Gaussian copula under Student's t of 2.5 degrees of freedom, in columns of different units."""
    mixing = rng.normal(size=(dim, dim + 2))
    covariance = mixing @ mixing.T
    spread = np.sqrt(covariance.diagonal())
    z = rng.multivariate_normal(np.zeros(dim), covariance / np.outer(spread, spread), size=n)
    return stats.t(2.5).ppf(stats.norm.cdf(z)) * 10.0 ** rng.uniform(-1, 2, dim)


def _houses(rng: Generator, n: int = 4_000) -> np.ndarray:
    """In the manner of California's districts: incomes, ages, rooms, people, two coasts, values that hang on them."""
    latitude = np.where(rng.random(n) < 0.55, rng.normal(34, 0.6, n), rng.normal(37.8, 0.7, n))
    longitude = -119.5 - 0.85 * (latitude - 36) + rng.normal(0, 0.5, n)
    income = rng.lognormal(1.2, 0.45, n)
    age = np.clip(rng.normal(28, 12, n) - 2 * np.abs(longitude + 119), 1, None) + 3 * rng.random(n)
    rooms = np.exp(1.5 + 0.12 * income**0.7 + rng.normal(0, 0.2, n))
    bedrooms = 0.2 * rooms * np.exp(rng.normal(0, 0.08, n))
    people, each = rng.lognormal(7, 0.7, n), np.exp(1.05 + 0.15 * rng.standard_t(3, n))
    value = np.exp(0.7 * np.log(income) + 0.4 * np.exp(-((latitude - 37.8) ** 2)) + rng.normal(0, 0.3, n))
    return np.column_stack([income, age, rooms, bedrooms, people, each, latitude, longitude, value])


TABLES: dict[str, Callable[[Generator], np.ndarray]] = {
    "iris": lambda rng: _dequantised(datasets.load_iris().data, 0.1, rng),
    "wine": lambda rng: _dequantised(datasets.load_wine().data, 0.01, rng),
    "diabetes": _diabetes,
    "breast_cancer": lambda rng: datasets.load_breast_cancer().data,
    "digits": lambda rng: _dequantised(datasets.load_digits().data, 1.0, rng),
    "moons": lambda rng: datasets.make_moons(1_000, noise=0.1, random_state=int(rng.integers(1 << 31)))[0],
    "copula": _copula,
    "houses": _houses,
}
