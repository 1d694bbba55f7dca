"""Calibration against flows whose distributions are known, and of the runs of every kind of data."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import nicest
from nicest import NICE, Run
from nicest.data.cells import Batch
from nicest.data.columns import Column
from nicest.errors import NicestError
from nicest.flows import Chain, Flow, Gaussian, OneHot, TriangularAffine, Units
from nicest.inference.calibration import Calibration
from nicest.tasks.calibrate import calibrate, calibration, hidden_cells, plain_columns

LONG = {"cells": 600, "draws": 200, "steps": 400}
QUICK = {"cells": 24, "draws": 16, "steps": 20}
MEAN = np.array([-20.0, 3.0, 0.5])
ROOT = np.array([[2.0, 0, 0], [1.0, 0.3, 0], [-4.0, 1.0, 5.0]])


@pytest.fixture(scope="module")
def gaussian() -> Flow:
    """A Gaussian of three correlated columns."""
    covariance = torch.from_numpy(ROOT @ ROOT.T)
    whitening = TriangularAffine(3).double()
    whitening.fit_moments(torch.from_numpy(MEAN), covariance)
    return Flow(Units.continuous(3, standardise=False), Chain(whitening), Gaussian(3)).double()


def drawn(n: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    """Rows of the Gaussian, with another scale."""
    return MEAN + scale * np.random.default_rng(seed).standard_normal((n, 3)) @ ROOT.T


def known(rows: np.ndarray) -> Batch:
    return Batch(rows, np.zeros(len(rows), dtype=bool))


@pytest.fixture(scope="module", params=[1.0, 1.5, 1 / 1.5], ids=["right", "too narrow", "too wide"])
def scaled(request: pytest.FixtureRequest, gaussian: Flow) -> tuple[float, np.ndarray, Calibration]:
    """Rows of another scale than the model's, and how it is calibrated on them."""
    rows = drawn(1500, request.param)
    return request.param, rows, calibration(gaussian, known(rows), plain_columns(3), **LONG)


class TestOfAGaussian:
    def test_verdict(self, scaled: tuple[float, np.ndarray, Calibration]):
        scale, _, found = scaled
        expected = {1.0: "calibrated: 90%", 1.5: "overconfident: 9", 1 / 1.5: "underconfident: 5"}
        assert found.verdict.startswith(expected[scale])
        assert found.poor == 0

    def test_coverage_is_that_of_the_closed_form(self, scaled: tuple[float, np.ndarray, Calibration]):
        """A central interval of the model is ±z σ; a cell of the rows has standard deviation scale σ."""
        scale, _, found = scaled
        for each in found.coverage:
            truth = 2 * stats.norm.cdf(stats.norm.ppf((1 + each.level) / 2) / scale) - 1
            assert stats.binomtest(round(each.share * each.cells), each.cells, truth).pvalue > 0.001
        assert found.coverage[0].cells == 600

    def test_pits_are_the_distribution_functions(self, scaled: tuple[float, np.ndarray, Calibration]):
        _, rows, found = scaled
        order = np.argsort(found.pit[:, 0])  # rows are shuffled
        deviation = np.sqrt((ROOT**2).sum(1))
        truth = stats.norm.cdf((rows - MEAN) / deviation)
        truth = truth[np.argsort(truth[:, 0])]
        np.testing.assert_allclose(found.pit[order, 0], truth[:, 0], atol=0.02)  # of 10,000 samples
        np.testing.assert_allclose(np.sort(found.pit, 0), np.sort(truth, 0), atol=0.02)
        e = np.linalg.solve(ROOT, (rows - MEAN).T).T
        denser = stats.chi2(3).sf((e**2).sum(1))  # a share of the Gaussian is farther out, and less dense
        np.testing.assert_allclose(np.sort(found.density_pit), np.sort(denser), atol=0.02)

    def test_codes_are_held_against_the_prior(self, gaussian: Flow, scaled: tuple[float, np.ndarray, Calibration]):
        _, rows, found = scaled
        h = gaussian.encode(torch.from_numpy(rows)).detach().numpy()
        truth = [stats.kstest(each, "norm").statistic for each in h.T]
        np.testing.assert_allclose(found.code_ks, truth, atol=0.02)


def test_verdicts_are_rarely_wrong_on_the_models_own_samples(gaussian: Flow):
    """Four checks that fail by chance once in a hundred times each: of 60, more than 8 fail in 1 of 1,000 cases."""
    found = [calibration(gaussian, known(drawn(200, seed=i)), plain_columns(3), cells=0, seed=i) for i in range(60)]
    assert sum(each.verdict.startswith("calibrated") for each in found) >= 52


