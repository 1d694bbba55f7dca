"""`NICE` as scikit-learn knows estimators, and as a density."""

import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse, stats
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import nicest
from nicest import NICE, NicestError
from nicest.flows import Coupling
from nicest.inference.engine import Engine
from nicest.recipes.defaults import recipe_for
from nicest.tasks.sample import sample
from nicest.tasks.score import score
from nicest.train.fit import train as train_recipe

MIXING = np.array([[1.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 2.0]])


def gaussian_rows(n: int = 400, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 3)) @ MIXING + [0, 5, -20]


@pytest.fixture(scope="module")
def fitted() -> NICE:
    return NICE(random_state=0, epochs=20).fit(gaussian_rows())


@pytest.mark.filterwarnings("ignore:.*array_api:sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([NICE()])
def test_it_is_an_estimator(estimator: NICE, check: Callable):
    check(estimator)


class TestDensity:
    def test_gaussian_rows_get_their_log_density(self):
        model = NICE(random_state=0, prior="gaussian", marginals="none").fit(gaussian_rows(2_000))
        rows = gaussian_rows(500, seed=1)
        exact = stats.multivariate_normal([0, 5, -20], MIXING.T @ MIXING).logpdf(rows)
        assert model.score(rows) == pytest.approx(exact.mean(), abs=0.02)
        assert np.abs(model.score_samples(rows) - exact).mean() < 0.1

    def test_without_couplings_it_is_the_shrunk_gaussian_in_closed_form(self):
        x = gaussian_rows(200)
        model = NICE(couplings=0, prior="gaussian", marginals="none", shrinkage=0.1, epochs=1, learning_rate=1e-12)
        covariance = np.cov(x.T, bias=True)
        covariance = 0.9 * covariance + 0.1 * np.diag(covariance.diagonal())
        expected = stats.multivariate_normal(x.mean(0), covariance).logpdf(x)
        np.testing.assert_allclose(model.fit(x).score_samples(x), expected, atol=1e-4)

    def test_it_integrates_to_one_over_a_skewed_column(self):
        x = np.random.default_rng(0).lognormal(size=(300, 1))
        model = NICE(random_state=0).fit(x)
        assert not any(isinstance(layer, Coupling) for layer in model.flow_.chain)
        grid = np.linspace(-20, 400, 200_001)[:, None]
        assert np.trapezoid(np.exp(model.score_samples(grid)), grid[:, 0]) == pytest.approx(1, abs=2e-3)
        assert model.recipe_.model.marginals == "sinh-arcsinh"
        assert model.score(x) == pytest.approx(stats.lognorm(1).logpdf(x).mean(), abs=0.05)

    def test_samples_have_the_moments_of_the_data(self, fitted: NICE):
        drawn, x = fitted.sample(20_000, random_state=0), gaussian_rows()
        assert drawn.shape == (20_000, 3)
        np.testing.assert_allclose(drawn.mean(0), x.mean(0), atol=0.1)
        np.testing.assert_allclose(np.cov(drawn.T), np.cov(x.T), atol=0.4)

    def test_scores_are_in_the_units_of_the_data(self):
        x = gaussian_rows(300)
        model, larger = (NICE(random_state=0, epochs=3).fit(scale * x) for scale in (1, 10))
        assert model.score(x) - larger.score(10 * x) == pytest.approx(3 * np.log(10), abs=1e-3)

    def test_training_improves_on_the_start(self):
        angle = np.random.default_rng(0).uniform(0, np.pi, 600)
        x = np.column_stack([np.cos(angle), np.sin(angle)]) + np.random.default_rng(1).normal(0, 0.1, (600, 2))
        x, unseen = x[:400], x[400:]
        model, start = NICE(random_state=0).fit(x), NICE(random_state=0, couplings=0).fit(x)
        assert model.n_epochs_ > 0
        assert model.score(unseen) > start.score(unseen) + 0.1


class TestLatent:
    def test_round_trip(self, fitted: NICE):
        x = gaussian_rows(50, seed=3)
        np.testing.assert_allclose(fitted.inverse_transform(fitted.transform(x)), x, atol=1e-10)

    def test_latent_coordinates_are_white(self, fitted: NICE):
        h = fitted.transform(gaussian_rows()) / fitted.flow_.prior.standard_deviation
        np.testing.assert_allclose(np.cov(h.T), np.eye(3), atol=0.15)

    def test_wrong_number_of_coordinates(self, fitted: NICE):
        with pytest.raises(ValueError, match="expected 3 latent coordinates, got 2"):
            fitted.inverse_transform(np.zeros((4, 2)))


class TestOutliers:
    @pytest.mark.parametrize("contamination", [0.05, 0.25, 0.5])
    def test_contamination_is_the_share_of_outliers(self, contamination: float):
        x = gaussian_rows()
        labels = NICE(random_state=0, epochs=1, contamination=contamination).fit_predict(x)
        assert (labels == -1).mean() == pytest.approx(contamination)

    def test_auto_is_tukeys_fence(self, fitted: NICE):
        low, high = np.quantile(fitted.score_samples(gaussian_rows()), [0.25, 0.75])
        assert fitted.offset_ == pytest.approx(low - 1.5 * (high - low))

    def test_far_rows_are_outliers_and_near_ones_are_not(self, fitted: NICE):
        assert list(fitted.predict([[0, 5, -20], [30, 5, -20], [0, 5, 1e30]])) == [1, -1, -1]
        assert fitted.decision_function([[0, 5, -20]]) > 0

    def test_too_good_a_row_is_not_typical(self, fitted: NICE):
        mode = fitted.inverse_transform(np.zeros((1, 3)))
        x = gaussian_rows()
        assert fitted.score_samples(mode) > np.quantile(fitted.score_samples(x), 0.99)
        assert fitted.typicality(mode) < np.median(fitted.typicality(x))

    @pytest.mark.parametrize("contamination", [0, -0.1, 0.51, "some", None])
    def test_contamination_out_of_range(self, contamination: object):
        with pytest.raises(ValueError, match=r"contamination is 'auto' or in \(0, 0.5\], got"):
            NICE(contamination=contamination).fit(gaussian_rows(20))


class TestInScikitLearn:
    def test_pipeline(self):
        x = gaussian_rows()
        pipe = make_pipeline(StandardScaler(), NICE(random_state=0, epochs=1)).fit(x)
        assert pipe.transform(x).shape == x.shape
        assert np.isfinite(pipe.score(x))
        np.testing.assert_allclose(pipe.inverse_transform(pipe.transform(x)), x, atol=1e-10)

    def test_grid_search_over_numpy_numbers(self):
        grid = {"width": np.array([8, 16]), "prior": ["gaussian", "logistic"]}
        search = GridSearchCV(NICE(random_state=0, epochs=1), grid, cv=2).fit(gaussian_rows(100))
        assert search.best_params_["prior"] == "gaussian"
        assert np.isfinite(search.best_estimator_.score(gaussian_rows(10)))

    def test_clone_and_params(self, fitted: NICE):
        copied = clone(fitted)
        assert copied.get_params() == fitted.get_params()
        assert not hasattr(copied, "flow_")
        assert copied.set_params(width=7).width == 7

    def test_pandas_in_and_out(self):
        pd = pytest.importorskip("pandas")
        table = pd.DataFrame(gaussian_rows(100), columns=["a", "b", "c"])
        model = NICE(random_state=0, epochs=1).fit(table)
        assert list(model.feature_names_in_) == ["a", "b", "c"]
        latent = model.set_output(transform="pandas").transform(table)
        assert isinstance(latent, pd.DataFrame)
        assert list(latent.columns) == ["nice0", "nice1", "nice2"]
        with pytest.raises(ValueError, match="feature names"):
            model.score_samples(table[["b", "a", "c"]])

    def test_the_same_random_state_gives_the_same_numbers(self):
        x = gaussian_rows(100)
        first, again, other = (NICE(random_state=seed, epochs=30).fit(x) for seed in (1, 1, 2))
        assert np.array_equal(first.score_samples(x), again.score_samples(x))
        assert not np.array_equal(first.score_samples(x), other.score_samples(x))
        assert np.array_equal(first.sample(5, random_state=3), again.sample(5, random_state=3))
        assert not np.array_equal(first.sample(5, random_state=3), first.sample(5, random_state=4))

    def test_random_numbers_of_others_stay_as_they_were(self):
        import torch

        before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        NICE(random_state=0, epochs=1).fit(gaussian_rows(60)).sample(3, random_state=0)
        assert torch.equal(torch.get_rng_state(), before)
        assert np.array_equal(np.random.get_state()[1], numbers)  # noqa: NPY002

    def test_pickle(self, fitted: NICE):
        x = gaussian_rows(10)
        expected = fitted.score_samples(x)
        again = pickle.loads(pickle.dumps(fitted))
        assert not any(isinstance(value, Engine) for value in vars(again).values())  # it is built anew
        assert np.array_equal(again.score_samples(x), expected)

    def test_warm_start_goes_on(self):
        x = gaussian_rows(200)
        model = NICE(random_state=0, epochs=5, warm_start=True).fit(x)
        before, marginals = model.history_[-1]["valid_nats"], model.recipe_.model.marginals
        with pytest.warns(UserWarning, match="marginals stays"):
            model.set_params(marginals="sinh-arcsinh" if marginals == "none" else "none").fit(x)
        assert model.recipe_.model.marginals == marginals
        assert model.history_[0]["valid_nats"] == pytest.approx(before, abs=0.05)

    def test_it_prints_nothing_unless_asked(self, capfd: pytest.CaptureFixture[str]):
        NICE(random_state=0, epochs=2).fit(gaussian_rows(60))
        assert capfd.readouterr() == ("", "")
        NICE(random_state=0, epochs=50, verbose=True).fit(gaussian_rows(60))
        assert "valid" in capfd.readouterr().err


class TestEngine:
    def test_is_built_once_for_each_flow(self, monkeypatch: pytest.MonkeyPatch):
        built: list[nicest.Flow] = []

        class Counted(Engine):
            def __init__(self, flow: nicest.Flow) -> None:
                built.append(flow)
                super().__init__(flow)

        monkeypatch.setattr("nicest.estimator.Engine", Counted)
        x = gaussian_rows(60)
        model = NICE(random_state=0, epochs=1).fit(x)
        h = model.transform(x)
        model.score_samples(x), model.inverse_transform(h), model.sample(5), model.predict(x)
        assert built == [model.flow_]
        model.fit(x).score_samples(x)
        assert len(built) == 2
        assert built[1] is model.flow_


class TestRunFolder:
    def test_saved_and_loaded(self, fitted: NICE, tmp_path: Path):
        fitted.save(tmp_path / "run")
        again, x = NICE.load(tmp_path / "run"), gaussian_rows(10)
        np.testing.assert_allclose(again.score_samples(x), fitted.score_samples(x), atol=1e-12)
        assert again.get_params() == fitted.get_params()
        assert (again.offset_, again.n_epochs_, again.history_) == (fitted.offset_, fitted.n_epochs_, fitted.history_)
        with pytest.raises(NicestError, match="holds a run already"):
            fitted.save(tmp_path / "run")

    def test_without_its_columns_the_estimator_is_loaded(self, fitted: NICE, tmp_path: Path):
        """A copy of the files that `save` wrote before there was a columns.json."""
        fitted.save(tmp_path / "run")
        (tmp_path / "run" / "columns.json").unlink()
        again, x = NICE.load(tmp_path / "run"), gaussian_rows(10)
        np.testing.assert_allclose(again.score_samples(x), fitted.score_samples(x), atol=1e-12)
        assert again.offset_ == fitted.offset_
        assert again.range_.shape == fitted.range_.shape
        assert (again.range_[0] < again.range_[1]).all()

    def test_names_of_columns_are_kept(self, tmp_path: Path):
        pd = pytest.importorskip("pandas")
        table = pd.DataFrame(gaussian_rows(60), columns=["a", "b", "c"])
        NICE(random_state=0, epochs=1).fit(table).save(tmp_path / "run")
        assert list(NICE.load(tmp_path / "run").feature_names_in_) == ["a", "b", "c"]

    def test_the_command_line_takes_it(self, fitted: NICE, tmp_path: Path):
        fitted.save(tmp_path / "run")
        run = [sys.executable, "-m", "nicest"]
        sampled = ["sample", str(tmp_path / "run"), "-n", "7", "--out", str(tmp_path / "x.npy")]
        subprocess.run([*run, *sampled], check=True, capture_output=True)
        assert np.load(tmp_path / "x.npy").shape == (7, 3)
        subprocess.run([*run, "certify", str(tmp_path / "run")], check=True, capture_output=True)
        done = subprocess.run([*run, "evaluate", str(tmp_path / "run")], check=False, capture_output=True, text=True)
        assert done.returncode == 1
        assert "fitted to rows in memory" in done.stderr

    def test_its_columns_are_a_table_to_the_command_line(self, tmp_path: Path):
        pd = pytest.importorskip("pandas")
        table = pd.DataFrame(gaussian_rows(300), columns=["a", "b", "c"])
        model = NICE(random_state=0, epochs=1).fit(table)
        model.save(tmp_path / "run")
        table.to_parquet(tmp_path / "t.parquet")
        result = score(nicest.open(tmp_path / "run"), [tmp_path / "t.parquet"], out=tmp_path / "s.parquet")
        assert result["mean_nats"] == pytest.approx(model.score(table), abs=1e-4)
        found = pd.read_parquet(tmp_path / "s.parquet")
        np.testing.assert_allclose(found["log_density"], model.score_samples(table), atol=1e-3)
        ranks = 1 - (np.argsort(np.argsort(model.score_samples(table))) + 0.5) / len(table)
        np.testing.assert_allclose(found["outlier_score"], ranks, atol=0.01)
        sample(nicest.open(tmp_path / "run"), 5, out=tmp_path / "x.csv")
        assert list(pd.read_csv(tmp_path / "x.csv").columns) == ["a", "b", "c"]

    def test_a_table_of_the_command_line_is_loaded(self, tmp_path: Path):
        pd = pytest.importorskip("pandas")
        table = pd.DataFrame(gaussian_rows(300) + np.array([1e6, 0, -50]), columns=["a", "b", "c"])
        table.to_parquet(tmp_path / "t.parquet")
        recipe = recipe_for(300, 3, {"model": {}, "train": {"epochs": 2}})
        train_recipe(recipe.override(f'data.name="{tmp_path / "t.parquet"}"'), tmp_path / "run")
        model = NICE.load(tmp_path / "run")
        score(nicest.open(tmp_path / "run"), [tmp_path / "t.parquet"], out=tmp_path / "s.parquet")
        found = pd.read_parquet(tmp_path / "s.parquet")["log_density"]
        np.testing.assert_allclose(model.score_samples(table), found, atol=1e-3)
        np.testing.assert_allclose(model.inverse_transform(model.transform(table)), table, rtol=1e-9)
        assert np.abs(model.sample(2000, random_state=0).mean(0) - table.to_numpy().mean(0)).max() < 0.5
        holed = table.iloc[:3].copy()
        holed.iloc[0, 0] = np.nan
        filled = model.impute(holed, draws=80, steps=100)
        assert abs(filled[0, 0] - 1e6) < 10
        assert np.array_equal(filled[1:], table.iloc[1:3])
        model.save(tmp_path / "again")
        np.testing.assert_allclose(NICE.load(tmp_path / "again").score_samples(table), found, atol=1e-3)
        table.assign(n=range(300)).to_parquet(tmp_path / "t.parquet")
        whole = recipe_for(300, 4, {"model": {}, "train": {"epochs": 1}})
        train_recipe(whole.override(f'data.name="{tmp_path / "t.parquet"}"'), tmp_path / "whole")
        with pytest.raises(NicestError, match="got whole numbers or few values in 'n'"):
            NICE.load(tmp_path / "whole")

    def test_a_run_of_the_command_line_is_loaded(self, tmp_path: Path):
        x = gaussian_rows().astype(np.float32)
        np.save(tmp_path / "x.npy", x)
        recipe = recipe_for(len(x), 3, {"model": {}, "train": {"epochs": 2}})
        train_recipe(recipe.override(f"data.name={tmp_path / 'x.npy'}"), tmp_path / "run")
        model = NICE.load(tmp_path / "run")
        assert model.score(x) == pytest.approx(NICE(random_state=0, epochs=2).fit(x).score(x), abs=0.1)
        assert (model.predict(x) == 1).mean() > 0.95
        assert model.get_params()["epochs"] == 2

    def test_a_model_of_images_is_not(self, tmp_path: Path):
        from nicest.recipes import load_recipe

        recipe = load_recipe("digits").override("train.epochs=1", "model.width=8", "model.hidden_layers=1")
        train_recipe(recipe, tmp_path / "run")
        with pytest.raises(NicestError, match="expected a model of continuous rows"):
            NICE.load(tmp_path / "run")


class TestBadRows:
    @pytest.mark.parametrize(
        ("rows", "words"),
        [
            ([[1.0, np.nan], [2, 3]], "2 numbers or more in every column, got hardly any but NaN in column 1"),
            ([[1.0, np.inf], [2, 3]], "infinity"),
            ([["a", "b"], ["c", "d"]], "could not convert string to float"),
            ([[1.0, 2.0]], "minimum of 2"),
            ([1.0, 2.0, 3.0], "2D array"),
            (np.zeros((0, 3)), "0 sample"),
            (np.full((10, 2), 1e200), "rescale that column"),
        ],
    )
    def test_they_are_refused_in_words(self, rows: object, words: str):
        with pytest.raises(ValueError, match=words):
            NICE().fit(rows)

    def test_sparse_rows_are_refused(self):
        with pytest.raises(TypeError, match="dense"):
            NICE().fit(sparse.eye_array(10))

    @pytest.mark.parametrize(
        ("parameter", "words"),
        [
            ({"width": 0}, "model.width must be at least 1; got 0"),
            ({"width": "wide"}, "model.width is of type int; got 'wide'"),
            ({"law": "adittive"}, "did you mean 'additive'"),
            ({"batch_size": -1}, "train.batch must be at least 1"),
            ({"learning_rate": 0.0}, "train.lr must be positive"),
            ({"validation_fraction": 1.0}, "validation_fraction is None or from 0 to 0.9"),
            ({"device": "abacus"}, "no device 'abacus' here"),
        ],
    )
    def test_parameters_are_refused_in_words(self, parameter: dict, words: str):
        with pytest.raises(ValueError, match=words):
            NICE(**parameter).fit(gaussian_rows(60))

    def test_no_samples(self, fitted: NICE):
        with pytest.raises(ValueError, match="at least 1 sample"):
            fitted.sample(0)


class TestAwkwardRows:
    def test_constant_and_repeated_columns_and_rows(self):
        x = gaussian_rows(100)
        x = np.column_stack([x, x[:, 0], np.full(100, 7.0), np.zeros(100)])
        x = np.concatenate([x, x])
        model = NICE(random_state=0, epochs=20).fit(x)
        assert np.isfinite(model.score_samples(x)).all()
        assert np.isfinite(model.sample(100, random_state=0)).all()
        wrong = x[:1] + np.array([0, 0, 0, 0, 1, 0])
        assert model.score_samples(wrong) < model.score_samples(x).min()

    def test_a_column_far_from_zero(self):
        x = gaussian_rows(300)
        moved = x + np.array([0, 1.7e9, 0])
        model, far = NICE(random_state=0, epochs=3).fit(x), NICE(random_state=0, epochs=3).fit(moved)
        assert far.score(moved) == pytest.approx(model.score(x), abs=0.01)
        drawn = far.sample(1_000, random_state=0)[:, 1]
        assert len(np.unique(drawn)) > 990

    def test_columns_of_very_different_size(self):
        x = gaussian_rows(300)
        scale = np.array([1e-12, 1, 1e12])
        assert NICE(random_state=0, epochs=3).fit(x * scale).score(x * scale) == pytest.approx(
            NICE(random_state=0, epochs=3).fit(x).score(x), abs=0.01
        )

    def test_more_columns_than_rows(self):
        x = np.random.default_rng(0).normal(size=(60, 100))
        assert np.isfinite(NICE(random_state=0, epochs=2).fit(x).score(x[:5] + 0.1))

    def test_very_many_columns(self):
        x = np.random.default_rng(0).normal(size=(60, 1_500))
        model = NICE(random_state=0, epochs=1).fit(x)
        assert model.recipe_.model.preprocess == "none"
        assert np.isfinite(model.score(x))

    @pytest.mark.parametrize("n", [2, 3, 5, 11, 49])
    def test_very_few_rows(self, n: int):
        x = gaussian_rows(n)
        model = NICE(random_state=0).fit(x)
        assert np.isfinite(model.score(gaussian_rows(10, seed=2)))
        assert model.recipe_.model.couplings == 0

    def test_integers(self):
        x = np.random.default_rng(0).integers(0, 5, (200, 3))
        assert np.isfinite(NICE(random_state=0, epochs=3).fit(x).score(x))


class TestSizes:
    @pytest.mark.parametrize("n", [2, 49, 50, 100, 1_000, 30_000, 1_000_000])
    @pytest.mark.parametrize("dim", [1, 2, 100, 10_000])
    def test_there_is_a_recipe_for_every_size(self, n: int, dim: int):
        recipe = recipe_for(n, dim, {"model": {}, "train": {}})
        steps = recipe.train.epochs * max(1, round(0.8 * n) // recipe.train.batch)
        assert steps <= 12_000
        assert (recipe.model.couplings == 0) == (n < 50 or dim == 1)

    def test_what_is_given_stays(self):
        given = {"model": {"width": 7, "couplings": 6}, "train": {"batch": 10, "epochs": 3}}
        recipe = recipe_for(1_000, 5, given)
        assert (recipe.model.width, recipe.model.couplings) == (7, 6)
        assert (recipe.train.batch, recipe.train.epochs) == (10, 3)

    def test_a_large_table_takes_bounded_time_for_each_row(self):
        x = np.random.default_rng(0).normal(size=(50_000, 20)).astype(np.float32)
        began = time.perf_counter()
        model = NICE(random_state=0, epochs=1).fit(x)
        assert model.score(x[:1_000]) == pytest.approx(-20 * 0.5 * np.log(2 * np.pi * np.e), abs=1.0)
        assert time.perf_counter() - began < 60


class TestImpute:
    """Missing cells, against the closed form of a Gaussian."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> NICE:
        random = np.random.default_rng(0)
        x = random.standard_normal((800, 1))
        rows = np.hstack([x, 3 * x + random.standard_normal((800, 1)), random.standard_normal((800, 1))])
        return NICE(random_state=0).fit(rows)

    def test_is_the_conditional_mean_with_its_interval(self, model: NICE):
        observed = np.array([-1.0, 0.0, 1.5])
        holed = np.column_stack([observed, [np.nan] * 3, [0.2] * 3])
        filled, low, high = model.impute(holed, interval=0.9)
        assert np.abs(filled[:, 1] - 3 * observed).max() < 0.5
        assert np.abs((high - low)[:, 1] - 2 * 1.645).max() < 1.0
        assert np.array_equal(filled[:, [0, 2]], holed[:, [0, 2]])

    def test_what_is_whole_comes_back(self, model: NICE):
        rows = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
        filled = model.impute(rows)
        assert filled.dtype == np.float32
        assert np.array_equal(filled, rows)

    def test_same_seed_same_cells(self, model: NICE):
        holed = np.array([[0.5, np.nan, np.nan]])
        once, again, other = (model.impute(holed, draws=80, steps=100, random_state=seed) for seed in (1, 1, 2))
        assert np.array_equal(once, again)
        assert not np.array_equal(once, other)

    def test_many_rows_are_done_in_parts(self, model: NICE, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("nicest.inference.impute.AT_ONCE", 2)
        holed = np.array([[1.0, np.nan, 0.0]] * 5 + [[0.0, 1.0, 2.0]])
        filled, low, high = model.impute(holed, draws=80, steps=200, interval=0.9)
        assert len(set(filled[:5, 1])) == 5  # each has draws of its own
        assert np.abs(filled[:5, 1] - 3).max() < 1
        assert ((low < filled) == (filled < high)).all()
        assert np.array_equal(filled[5], holed[5])

    def test_interval_out_of_range(self, model: NICE):
        with pytest.raises(ValueError, match="between 0 and 1"):
            model.impute(np.array([[0.5, np.nan, 0.0]]), interval=1.5)


def test_a_warm_start_says_which_parameters_it_ignores():
    rows = np.random.default_rng(0).normal(size=(80, 3))
    model = NICE(epochs=1, couplings=4, hidden_layers=1, random_state=0, warm_start=True).fit(rows)
    model.fit(rows)  # the same: nothing is said
    with pytest.warns(UserWarning, match="goes on with the flow that is there: couplings stays"):
        model.set_params(couplings=3).fit(rows)
