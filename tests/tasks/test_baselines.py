"""The linear baselines against scipy and numpy on the same numbers, and against densities that are known."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from nicest.data import Splits
from nicest.recipes.recipe import DataSettings
from nicest.tasks.baselines import NAMES, baselines, fit_prior, linear_flow

CPU = torch.device("cpu")
Noise = dict[int, np.ndarray]  # by the number of rows it is for


def logistic_mle(column: np.ndarray) -> tuple[float, float]:
    """Location and scale of the logistic of largest likelihood, by scipy's optimiser."""

    def loss(at: np.ndarray) -> float:
        return -float(stats.logistic.logpdf(column, at[0], math.exp(at[1])).mean())

    start = [np.median(column), math.log(column.std() * math.sqrt(3) / math.pi)]
    found = optimize.minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12})
    return float(found.x[0]), float(np.exp(found.x[1]))


def logistic_score(train: np.ndarray, test: np.ndarray) -> float:
    fitted = [logistic_mle(column) for column in train.T]
    return float(sum(stats.logistic.logpdf(c, *fit).mean() for c, fit in zip(test.T, fitted, strict=True)))


def zca(covariance: np.ndarray) -> tuple[np.ndarray, float]:
    """The whitening matrix and the log of its determinant."""
    values, vectors = np.linalg.eigh(covariance)
    whiten = vectors @ np.diag(values**-0.5) @ vectors.T
    return whiten, float(np.linalg.slogdet(whiten).logabsdet)


def continuous(train: np.ndarray, test: np.ndarray) -> tuple[Splits, DataSettings]:
    train, test = train.astype(np.float32), test.astype(np.float32)
    dim = train.shape[1]
    return Splits("rows", train, test, test, (dim,), None), DataSettings(shape=(dim,), levels=0)


@pytest.fixture(scope="module")
def table() -> tuple[np.ndarray, np.ndarray]:
    """Correlated rows with long and with skew tails, on scales a thousand times apart."""
    rng = np.random.default_rng(0)
    sources = np.stack([rng.standard_normal(900), rng.logistic(size=900), rng.gamma(2, size=900)], axis=1)
    rows = sources @ rng.standard_normal((3, 3)) * [1, 30, 0.03] + [0, 100, 1]
    return rows[:600].astype(np.float32).astype(np.float64), rows[600:].astype(np.float32).astype(np.float64)


@pytest.fixture(scope="module")
def scores(table: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    splits, data = continuous(*table)
    return baselines(splits, "test", data, CPU)


class TestContinuous:
    def test_are_scipy_s(self, table: tuple[np.ndarray, np.ndarray], scores: dict[str, float]):
        train, test = table
        diagonal = stats.norm.logpdf(test, train.mean(0), train.std(0)).sum(1).mean()
        full = stats.multivariate_normal(train.mean(0), np.cov(train.T, ddof=0)).logpdf(test).mean()
        expected = {"diagonal_gaussian": diagonal, "full_gaussian": full, "factorial_logistic": logistic_score(*table)}
        assert tuple(scores) == NAMES
        assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=1e-5)

    def test_zca_logistic_is_numpy_s(self, table: tuple[np.ndarray, np.ndarray], scores: dict[str, float]):
        mean, size = table[0].mean(0), table[0].std(0)
        train, test = ((rows - mean) / size for rows in table)
        whiten, log_det = zca(np.cov(train.T, ddof=0))
        expected = logistic_score(train @ whiten, test @ whiten) + log_det - np.log(size).sum()
        assert scores["zca_logistic"] == pytest.approx(expected, abs=1e-5)

    def test_the_named_split_is_scored(self, table: tuple[np.ndarray, np.ndarray], scores: dict[str, float]):
        train, _ = table
        splits, data = continuous(*table)
        expected = stats.norm.logpdf(train, train.mean(0), train.std(0)).sum(1).mean()
        on_train = baselines(splits, "train", data, CPU)
        assert on_train["diagonal_gaussian"] == pytest.approx(expected, abs=1e-5)
        assert on_train["diagonal_gaussian"] != pytest.approx(scores["diagonal_gaussian"], abs=1e-3)