@pytest.mark.parametrize(("rate", "start"), [(1.0, "calibrated"), (1.8, "overconfident: ")])
def test_integer_columns_have_randomised_ranks(rate: float, start: str):
    """Two independent columns, floor(N(0, 1.5²)) and N(0, 1): what the model says of its own discrete samples."""
    units = Units.columns([1.0, 0.0])
    units.fit(torch.tensor([20.0, 0.5]), torch.tensor([2.25 - 1 / 12, 1.0]))
    flow = Flow(units, Chain(), Gaussian(2)).double()
    loc, scale = units.loc.tolist(), units.scale.tolist()
    e = rate * np.random.default_rng(0).standard_normal((1500, 2)) * scale + loc
    columns = (Column("n", "int64", "steps", 0, 40, 1), Column("x", "double", "real"))
    e[:, 0] = np.floor(e[:, 0]).clip(0, 40)
    found = calibration(flow, known(e), columns, cells=600)
    assert found.verdict.startswith(start)
    for each in found.coverage_of("x"):
        truth = 2 * stats.norm.cdf(stats.norm.ppf((1 + each.level) / 2) / rate) - 1
        assert stats.binomtest(round(each.share * each.cells), each.cells, truth).pvalue > 0.001
    for each in found.coverage_of("n"):
        truth = discrete_coverage(each.level, rate * scale[0], scale[0])
        assert stats.binomtest(round(each.share * each.cells), each.cells, truth).pvalue > 0.001


def discrete_coverage(level: float, own: float, model: float) -> float:
    """How often the randomised PIT of floor(N(½, own²)) under floor(N(½, model²)) lies in the central interval."""
    k = np.arange(-40, 41)
    p = np.diff(stats.norm.cdf(np.append(k, 41), 0.5, own))
    below, upto = (stats.norm.cdf(end, 0.5, model) for end in (k, k + 1))
    low, high = (1 - level) / 2, (1 + level) / 2
    inside = (np.minimum(upto, high) - np.maximum(below, low)).clip(0) / (upto - below).clip(1e-300)
    return float((p * inside).sum())


def test_spikes_categories_and_bounds_are_calibrated_on_the_models_own_samples():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"x": rng.exponential(size=800) + 0.1, "kind": rng.choice(["a", "b", "c"], 800, p=[0.6, 0.3, 0.1])}
    )
    frame.loc[rng.random(800) < 0.3, "x"] = 0.1  # which float32 has not
    model = NICE(discrete="values", couplings=0, random_state=0).fit(frame)
    assert model.columns_[0].spikes == (0.1,)
    assert model.columns_[1].values == ("a", "b", "c")
    found = model.calibration(model.sample(800, random_state=1), cells=300)
    assert found.verdict.startswith("calibrated: ")
    moved = frame.assign(x=frame["x"].where(frame["x"] > 0.1, 0.2))
    assert model.calibration(moved, cells=0).marginals["x"].ks > 0.15  # three in ten, which the density spreads


def test_cells_are_spread_over_columns_and_rows(gaussian: Flow):
    few, many = (
        hidden_cells(gaussian, drawn(10), plain_columns(3), n, np.random.default_rng(0), watch=print, draws=16, steps=4)
        for n in (9, 10**6)
    )
    assert np.bincount(few.column).tolist() == [3, 3, 3]
    assert len(set(few.row)) == 9
    assert len(set(zip(many.row, many.column, strict=True))) == 30


