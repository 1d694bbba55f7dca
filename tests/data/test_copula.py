"""Missing cells filled in for a start: draws from a Gaussian copula."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats

from nicest.data import copula

CONTINUOUS = np.zeros(3, dtype=bool)


def fill(rows: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """All rows, in their order."""
    holed, filled = np.isnan(rows).any(1), rows.copy()
    filled[holed] = copula.fill(rows[~holed], rows[holed], whole)
    return filled


def by_the_first(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three correlated columns, and holes in the second wherever the first is large: at random, given the first."""
    rng = np.random.default_rng(seed)
    covariance = np.array([[1.0, 0.8, 0.3], [0.8, 1.0, 0.5], [0.3, 0.5, 1.0]])
    rows = rng.multivariate_normal(np.zeros(3), covariance, n)
    missing = np.zeros(rows.shape, dtype=bool)
    missing[:, 1] = rng.random(n) < 1 / (1 + np.exp(-3 * rows[:, 0]))
    return rows, missing


def test_the_covariance_is_that_of_maximum_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    """With holes in one column alone, that is a regression on the others: Anderson (1957)."""
    rows, missing = by_the_first(2000)
    seen, there = rows[:, [0, 2]], ~missing[:, 1]
    mean, covariance = seen.mean(0), np.cov(seen.T, bias=True)
    design = np.column_stack([np.ones(there.sum()), seen[there]])
    weights = np.linalg.lstsq(design, rows[there, 1])[0]
    noise = np.mean((rows[there, 1] - design @ weights) ** 2)
    slope = weights[1:]
    monkeypatch.setattr(copula, "ROUNDS", 300)
    monkeypatch.setattr(copula, "RIDGE", 0)
    monkeypatch.setattr(copula, "SETTLED", 0)
    found_mean, found = copula.fit(np.where(missing, np.nan, rows))
    assert found_mean[1] == pytest.approx(weights[0] + slope @ mean, abs=1e-6)
    np.testing.assert_allclose(found[1, [0, 2]], covariance @ slope, atol=1e-6)
    assert found[1, 1] == pytest.approx(noise + slope @ covariance @ slope, abs=1e-6)


def test_scores_are_those_of_the_ranks_of_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, missing = by_the_first(50)
    holed, scores = np.where(missing, np.nan, rows), []
    fit = copula.fit
    monkeypatch.setattr(copula, "fit", lambda each: scores.append(each) or fit(each))
    monkeypatch.setattr(np.random, "default_rng", lambda seed: InOrder(np.random.PCG64(seed)))
    fill(holed, CONTINUOUS)
    together = np.concatenate([holed[~missing.any(1)], holed[missing.any(1)]])
    ranks = stats.rankdata(together, axis=0, nan_policy="omit")
    expected = stats.norm.ppf((ranks - 0.5) / (~np.isnan(together)).sum(0))
    np.testing.assert_allclose(scores[0], expected, atol=1e-12)


class InOrder(np.random.Generator):
    """A generator that leaves rows in their order."""

    def permutation(self, n: int) -> np.ndarray:
        return np.arange(n)


def test_draws_have_the_law_that_whole_rows_hide() -> None:
    rows, missing = by_the_first(20_000)
    holed = np.where(missing, np.nan, rows)
    assert holed[~missing.any(1)].mean(0)[1] < -0.4  # of the whole rows alone: far from 0
    filled = fill(holed, CONTINUOUS)
    np.testing.assert_allclose(filled.mean(0), rows.mean(0), atol=0.06)
    np.testing.assert_allclose(np.cov(filled.T), np.cov(rows.T), atol=0.1)
    away = ((filled - rows)[missing[:, 1], 1], np.sqrt(2 * (1 - 0.8**2)))  # two draws of one conditional law
    assert np.std(away[0]) == pytest.approx(away[1], rel=0.15)


def test_skewed_and_whole_columns_keep_their_marginals() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=4000)
    rows = np.column_stack([np.exp(2 * base), np.floor(2 * base).clip(-2, 2), base + rng.normal(size=4000)])
    missing = rng.random(rows.shape) < 0.3
    filled = fill(np.where(missing, np.nan, rows), np.array([False, True, False]))
    assert set(filled[:, 1]) == {-2.0, -1.0, 0.0, 1.0, 2.0}
    for d in range(3):
        assert stats.ks_2samp(filled[missing[:, d], d], rows[missing[:, d], d]).statistic < 0.06
    alone = missing[:, 0] & ~missing[:, 1]
    assert stats.spearmanr(filled[alone, 0], rows[alone, 1]).statistic > 0.6  # of 0.95, without the noise among equals


