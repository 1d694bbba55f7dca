"""The statistics of calibration: ranks that are uniform, distances and bands as scipy has them, verdicts."""

import numpy as np
import pytest
from scipy import stats

from nicest.inference.calibration import (
    LEVELS,
    Calibration,
    Cells,
    band,
    effective,
    ks_distance,
    own_ranks,
    randomised_ranks,
)


def made(pit: np.ndarray, *, cell_pit: np.ndarray | None = None, density_pit: np.ndarray | None = None) -> Calibration:
    """A calibration of these PITs, a cell of every row and column; what is not given is evenly spread."""
    n, dim = pit.shape
    even = (np.arange(n) + 0.5) / n
    cells = np.tile(even, dim) if cell_pit is None else cell_pit
    row, column = np.arange(n * dim), np.repeat(np.arange(dim), n)
    names = tuple("abcdefgh"[:dim])
    density = even if density_pit is None else density_pit
    return Calibration(names, 10**6, pit, density, np.zeros(dim), Cells(row, column, cells, np.ones(n * dim)))


@pytest.mark.parametrize("ranks", [randomised_ranks, own_ranks])
@pytest.mark.parametrize("draw", [stats.norm(3, 2), stats.binom(3, 0.4), stats.randint(0, 2)])
def test_ranks_of_draws_among_draws_of_their_own_are_uniform(ranks, draw):
    rng = np.random.default_rng(0)
    values, draws = draw.rvs(4000, random_state=rng), draw.rvs((9, 4000), random_state=rng)
    if ranks is own_ranks:
        pit = own_ranks(values, draws, rng)
    else:
        pit = np.concatenate([randomised_ranks(values[[i]], draws[:, i], rng) for i in range(4000)])
    assert stats.kstest(pit, "uniform").pvalue > 0.01


def test_ranks_count_what_is_below_and_break_ties_at_random():
    rng = np.random.default_rng(0)
    draws = np.array([5.0, 1.0, 3.0, 3.0])
    pit = np.array([randomised_ranks(np.array([-np.inf, 3.0, 4.0, 9.0]), draws, rng) for _ in range(2000)])
    assert (pit.min(0) >= np.array([0, 1, 3, 4]) / 5).all()
    assert (pit.max(0) <= np.array([1, 4, 4, 5]) / 5).all()
    np.testing.assert_allclose(pit.mean(0), np.array([0.5, 2.5, 3.5, 4.5]) / 5, atol=0.02)


def test_distances_are_those_of_scipy():
    pit = np.random.default_rng(0).beta([1, 2, 0.5], [1, 1, 0.5], (70, 3))
    np.testing.assert_allclose(ks_distance(pit), [stats.kstest(each, "uniform").statistic for each in pit.T])


def test_a_band_holds_the_share_of_binomial_cells():
    shares = np.random.default_rng(0).binomial(300, 0.9, 100_000) / 300
    low, high = band(np.array(0.9), 300, 0.05)
    assert 0.94 < ((low <= shares) & (shares <= high)).mean() < 0.98


def test_cells_that_share_rows_count_for_fewer():
    inside = np.random.default_rng(0).random(500) < 0.8
    assert effective(inside, np.arange(500)) == 500
    assert effective(np.repeat(inside, 2), np.repeat(np.arange(500), 2)) == 500  # two cells alike in every row
    assert effective(np.ones(500, dtype=bool), np.arange(500)) == 500


class TestVerdict:
    def test_even(self):
        even = np.tile((np.arange(200)[:, None] + 0.5) / 200, 3)
        found = made(even)
        assert found.verdict.startswith("calibrated: 90% intervals hold 90% of the cells (chance allows 8")
        assert [(each.level, round(each.share, 2)) for each in found.coverage] == [(level, level) for level in LEVELS]
        assert made(even[2::5]).verdict.startswith("calibrated, as far as 40 rows can tell: 90% intervals hold")

    @pytest.mark.parametrize(("factor", "word"), [(1.6, "overconfident"), (0.6, "underconfident")])
    def test_cells_too_far_out_or_in(self, factor: float, word: str):
        even = (np.arange(200) + 0.5) / 200
        far = (0.5 + factor * (even - 0.5)).clip(0, 1)
        farther = (0.5 + factor**1.5 * (even - 0.5)).clip(0, 1)
        found = made(np.tile(even[:, None], 2), cell_pit=np.concatenate([far, farther]))
        assert found.verdict.startswith(f"{word}: ")
        assert "; worst column: 'b', " in found.verdict
        one = made(np.tile(even[:, None], 8), cell_pit=np.concatenate([farther, np.tile(even, 7)]))
        assert one.verdict.startswith((f"{word}: ", f"{word} in column 'a': "))
        assert "'a'" in one.verdict

    def test_one_column_among_many(self):
        even = (np.arange(100) + 0.5) / 100
        wide, narrow = 0.5 + (even - 0.5) / 1.3, (0.5 + 1.3 * (even - 0.5)).clip(0, 1)
        found = made(np.tile(even[:, None], 8), cell_pit=np.concatenate([wide, np.tile(even, 6), narrow]))
        assert found.verdict.startswith(
            "overconfident in column 'h': 95% intervals hold 74% of its cells (chance allows"
        )

    @pytest.mark.parametrize(
        ("power", "start"),
        [(2, "overconfident in the joint: rows have a lower"), (0.5, "underconfident in the joint: rows")],
    )
    def test_log_densities(self, power: float, start: str):
        even = (np.arange(200) + 0.5) / 200
        assert made(even[:, None], density_pit=even**power).verdict.startswith(start)

    def test_a_column_that_is_off(self):
        even = (np.arange(200) + 0.5) / 200
        verdict = made(np.stack([even, even**2], 1)).verdict
        assert verdict.startswith("not calibrated: column 'b' is not distributed as in samples (KS distance 0.25")