class TestLevels:
    """Dequantised data: the noise is known to scipy too, and every score is on the recipe's interval."""

    D = 6

    @pytest.fixture
    def levels(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(1)
        rows = rng.logistic(size=(700, self.D)) @ rng.standard_normal((self.D, self.D)) * 9 + 120
        rows = np.clip(rows, 0, 255).astype(np.uint8)
        rows[:, 0] = 0  # a pixel that is always black: only the noise gives it spread
        return rows[:500], rows[500:]

    @pytest.fixture
    def noise(self, levels: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> Noise:
        rng = np.random.default_rng(2)
        drawn = {len(rows): rng.random(rows.shape).astype(np.float32) for rows in levels}
        monkeypatch.setattr(torch, "rand", lambda shape, generator, **options: torch.tensor(drawn[shape[0]], **options))
        return drawn

    def on_interval(self, rows: np.ndarray, noise: Noise, low: float, high: float) -> np.ndarray:
        return low + (high - low) * (rows + noise[len(rows)].astype(np.float64)) / 256

    @pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0)])
    def test_all_four_are_scipy_s_and_numpy_s(
        self, levels: tuple[np.ndarray, np.ndarray], noise: Noise, low: float, high: float
    ):
        splits = Splits("levels", levels[0], levels[1], levels[1], (2, 3), 256)
        scores = baselines(splits, "test", DataSettings(shape=(2, 3), levels=256, interval=(low, high)), CPU)

        train, test = (self.on_interval(rows, noise, low, high) for rows in levels)
        assert scores["diagonal_gaussian"] == pytest.approx(
            stats.norm.logpdf(test, train.mean(0), train.std(0)).sum(1).mean(), abs=1e-4
        )
        assert scores["factorial_logistic"] == pytest.approx(logistic_score(train, test), abs=1e-4)

        # the noise enters the covariance exactly: 1/12 of a level squared, and 1/2 the mean
        unit = (high - low) / 256
        mean = low + unit * (levels[0].mean(0) + 0.5)
        covariance = unit**2 * (np.cov(levels[0].T.astype(np.float64), ddof=0) + np.eye(self.D) / 12)
        gaussian = stats.multivariate_normal(mean, covariance).logpdf(test).mean()
        assert scores["full_gaussian"] == pytest.approx(gaussian, abs=1e-4)
        whiten, log_det = zca(covariance)
        logistic = logistic_score((train - mean) @ whiten, (test - mean) @ whiten) + log_det
        assert scores["zca_logistic"] == pytest.approx(logistic, abs=1e-4)


class TestFitPrior:
    def fit(self, name: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flow = linear_flow(name, DataSettings(shape=(rows.shape[1],), levels=0)).double()
        fit_prior(flow, torch.from_numpy(rows))
        return flow.prior.loc.detach().numpy(), flow.prior.log_scale.exp().detach().numpy()

    @pytest.mark.parametrize("share", [0.5, 0.1, 0.01], ids=["half", "tenth", "hundredth"])
    def test_logistic_is_maximum_likelihood_for_pixels_that_are_mostly_black(self, share: float):
        rng = np.random.default_rng(8)
        lit = rng.random((4000, 1)) < share
        rows = (np.where(lit, rng.integers(128, 256, (4000, 1)), 0) + rng.random((4000, 1))) / 256
        loc, scale = self.fit("factorial_logistic", rows)
        best = stats.logistic.logpdf(rows[:, 0], *logistic_mle(rows[:, 0])).mean()
        assert stats.logistic.logpdf(rows[:, 0], loc[0], scale[0]).mean() == pytest.approx(best, abs=1e-4)

    def test_logistic_has_scores_of_zero_at_its_end(self):
        rows = np.random.default_rng(9).standard_t(3, size=(2000, 3)) * [1, 5, 0.2]
        loc, scale = self.fit("factorial_logistic", rows)
        e = (rows - loc) / scale
        np.testing.assert_allclose(np.tanh(e / 2).mean(0), 0, atol=1e-6)
        np.testing.assert_allclose((e * np.tanh(e / 2)).mean(0), 1, atol=1e-6)

    def test_is_the_same_in_batches(self, monkeypatch: pytest.MonkeyPatch):
        rows = np.random.default_rng(10).logistic(size=(500, 3))
        whole = self.fit("factorial_logistic", rows)
        monkeypatch.setattr("nicest.inference.engine.BATCH", 64)
        np.testing.assert_allclose(self.fit("factorial_logistic", rows), whole, rtol=1e-12)

    @pytest.mark.parametrize("name", ["diagonal_gaussian", "factorial_logistic"])
    def test_a_column_without_spread_is_refused(self, name: str):
        rows = np.random.default_rng(11).standard_normal((50, 3))
        rows[:, 1] = 2.0
        with pytest.raises(ValueError, match="no spread"):
            self.fit(name, rows)


def test_dependent_columns_take_only_the_baselines_that_need_their_inverse():
    rows = np.random.default_rng(12).standard_normal((60, 4))
    rows[:, 3] = rows[:, 0]
    splits, data = continuous(rows[:50], rows[50:])
    scores = baselines(splits, "test", data, CPU)
    assert {name for name, nats in scores.items() if math.isnan(nats)} == {"full_gaussian", "zca_logistic"}
    assert math.isfinite(scores["diagonal_gaussian"])


def test_more_draws_bring_the_error_of_a_baseline_down():
    rows = np.random.default_rng(13).integers(0, 4, (60, 5)).astype(np.uint8)
    splits = Splits("levels", rows[:40], rows[40:50], rows[50:], (5,), 4)
    data = DataSettings(shape=(5,), levels=4)

    def spread(draws: int) -> float:
        return float(np.std([baselines(splits, "test", data, CPU, draws=draws)["full_gaussian"] for _ in range(8)]))

    assert spread(64) < spread(1) / 3