@settings(max_examples=100, deadline=None)
@given(
    rows=arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 12), st.integers(1, 5)),
        elements=st.floats(-1e6, 1e6, width=32) | st.just(float("nan")),
    ),
)
def test_what_is_there_stays_and_the_rest_lies_among_its_column(rows: np.ndarray) -> None:
    rows[0] = np.nan_to_num(rows[0])  # every column has a cell that is there
    whole = np.arange(rows.shape[1]) % 2 == 1
    missing = np.isnan(rows)
    filled = fill(rows, whole)
    assert filled.dtype == rows.dtype
    np.testing.assert_array_equal(filled[~missing], rows[~missing])
    for d in range(rows.shape[1]):
        column = rows[~missing[:, d], d]
        beyond = np.ptp(column.astype(float)) if len(column) >= 10 and not whole[d] else 0.0
        assert (column.min() - beyond <= filled[:, d]).all()
        assert (filled[:, d] <= column.max() + beyond).all()
        assert not whole[d] or set(filled[:, d]) <= set(column)
    np.testing.assert_array_equal(fill(rows, whole), filled)


def test_cells_that_are_missing_because_they_are_large_are_drawn_beyond_the_others() -> None:
    rng = np.random.default_rng(0)
    rows = rng.multivariate_normal(np.zeros(2), [[1, 0.95], [0.95, 1]], 4000)
    missing = np.zeros(rows.shape, dtype=bool)
    missing[:, 1] = rows[:, 0] > 0.7
    filled = fill(np.where(missing, np.nan, rows), CONTINUOUS[:2])
    assert rows[missing].max() > rows[~missing[:, 1], 1].max() + 0.5
    assert filled[missing].mean() > 0.65 * rows[missing].mean()
    assert filled[missing].max() > rows[~missing[:, 1], 1].max() + 0.5


def test_many_rows_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, missing = by_the_first(300)
    holed = np.where(missing, np.nan, rows)
    expected = copula.fit(holed)
    monkeypatch.setattr(copula, "AT_ONCE", 7)
    for found, each in zip(copula.fit(holed), expected, strict=True):
        np.testing.assert_allclose(found, each, atol=1e-10)
    filled = fill(holed, CONTINUOUS)
    assert np.isfinite(filled).all()
    assert np.corrcoef(filled[missing], rows[missing])[0, 1] > 0.3


def test_what_is_expected_is_so_whatever_is_missing() -> None:
    """Against the conditional of a Gaussian by its covariance, row by row."""
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(6, 6))
    mean, covariance = rng.normal(size=6), mixing @ mixing.T + np.eye(6)
    scores = rng.multivariate_normal(mean, covariance, 50)
    scores[rng.random(scores.shape) < 0.4] = np.nan
    scores[0], seen = np.nan, set()
    for part in copula.conditional(scores, mean, covariance):
        for row, places, counts, expected, root in zip(*part, strict=True):
            gone, there = places[counts], ~np.isnan(scores[row])
            assert set(gone) == set(np.flatnonzero(~there))
            weights = covariance[np.ix_(gone, there)] @ np.linalg.inv(covariance[np.ix_(there, there)])
            np.testing.assert_allclose(expected[counts], mean[gone] + weights @ (scores[row] - mean)[there], atol=1e-9)
            left = covariance[np.ix_(gone, gone)] - weights @ covariance[np.ix_(there, gone)]
            np.testing.assert_allclose((root @ root.T)[np.ix_(counts, counts)], left, atol=1e-9)
            seen.add(row)
    assert seen == set(np.flatnonzero(np.isnan(scores).any(1)))


def test_the_widest_tables_are_filled_in() -> None:
    wide = np.random.default_rng(0).normal(size=(40, 200))
    wide[np.arange(40), np.arange(40)] = np.nan
    assert np.isfinite(fill(wide, np.zeros(200, dtype=bool))).all()
