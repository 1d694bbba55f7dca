"""Distributions in a column's own unit, against scipy and sums."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from exact import number_head
from scipy import stats

from nicest import NICETable
from nicest.data.columns import Schema
from nicest.data.kinds import Category, Integer, Real
from nicest.tables.heads import Categories
from nicest.tables.marginal import Marginal


def real(offset: float, scale: float, n: int = 3) -> Marginal:
    """One logistic of location .25 and scale .5, in a unit."""
    column = Real("x", "double", offset - scale, offset + scale, offset, scale)
    head = number_head([0.25], [math.log(0.5)], [0.0], unit=scale).rows(torch.zeros(n, dtype=torch.long))
    return Marginal(column, head)


class TestReal:
    @pytest.mark.parametrize(
        ("offset", "scale"), [(0.0, 1.0), (-3e3, 250.0), (1e12, 40.0), (0.0, 1e300), (0.0, 1e-300)]
    )
    def test_everything_is_in_the_columns_unit(self, offset: float, scale: float, refusal: Callable[..., str]):
        marginal = real(offset, scale)
        middle, unit = offset + 0.25 * scale, 0.5 * scale
        slack = 1e-6 * scale + 1e-15 * abs(offset)
        for found in (marginal.mean(), marginal.median(), marginal.best() * scale + offset):
            np.testing.assert_allclose(found, middle, rtol=0, atol=slack)
        np.testing.assert_allclose(marginal.std() / unit, math.pi / math.sqrt(3), rtol=1e-3)
        for share in (0.001, 0.2, 0.9):
            exact = middle + unit * math.log(share / (1 - share))  # scipy overflows
            np.testing.assert_allclose(marginal.quantile(share), exact, rtol=0, atol=slack)
        quartiles = [middle - unit * math.log(3), middle + unit * math.log(3)]
        np.testing.assert_allclose(marginal.interval(0.5), [quartiles] * 3, rtol=0, atol=slack)
        x = middle + unit * np.array([-2.0, 0.0, 3.0])
        z = (x - middle) / unit
        np.testing.assert_allclose(marginal.cdf(x), stats.logistic.cdf(z), rtol=1e-5)
        np.testing.assert_allclose(marginal.log_prob(x), stats.logistic.logpdf(z) - math.log(unit), rtol=1e-5)
        exact = z - 2 * stats.logistic.logcdf(z) - 1  # the CRPS of a logistic in closed form
        np.testing.assert_allclose(marginal.crps(x) / unit, exact, rtol=0.02)
        drawn = marginal.sample(300, seed=1)
        assert drawn.shape == (3, 300)
        assert stats.kstest((drawn.reshape(-1) - middle) / unit, "logistic").pvalue > 1e-4
        np.testing.assert_array_equal(drawn, marginal.sample(300, seed=1))
        assert "has a density" in refusal(marginal.probabilities)
        assert marginal.quantile([0.1, 0.5]).shape == (3, 2)

    def test_many_rows_are_computed_in_parts(self, monkeypatch: pytest.MonkeyPatch):
        marginal = real(5.0, 2.0, n=7)
        y = np.linspace(2, 9, 7)
        whole = [marginal.mean(), marginal.quantile(0.3), marginal.crps(y), marginal.cdf(y), marginal.log_prob(y)]
        monkeypatch.setattr("nicest.tables.marginal.AT_ONCE", 3)
        parts = [marginal.mean(), marginal.quantile(0.3), marginal.crps(y), marginal.cdf(y), marginal.log_prob(y)]
        for one, other in zip(whole, parts, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_spikes(self):
        """A third at 0, the rest above it: at 0 the distribution function jumps and the density is a probability."""
        column = Real("rain", "double", 0.0, 50.0, 12.3, 4.7, spikes=(0.0,), floor=0.0)
        zero = float(np.float32(column.code(0.0)))
        head = number_head([0.0], [0.0], [0.0, math.log(2)], atoms=(zero,), low=zero, unit=4.7)
        marginal = Marginal(column, head)
        assert marginal.cdf(0.0) == pytest.approx([1 / 3])
        assert marginal.cdf(-1e-3) == pytest.approx([0])
        assert np.exp(marginal.log_prob(0.0)) == pytest.approx([1 / 3])
        assert marginal.quantile(0.2) == pytest.approx([0.0], abs=1e-5)
        rest = stats.logistic(12.3, 4.7)
        share = (rest.cdf(15.0) - rest.cdf(0.0)) / rest.sf(0.0)
        assert marginal.cdf(15.0) == pytest.approx([1 / 3 + 2 / 3 * share], rel=1e-5)
        assert np.mean(marginal.sample(300) == 0.0) == pytest.approx(1 / 3, abs=0.08)


def test_integers():
    """Steps of 2 from 10: every number has the probability of the interval around it, numbers between have none."""
    column = Integer("age", "int64", 0.0, 60.0, 30.0, 10.0, step=2.0, decimals=0)
    marginal = Marginal(column, number_head([0.1], [-1.0], [0.0], step=0.2))
    truth = stats.logistic(31, 10 * math.exp(-1))
    x = np.arange(-200, 262, 2.0)
    p = truth.cdf(x + 1) - truth.cdf(x - 1)
    assert np.exp(marginal.log_prob(34)) == pytest.approx([p[x == 34].item()], rel=1e-5)
    assert np.isneginf(marginal.log_prob(33))
    for at in (34, 34.5, 35.9):
        assert marginal.cdf(at) == pytest.approx([p[x <= 34].sum()])
    assert marginal.mean() == pytest.approx([x @ p], abs=0.01)
    assert marginal.std() == pytest.approx([math.sqrt((x - x @ p) ** 2 @ p)], rel=0.01)
    assert marginal.median() == x[np.searchsorted(p.cumsum(), 0.5)]
    assert marginal.crps(40) == pytest.approx([2 * ((p.cumsum() - (x >= 40)) ** 2).sum()], rel=0.02)
    assert set(marginal.sample(500)[0] % 2) == {0.0}
    upper, lower = (marginal.cdf_of(np.array([0.4]), strict=strict) for strict in (False, True))
    assert upper - lower == pytest.approx([p[x == 34].item()], rel=1e-5)


class TestCategories:
    P = np.array([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]])
    HEAD = Categories(torch.from_numpy(P).log())

    def test_numbers_in_order(self):
        values = np.array([-1.0, 2.0, 10.0])
        marginal = Marginal(Category("n", "double", tuple(values.tolist())), self.HEAD)
        mean = self.P @ values
        np.testing.assert_allclose(marginal.mean(), mean)
        np.testing.assert_allclose(marginal.std(), np.sqrt(self.P @ values**2 - mean**2))
        quantiles = marginal.quantile([0.05, 0.3, 0.31, 0.5, 0.75])
        np.testing.assert_array_equal(quantiles, [[-1, 2, 10, 10, 10], [-1, -1, -1, -1, 2]])
        for x in (-2.0, -1.0, 3.5, 10.0):
            np.testing.assert_allclose(marginal.cdf(x), (self.P * (values <= x)).sum(1))
        np.testing.assert_allclose(marginal.log_prob([2.0, 2.5]), [math.log(0.2), -math.inf])
        np.testing.assert_allclose(marginal.probabilities(), self.P)
        grid = np.linspace(-5, 15, 20_001)
        for y in (-3.0, 2.0, 5.0, 12.0):
            levels = (self.P[:, :, None] * (values[:, None] <= grid)).sum(1)
            exact = ((levels - (grid >= y)) ** 2).sum(1) * 0.001
            np.testing.assert_allclose(marginal.crps(y), exact, atol=0.003)
        np.testing.assert_allclose(marginal.cdf_of(np.array([1.0, 0.0])), [0.3, 0.5])
        np.testing.assert_allclose(marginal.cdf_of(np.array([1.0, 0.0]), strict=True), [0.1, 0.0])
        assert set(marginal.sample(50).reshape(-1)) <= set(values)

    def test_texts_have_probabilities_alone(self, refusal):
        marginal = Marginal(Category("c", "string", ("a", "b", "d")), self.HEAD)
        assert not marginal.numeric
        for question in (marginal.mean, marginal.std, marginal.median, marginal.interval):
            assert "no numbers" in refusal(question)
        np.testing.assert_allclose(marginal.log_prob("d"), np.log([0.7, 0.25]))
        np.testing.assert_allclose(marginal.log_prob(np.array(["a", "x"], dtype=object)), [math.log(0.1), -math.inf])
        assert marginal.best().tolist() == [2, 0]
        assert set(marginal.sample(50).reshape(-1)) == {"a", "b", "d"}


def test_a_schema_of_extreme_columns_round_trips():
    columns = [
        Real("a", "double", 1e12 - 5, 1e12 + 5, 1e12, 2.0),
        Real("b", "double", -1e300, 1e300, 0.0, 5e299),
        Real("c", "double", -1e-300, 1e-300, 0.0, 5e-301),
    ]
    x = np.array([[1e12 - 4.25, -7.5e299, 2.5e-301], [1e12 + 1, 1e300, -1e-300]])
    rows = Schema(columns).encode(x)
    assert np.isfinite(rows).all()
    back = np.column_stack([column.plain(codes) for column, codes in zip(columns, rows.T, strict=True)])
    np.testing.assert_allclose(back, x, rtol=1e-6)
    assert abs(columns[0].plain(rows[:, 0]) - x[:, 0]).max() < 1e-3


def test_an_interval_holds_the_spike_that_it_ends_at():
    x = np.where(np.arange(400) % 2, 0.0, np.random.default_rng(0).exponential(size=400).round(3)) / 7 - 0.3
    model = NICETable(effort="low", random_state=0).fit(np.column_stack((x, np.arange(400.0) % 5)))
    low, high = model.predict_interval(np.full((1, 2), np.nan), 0)[0]
    assert low == -0.3 < high  # and not the number that float32 makes of it