class TestOfARun:
    def test_on_its_test_split(self, table_run: Run, copy_of: Callable[[Run], Run], picture_at: Callable):
        run = copy_of(table_run)
        result = calibrate(run, **QUICK)
        kept = json.loads((run.path / "calibration" / "calibration.json").read_text())
        assert kept["verdict"] == result.verdict
        assert kept["rows"] == len(run.splits.test)
        assert set(kept["columns"]) == {"x", "count", "half", "third"}
        assert [row["level"] for row in kept["coverage"]] == [0.5, 0.8, 0.9, 0.95]
        assert kept["cells"] == 24
        width, height = picture_at(run.path / "calibration" / "calibration.png").size
        assert width > 2 * height > 500

    def test_same_seed_same_figures(self, rows_run: Run, tmp_path: Path):
        state = torch.random.get_rng_state()
        one, two = (calibrate(rows_run, out=tmp_path, seed=3, **QUICK) for _ in range(2))
        assert one == two
        assert set(one["columns"]) == {"x0", "x1", "x2", "x3", "x4"}
        assert bool((torch.random.get_rng_state() == state).all())

    @pytest.mark.parametrize("kind", ["digits", "colour"])
    def test_images_have_the_joint_pits_alone(self, kind: str, request: pytest.FixtureRequest, tmp_path: Path):
        run = request.getfixturevalue(f"{kind}_run")
        result = calibrate(run, out=tmp_path, **QUICK)
        assert result.coverage == []
        assert result.columns == {}
        assert result.dim == run.recipe.data.dim
        assert (tmp_path / "calibration.png").is_file()

    def test_on_a_table_rows_that_cannot_count_are_left_out(self, table_run: Run, tmp_path: Path):
        lines = ["5.1,5,low,b"] * 3 + ["5.1,,low,b", "5.1,5,never,b", "5.1,5,low,b"]
        (tmp_path / "new.csv").write_text("\n".join(["x,count,half,third", *lines, ""]))
        result = calibrate(table_run, tmp_path / "new.csv", out=tmp_path, **QUICK)
        assert (result.rows, result.missing, result.unknown) == (4, 1, 1)

    def test_the_training_table_means_its_test_split(
        self, table_run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ):
        moved = shutil.copy(table_run.recipe.data.name, tmp_path / "moved.csv")
        expected = calibrate(table_run, out=tmp_path, **QUICK)
        for path in (table_run.recipe.data.name, moved):
            found = calibrate(table_run, path, out=tmp_path, **QUICK)
            assert found.log_density == expected.log_density
            assert "is what the run was trained on" in capfd.readouterr().err

    def test_an_estimator_finds_the_same(self, correlated: np.ndarray, picture_at: Callable, tmp_path: Path):
        model = NICE(random_state=0, couplings=0).fit(correlated[:300])
        found = model.calibration(correlated[300:], **QUICK)
        assert found.pit.shape == (100, 5)
        assert len(found.coverage) == 4
        found.plot(tmp_path / "picture.png")
        assert picture_at(tmp_path / "picture.png").width > 1000
        model.save(tmp_path / "run")
        np.save(tmp_path / "new.npy", correlated[300:])
        run = nicest.open(tmp_path / "run")
        of_run = calibrate(run, tmp_path / "new.npy", out=tmp_path, **QUICK)
        np.testing.assert_allclose(of_run.log_density["ks"], found.density.ks, atol=0.03)  # other samples
        np.testing.assert_allclose(of_run.columns["x2"]["ks"], found.marginals["x2"].ks, atol=0.03)


class TestRefusals:
    def test_rows(self, refusal: Callable[..., str], table_run: Run, tmp_path: Path):
        def told(text: str) -> str:
            (tmp_path / "new.csv").write_text(text)
            return refusal(calibrate, table_run, tmp_path / "new.csv", out=tmp_path, **QUICK)

        assert "expected rows, got only column names" in told("x,count,half,third\n")
        assert "expected 2 rows or more" in told("x,count,half,third\n5.1,5,low,b\n")
        assert "got 1 of 2" in told("x,count,half,third\n5.1,5,low,b\n,5,low,b\n")
        assert "lacks 'half'" in told("x,count,third\n5.1,5,b\n5.1,5,b\n")

    def test_a_file_that_is_not_there(self, refusal: Callable[..., str], table_run: Run, tmp_path: Path):
        assert "found no" in refusal(calibrate, table_run, tmp_path / "none.csv", out=tmp_path)

    def test_a_run_without_rows(self, refusal: Callable[..., str], correlated: np.ndarray, tmp_path: Path):
        NICE(random_state=0, couplings=0).fit(correlated).save(tmp_path / "run")
        line = refusal(calibrate, nicest.open(tmp_path / "run"))
        assert "give some as data" in line

    def test_chains(self, refusal: Callable[..., str], gaussian: Flow):
        assert "a multiple of the 4 chains, got 17" in refusal(
            calibration, gaussian, known(drawn(9)), plain_columns(3), draws=17, steps=20
        )

    def test_of_an_estimator(self, correlated: np.ndarray):
        model = NICE(random_state=0, couplings=0).fit(correlated)
        with pytest.raises(ValueError, match="expected 2 rows or more"):
            model.calibration(correlated[:1])
        with pytest.raises(ValueError, match="features"):
            model.calibration(correlated[:, :2])

    def test_a_conditional_density(self, gaussian: Flow):
        flow = Flow(gaussian.units, gaussian.bijection, gaussian.prior, OneHot(3))
        with pytest.raises(NicestError, match="given a condition"):
            calibration(flow, known(drawn(9)), plain_columns(3))
