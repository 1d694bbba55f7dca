"""`NICE` as scikit-learn knows estimators, and as a density."""

import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse, stats
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from typer.testing import CliRunner

import nicest
from nicest import NICE, NicestError
from nicest.cli import app
from nicest.data import in_memory
from nicest.estimator import repetitions
from nicest.flows import Coupling, MixedUnits
from nicest.inference.engine import Engine
from nicest.recipes.build import build
from nicest.recipes.defaults import WORK, held_out, recipes_for
from nicest.runs.run import Run
from nicest.tasks.latent import spectrum
from nicest.tasks.sample import sample
from nicest.tasks.score import score
from nicest.train.fit import train as train_recipe

WEIGHTS = {  # `TestWeights` holds the weights to what is equivalent
    "check_sample_weight_equivalence_on_dense_data": "the start is chosen by cross-validation of rows that come once"
}
MIXING = np.array([[1.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 2.0]])


def gaussian_rows(n: int = 400, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 3)) @ MIXING + [0, 5, -20]


@pytest.fixture(scope="module")
def fitted() -> NICE:
    return NICE(law="additive", random_state=0, epochs=20).fit(gaussian_rows())


@pytest.mark.filterwarnings("ignore:.*array_api:sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([NICE(effort="low", epochs=2)], expected_failed_checks=lambda estimator: WEIGHTS)
def test_it_is_an_estimator(estimator: NICE, check: Callable):
    check(estimator)


class TestDensity:
    def test_gaussian_rows_get_their_log_density(self):
        model = NICE(law="additive", random_state=0, prior="gaussian", marginals="none").fit(gaussian_rows(2_000))
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
        model = NICE(law="additive", random_state=0).fit(x)
        assert not any(isinstance(layer, Coupling) for layer in model.flow_.bijection)
        grid = np.linspace(-20, 400, 200_001)[:, None]
        assert np.trapezoid(np.exp(model.score_samples(grid)), grid[:, 0]) == pytest.approx(1, abs=2e-3)
        assert model.recipe_.model.marginals == "sinh-arcsinh"
        assert model.score(x) == pytest.approx(stats.lognorm(1).logpdf(x).mean(), abs=0.05)

    def test_samples_given_conditions_are_those_that_meet_them(self, fitted: NICE):
        drawn = fitted.sample(40_000, random_state=0)
        low, high = np.quantile(drawn[:, 0], [0.6, 0.8])
        met = drawn[(drawn[:, 0] > low) & (drawn[:, 0] <= high)]
        rows = fitted.sample(4000, random_state=0, where=f"x0 > {low} and x0 <= {high}")
        assert ((rows[:, 0] > low) & (rows[:, 0] <= high)).all()
        error = met.std(0) * np.sqrt(1 / len(met) + 1 / len(rows))
        assert (np.abs(rows.mean(0) - met.mean(0)) < 4.5 * error).all()
        given = fitted.sample(10, random_state=0, where="x1 = 0.3")
        assert (given[:, 1] == 0.3).all()
        with pytest.raises(ValueError, match="found no column 'x9'"):
            fitted.sample(10, where="x9 = 0.3")

    def test_samples_have_the_moments_of_the_data(self, fitted: NICE):
        drawn, x = fitted.sample(20_000, random_state=0), gaussian_rows()
        assert drawn.shape == (20_000, 3)
        np.testing.assert_allclose(drawn.mean(0), x.mean(0), atol=0.1)
        np.testing.assert_allclose(np.cov(drawn.T), np.cov(x.T), atol=0.4)

    def test_training_improves_on_the_start(self):
        angle = np.random.default_rng(0).uniform(0, np.pi, 600)
        x = np.column_stack([np.cos(angle), np.sin(angle)]) + np.random.default_rng(1).normal(0, 0.1, (600, 2))
        x, unseen = x[:400], x[400:]
        model, start = (
            NICE(law="additive", random_state=0).fit(x),
            NICE(law="additive", random_state=0, couplings=0).fit(x),
        )
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
    @pytest.mark.parametrize("contamination", [0.05, 0.5])
    def test_contamination_is_the_share_of_outliers(self, contamination: float):
        x = gaussian_rows()
        labels = NICE(law="additive", random_state=0, epochs=1, contamination=contamination).fit_predict(x)
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
        pipe = make_pipeline(StandardScaler(), NICE(law="additive", random_state=0, epochs=1)).fit(x)
        assert pipe.transform(x).shape == x.shape
        assert np.isfinite(pipe.score(x))
        np.testing.assert_allclose(pipe.inverse_transform(pipe.transform(x)), x, atol=1e-10)

    def test_grid_search_over_numpy_numbers(self):
        grid = {"width": np.array([8, 16]), "prior": ["gaussian", "logistic"]}
        search = GridSearchCV(NICE(law="additive", random_state=0, epochs=1), grid, cv=2).fit(gaussian_rows(100))
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
        model = NICE(law="additive", random_state=0, epochs=1).fit(table)
        assert list(model.feature_names_in_) == ["a", "b", "c"]
        latent = model.set_output(transform="pandas").transform(table)
        assert isinstance(latent, pd.DataFrame)
        assert list(latent.columns) == ["nice0", "nice1", "nice2"]
        with pytest.raises(ValueError, match="feature names"):
            model.score_samples(table[["b", "a", "c"]])

    def test_the_same_random_state_gives_the_same_numbers(self):
        x = gaussian_rows(100)
        first, again, other = (NICE(law="additive", random_state=seed, epochs=30).fit(x) for seed in (1, 1, 2))
        assert np.array_equal(first.score_samples(x), again.score_samples(x))
        assert not np.array_equal(first.score_samples(x), other.score_samples(x))
        assert np.array_equal(first.sample(5, random_state=3), again.sample(5, random_state=3))
        assert not np.array_equal(first.sample(5, random_state=3), first.sample(5, random_state=4))

    def test_random_numbers_of_others_stay_as_they_were(self):
        import torch

        before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        NICE(law="additive", random_state=0, epochs=1).fit(gaussian_rows(60)).sample(3, random_state=0)
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
        model = NICE(law="additive", random_state=0, epochs=5, warm_start=True).fit(x)
        before, marginals = model.history_[-1]["valid_nats"], model.recipe_.model.marginals
        with pytest.warns(UserWarning, match="a new marginals has no effect"):
            model.set_params(marginals="sinh-arcsinh" if marginals == "none" else "none").fit(x)
        assert model.recipe_.model.marginals == marginals
        assert model.history_[0]["valid_nats"] == pytest.approx(before, abs=0.05)

    def test_it_prints_nothing_unless_asked(self, capfd: pytest.CaptureFixture[str]):
        NICE(law="additive", random_state=0, epochs=2).fit(gaussian_rows(60))
        assert capfd.readouterr() == ("", "")
        NICE(law="additive", random_state=0, epochs=50, verbose=True).fit(gaussian_rows(60))
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
        model = NICE(law="additive", random_state=0, epochs=1).fit(x)
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
        assert [column.name for column in again.columns_] == [column.name for column in fitted.columns_]
        assert all(column.low < column.high for column in again.columns_)

    def test_names_of_columns_are_kept(self, tmp_path: Path):
        pd = pytest.importorskip("pandas")
        table = pd.DataFrame(gaussian_rows(60), columns=["a", "b", "c"])
        NICE(law="additive", random_state=0, epochs=1).fit(table).save(tmp_path / "run")
        assert list(NICE.load(tmp_path / "run").feature_names_in_) == ["a", "b", "c"]

    def test_the_command_line_takes_it(self, fitted: NICE, tmp_path: Path):
        fitted.save(tmp_path / "run")
        sampled = ["sample", str(tmp_path / "run"), "-n", "7", "--out", str(tmp_path / "x.npy")]
        assert CliRunner().invoke(app, sampled).exit_code == 0
        assert np.load(tmp_path / "x.npy").shape == (7, 3)
        assert CliRunner().invoke(app, ["certify", str(tmp_path / "run"), "-n", "20"]).exit_code == 0
        with pytest.raises(NicestError, match="fitted to rows in memory"):
            CliRunner().invoke(app, ["evaluate", str(tmp_path / "run")], catch_exceptions=False)

    def test_its_columns_are_a_table_to_the_command_line(self, tmp_path: Path):
        pd = pytest.importorskip("pandas")
        table = pd.DataFrame(gaussian_rows(300), columns=["a", "b", "c"])
        model = NICE(law="additive", random_state=0, epochs=1).fit(table)
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
        (recipe,) = recipes_for(300, 3, {"model": {"law": "additive"}, "train": {"epochs": 2}})
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

    def test_discrete_columns_of_the_command_line_are_loaded(self, tmp_path: Path):
        pd = pytest.importorskip("pandas")
        table = pd.DataFrame(gaussian_rows(300), columns=["a", "b", "c"]).assign(n=np.arange(300) % 7 * 3, t="u")
        table.loc[::3, "t"] = "v"
        for name, columns in {"numbers": ["a", "n"], "texts": ["a", "t"]}.items():
            table[columns].to_parquet(tmp_path / f"{name}.parquet")
            (recipe,) = recipes_for(300, 2, {"model": {"law": "additive"}, "train": {"epochs": 1}})
            train_recipe(recipe.override(f'data.name="{tmp_path / name}.parquet"'), tmp_path / name)
        model = NICE.load(tmp_path / "numbers")
        result = score(nicest.open(tmp_path / "numbers"), [tmp_path / "numbers.parquet"], out=tmp_path / "s.csv")
        assert model.score(table[["a", "n"]]) == pytest.approx(result["mean_nats"], abs=0.05)
        assert set(model.sample(500, random_state=0)[:, 1]) == set(range(0, 21, 3))
        texts = NICE.load(tmp_path / "texts")
        assert set(texts.sample(500, random_state=0)["t"]) == {"u", "v"}
        assert np.isfinite(texts.score_samples(table[["a", "t"]])).all()

    def test_a_run_of_the_command_line_is_loaded(self, tmp_path: Path):
        x = gaussian_rows().astype(np.float32)
        np.save(tmp_path / "x.npy", x)
        (recipe,) = recipes_for(len(x), 3, {"model": {"law": "additive"}, "train": {"epochs": 2}})
        train_recipe(recipe.override(f"data.name={tmp_path / 'x.npy'}"), tmp_path / "run")
        model = NICE.load(tmp_path / "run")
        assert model.score(x) == pytest.approx(NICE(law="additive", random_state=0, epochs=2).fit(x).score(x), abs=0.1)
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
            (np.full((10, 2), 1e306), "expected values up to 1e.305, got 1e.306: rescale that column"),
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
            ({"width": 0}, "^width must be from 1 to 100000; got 0"),
            ({"width": "wide"}, "^width is of type int; got 'wide'"),
            ({"law": "adittive"}, "^law is one of .*did you mean 'additive'"),
            ({"whitening": "some"}, "^whitening is one of"),
            ({"hidden_layers": [1, 2]}, "^hidden_layers must be one number, or one for each of the 4 couplings"),
            ({"batch_size": -1}, "^batch_size must be at least 1"),
            ({"learning_rate": 0.0}, "^learning_rate must be positive"),
            ({"learning_rate": 1e30}, "^non-finite loss .*: lower learning_rate .now 1e.30.$"),
            ({"validation_fraction": 1.0}, "^validation_fraction is None or from 0 to 0.9"),
            ({"device": "abacus"}, "^no device 'abacus' here: .*; try cpu$"),
        ],
    )
    def test_parameters_are_refused_in_their_own_words(self, parameter: dict, words: str):
        with pytest.raises(ValueError, match=words) as refused:
            NICE(**{"law": "additive", "random_state": 0} | parameter).fit(gaussian_rows(60))
        assert not re.search(r"--|recipe|NICE|model\.|train\.|preprocess|memory", str(refused.value))

    def test_no_samples(self, fitted: NICE):
        with pytest.raises(ValueError, match="at least 1 sample"):
            fitted.sample(0)


class TestAwkwardRows:
    def test_constant_and_repeated_columns_and_rows(self):
        x = gaussian_rows(100)
        x = np.column_stack([x, x[:, 0], np.full(100, 7.0), np.zeros(100)])
        x = np.concatenate([x, x])
        model = NICE(law="additive", random_state=0, epochs=20).fit(x)
        assert np.isfinite(model.score_samples(x)).all()
        assert np.isfinite(model.sample(100, random_state=0)).all()
        wrong = x[:1] + np.array([0, 0, 0, 0, 1, 0])
        assert model.score_samples(wrong) < model.score_samples(x).min()

    def test_more_columns_than_rows(self):
        x = np.random.default_rng(0).normal(size=(60, 100))
        assert np.isfinite(NICE(law="additive", random_state=0, epochs=2).fit(x).score(x[:5] + 0.1))

    def test_very_many_columns(self):
        x = np.random.default_rng(0).normal(size=(60, 1_500))
        model = NICE(law="additive", random_state=0, epochs=1).fit(x)
        assert model.recipe_.model.preprocess == "none"
        assert np.isfinite(model.score(x))

    @pytest.mark.parametrize("n", [2, 3, 5, 11, 49])
    def test_very_few_rows(self, n: int):
        x = gaussian_rows(n)
        model = NICE(law="additive", random_state=0).fit(x)
        assert np.isfinite(model.score(gaussian_rows(10, seed=2)))
        assert model.recipe_.model.couplings == 0


class TestUnits:
    """An offset or a scale of the columns changes nothing but the units, also where float32 has no digits for them."""

    @pytest.fixture(scope="class")
    @classmethod
    def rows(cls) -> np.ndarray:
        return np.round(gaussian_rows(300) * 4096) / 4096  # which float64 holds exactly beside the offsets below

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, rows: np.ndarray) -> NICE:
        return NICE(law="additive", random_state=0, epochs=30).fit(rows)

    @pytest.mark.parametrize("offset", [1e12, -(2.0**40)])
    def test_an_offset(self, model: NICE, rows: np.ndarray, offset: float):
        far = NICE(law="additive", random_state=0, epochs=30).fit(rows + offset)
        np.testing.assert_allclose(far.score_samples(rows + offset), model.score_samples(rows), rtol=0, atol=1e-3)
        drawn, moved = model.sample(500, random_state=1), far.sample(500, random_state=1)
        np.testing.assert_allclose(moved - offset, drawn, rtol=0, atol=1e-3)
        holed = rows[:5].copy()
        holed[:, 1] = np.nan
        filled, moved = (each.impute(x, draws=80, steps=100) for each, x in ((model, holed), (far, holed + offset)))
        np.testing.assert_allclose(moved - offset, filled, rtol=0, atol=1e-3)
        np.testing.assert_allclose(far.transform(rows + offset), model.transform(rows), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("scale", [1e-300, 1e30])
    def test_a_scale(self, model: NICE, rows: np.ndarray, scale: float):
        other = NICE(law="additive", random_state=0, epochs=30).fit(rows * scale)
        expected = model.score_samples(rows) - 3 * np.log(scale)
        np.testing.assert_allclose(other.score_samples(rows * scale), expected, rtol=0, atol=1e-3)
        nats = [each.history_[-1]["valid_nats"] for each in (model, other)]
        assert nats[1] == pytest.approx(nats[0] - 3 * np.log(scale), abs=1e-3)
        drawn = other.sample(500, random_state=1) / scale
        np.testing.assert_allclose(drawn, model.sample(500, random_state=1), rtol=1e-4, atol=1e-3)

    def test_a_warm_start_keeps_them(self, rows: np.ndarray):
        model = NICE(law="additive", random_state=0, epochs=5, warm_start=True).fit(rows * 1e-200 + 0.0)
        before = model.score(rows * 1e-200)
        assert model.fit(rows * 1e-200).score(rows * 1e-200) > before - 0.1

    def test_what_the_command_line_cannot_hold_is_not_saved(self, rows: np.ndarray, tmp_path: Path):
        model = NICE(law="additive", random_state=0, couplings=0).fit(rows * 1e-200)
        with pytest.raises(NicestError, match=r"spread is from 1e-30 to 1e\+30: rescale X to save it"):
            model.save(tmp_path / "run")

    def test_columns_of_several_offsets_reach_the_command_line(self, rows: np.ndarray, tmp_path: Path):
        """.npy, whose float64 the command line keeps: in float32 all rows of the first column are one."""
        moved = rows + np.array([1e12, 0, -1e6])
        model = NICE(law="additive", random_state=0, epochs=1).fit(moved)
        model.save(tmp_path / "run")
        np.save(tmp_path / "x.npy", moved)
        command = ["score", str(tmp_path / "run"), str(tmp_path / "x.npy"), "--out", str(tmp_path / "s.csv")]
        assert CliRunner().invoke(app, command).exit_code == 0
        found = np.genfromtxt(tmp_path / "s.csv", delimiter=",", names=True)["log_density"]
        np.testing.assert_allclose(found, model.score_samples(moved), rtol=0, atol=1e-3)
        np.save(tmp_path / "x.npy", moved[:, :2])
        with pytest.raises(NicestError, match=r"expected rows of 3 numbers, the columns of training, got \(300, 2\)"):
            score(nicest.open(tmp_path / "run"), [tmp_path / "x.npy"], out=tmp_path / "t.csv")


class TestWeights:
    """A weight of 2 is a row that comes twice."""

    CLOSED = {"couplings": 0, "prior": "gaussian", "marginals": "none", "shrinkage": 0.0, "epochs": 1}  # noqa: RUF012

    def gaussian(self, x: np.ndarray, weight: np.ndarray | None) -> NICE:
        """A full Gaussian in closed form, but for a scaling that hardly learns."""
        return NICE(law="additive", random_state=0, learning_rate=1e-12, **self.CLOSED).fit(x, sample_weight=weight)

    @pytest.mark.parametrize(("second", "unit"), [(3.0, 1), (3.0, 0.01), (3.0, 1e5), (2.7, 1)])
    def test_a_gaussian_has_the_weighted_moments(self, second: float, unit: float):
        x = np.random.default_rng(0).normal(size=(4_000, 2)) @ np.array([[1, 0.5], [0, 1]])
        weight = np.where(x[:, 0] > 0.5, second, 1.0) * unit
        weight[x[:, 1] > 1] = 0
        found = self.gaussian(x, weight).score_samples(x)
        mean, covariance = np.average(x, 0, weight), np.cov(x.T, aweights=weight, bias=True)
        gap = np.abs(found - stats.multivariate_normal(mean, covariance).logpdf(x))
        assert gap.max() < (1e-3 if second == 3 else 0.1)
        assert gap.mean() < 0.02
        assert np.abs(found - self.gaussian(x, None).score_samples(x)).mean() > 0.1

    def test_fractions_are_right_in_expectation(self):
        weight = np.array([0.05, 0.1, 1.0, 2.5, 7.0])
        mean = np.mean([repetitions(weight, seed) for seed in range(4_000)], 0)
        np.testing.assert_allclose(mean, 4 * 5 * weight / weight.sum(), atol=0.02)
        assert repetitions(np.array([2.0, 0.0, 1.0]), 0).tolist() == [2, 0, 1]
        assert repetitions(np.array([0.1, 0.0, 0.3]), 0).tolist() == [1, 0, 3]

    def test_rows_of_weight_zero_are_not_there(self):
        x = gaussian_rows(300)
        weight = np.ones(300)
        weight[200:] = 0
        x[200:] = 1e6
        model, without = (
            NICE(law="additive", random_state=0, epochs=20).fit(rows, sample_weight=w)
            for rows, w in ((x, weight), (x[:200], None))
        )
        assert model.columns_ == without.columns_
        assert model.score(x[:200]) == pytest.approx(without.score(x[:200]), abs=0.05)

    def test_training_follows_them(self):
        """Two rings, of which the weights keep one: what is learnt beyond the start is of that one."""
        angle, noise = (
            np.random.default_rng(0).uniform(0, np.pi, 800),
            np.random.default_rng(1).normal(0, 0.1, (800, 2)),
        )
        x = np.column_stack([np.cos(angle), np.sin(angle)]) * np.where(np.arange(800) % 2, 1, -1)[:, None] + noise
        weight = np.where(np.arange(800) % 2, 1.0, 1e-3)
        model = NICE(law="additive", random_state=0).fit(x[:600], sample_weight=weight[:600])
        start = NICE(law="additive", random_state=0, couplings=0).fit(x[:600][1::2])
        assert model.n_epochs_ > 0
        assert model.score(x[601::2]) > start.score(x[601::2]) + 0.1
        assert model.score(x[601::2]) > model.score(x[600::2]) + 1

    def test_copies_of_a_row_are_all_held_out_or_all_train(self):
        rows = np.arange(400.0).reshape(200, 2)
        splits = in_memory("rows", rows, 0, 0.25, copies=np.full(200, 3))
        assert (len(splits.train), len(splits.valid)) == (450, 150)
        assert not {*splits.train[:, 0]} & {*splits.valid[:, 0]}

    @pytest.mark.parametrize(
        ("weight", "words"),
        [
            (-np.ones(60), "Negative values"),
            (np.ones(59), "59"),
            (np.zeros(60), "zero|positive sample_weight"),
            (np.eye(60)[0], "2 rows or more of a positive sample_weight, got 1"),
        ],
    )
    def test_wrong_ones_are_refused(self, weight: np.ndarray, words: str):
        with pytest.raises(ValueError, match=words):
            NICE().fit(gaussian_rows(60), sample_weight=weight)


class TestDiscrete:
    """Integers and few values: probabilities, as of `nicest train table`."""

    @pytest.fixture(scope="class")
    @classmethod
    def rows(cls) -> np.ndarray:
        random = np.random.default_rng(0)
        yes = random.random(2_000) < 0.3
        count = random.poisson(3 + 4 * yes) * 5 + 10
        third = random.choice([0.1, 0.25, 0.7], 2_000, p=[0.5, 0.3, 0.2])
        return np.column_stack([yes, count, third, random.normal(size=2_000) + yes])

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, rows: np.ndarray) -> NICE:
        return NICE(law="additive", discrete="values", random_state=0, width=32, epochs=60).fit(rows)

    def test_columns_are_found(self, model: NICE):
        assert [(column.kind, column.step) for column in model.columns_] == [
            ("steps", 1.0),
            ("steps", 5.0),
            ("values", 1.0),
            ("real", 0.0),
        ]
        assert model.columns_[2].values == (0.1, 0.25, 0.7)
        assert model.recipe_.data.discrete == 3

    def test_probabilities_sum_to_one_and_are_near_the_shares(self):
        x = np.random.default_rng(0).choice([0.0, 1, 2], (1_000, 2), p=[0.2, 0.5, 0.3])
        x[:, 1] = np.where(x[:, 0] == 1, x[:, 1], 0) * 5
        model = NICE(law="additive", discrete="values", random_state=0, width=32).fit(x)
        cells = np.stack(np.meshgrid([0.0, 1, 2], [0.0, 5, 10], indexing="ij"), -1).reshape(-1, 2)
        found = np.exp(model.score_samples(cells))
        shares = np.array([(x == cell).all(1).mean() for cell in cells])
        assert 0.9 < found.sum() < 1.02
        assert np.abs(found - shares).max() < 0.07
        assert model.score(x) < (shares[shares > 0] * np.log(shares[shares > 0])).sum() + 0.01  # less the entropy

    def test_a_row_has_one_score_wherever_it_stands(self, model: NICE, rows: np.ndarray):
        together = model.score_samples(rows[:100])
        np.testing.assert_allclose(together, [model.score_samples(row[None])[0] for row in rows[:100]], atol=1e-9)
        assert np.isfinite(together).all()

    def test_many_rows_are_scored_in_batches(self, model: NICE, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch):
        expected, seen, enter = model.score_samples(rows), [], MixedUnits.enter
        monkeypatch.setattr(model._engine(), "batch", 300)
        monkeypatch.setattr(MixedUnits, "enter", lambda units, x, **how: seen.append(len(x)) or enter(units, x, **how))
        np.testing.assert_allclose(model.score_samples(rows), expected, atol=1e-9)
        assert max(seen) == 300

    def test_values_of_no_training_row_have_no_probability(self, model: NICE, rows: np.ndarray):
        odd = np.repeat(rows[:1], 5, 0)
        odd[1, 0], odd[2, 1], odd[3, 2], odd[4, 3] = 0.5, odd[0, 1] + 1, 0.3, odd[0, 3] + 0.01
        assert np.isneginf(model.score_samples(odd)).tolist() == [False, True, True, True, False]
        assert np.isnan(model.transform(odd)).any(1).tolist() == [False, True, True, True, False]

    def test_samples_and_latent_coordinates(self, model: NICE, rows: np.ndarray):
        drawn = model.sample(4_000, random_state=0)
        for i in range(3):
            assert {*drawn[:, i]} <= {*rows[:, i]}
        np.testing.assert_allclose(drawn.mean(0), rows.mean(0), rtol=0.1, atol=0.06)
        np.testing.assert_allclose(model.inverse_transform(model.transform(rows)), rows, atol=1e-9)

    def test_impute(self, model: NICE, rows: np.ndarray):
        holed = rows[:6].copy()
        holed[:, 2] = np.nan
        filled, low, high = model.impute(holed, draws=80, steps=200, interval=0.9)
        assert {*filled[:, 2], *low[:, 2], *high[:, 2]} <= {0.1, 0.25, 0.7}
        assert np.array_equal(np.delete(filled, 2, 1), np.delete(rows[:6], 2, 1))
        holed[0, 0] = 0.5
        with pytest.warns(UserWarning, match="1 rows hold values that training never saw"):
            assert np.isnan(model.impute(holed, draws=80, steps=200)[0, 2])

    def test_the_command_line_scores_it_alike(self, model: NICE, rows: np.ndarray, tmp_path: Path):
        model.save(tmp_path / "run")
        np.save(tmp_path / "x.npy", rows)
        result = score(nicest.open(tmp_path / "run"), [tmp_path / "x.npy"], out=tmp_path / "s.csv")
        assert result["mean_nats"] == pytest.approx(model.score(rows), abs=0.05)  # other points
        found = np.genfromtxt(tmp_path / "s.csv", delimiter=",", names=True)["outlier_score"]
        assert found.mean() == pytest.approx(0.5, abs=0.02)
        np.testing.assert_allclose(NICE.load(tmp_path / "run").score_samples(rows), model.score_samples(rows))

    def test_a_warm_start_refuses_values_that_are_new(self, rows: np.ndarray):
        model = NICE(law="additive", discrete="values", random_state=0, epochs=1, warm_start=True).fit(rows[:200])
        model.fit(rows[:200][rows[:200, 0] == 0])  # one value of a column is not a constant then
        other = rows[:200].copy()
        other[7, 2] = 0.3
        with pytest.raises(ValueError, match="got others in row 7: fit without warm_start"):
            model.fit(other)

    def test_missing_cells_of_them_train(self, rows: np.ndarray):
        holed = rows[:300].copy()
        holed[::3, 1] = np.nan
        model = NICE(law="additive", discrete="values", random_state=0, epochs=5).fit(holed)
        assert model.columns_[1].kind == "steps"
        assert np.isfinite(model.score(rows[:300]))


class TestMembers:
    """Several flows, whose densities are averaged."""

    @staticmethod
    def rows(seed: int) -> np.ndarray:
        x = np.random.default_rng(seed).normal(size=(400, 3))
        return np.column_stack([x[:, 0], x[:, 0] ** 2 + 0.3 * x[:, 1], np.round(3 * x[:, 2])])

    @pytest.fixture(scope="class")
    @classmethod
    def averaged(cls) -> NICE:
        rows = cls.rows(0)
        rows[::7, 1] = np.nan  # drawn while it trains
        return NICE(law="additive", members=3, discrete="values", random_state=0, epochs=20).fit(rows)

    @pytest.mark.parametrize(
        ("n", "dim", "effort", "members"),
        [(300, 3, "high", 5), (30_000, 3, "high", 2), (300, 3, "medium", 1), (30, 3, "high", 1), (300, 1, "high", 1)],
    )
    def test_high_effort_averages(self, n: int, dim: int, effort: str, members: int):
        given = {"model": {}, "train": {"effort": effort}}
        assert {recipe.model.members for recipe in recipes_for(n, dim, given)} == {members}
        one = {"model": {"members": 1}, "train": {"effort": effort}}
        assert {recipe.model.members for recipe in recipes_for(n, dim, one)} == {1}

    def test_they_do_better_than_one_of_them(self, averaged: NICE):
        """By Jensen's inequality, in the mean; and each has weights of its own."""
        flow = averaged.flow_
        y = flow.units.enter(torch.from_numpy(averaged._codes(self.rows(1))[0]), noise=False)
        with torch.no_grad():
            each = [float(member.log_density(y).mean()) for member in flow.members]
            assert float(flow.log_density(y).mean()) > np.mean(each) + 1e-3
        assert len(set(each)) == 3

    def test_all_works_but_latent_coordinates(self, averaged: NICE, tmp_path: Path):
        rows = self.rows(1)[:60]
        assert np.isfinite(averaged.score_samples(rows)).all()
        drawn = averaged.sample(50, random_state=1)
        assert np.array_equal(drawn, averaged.sample(50, random_state=1))
        assert (averaged.sample(20, where="x0 > 1.5", random_state=0)[:, 0] > 1.5).all()
        rows[:5, 2] = np.nan
        assert np.isfinite(averaged.impute(rows, steps=400, draws=40)).all()
        assert np.isfinite(averaged.calibration(rows[5:], cells=0).pit).all()
        averaged.save(tmp_path / "run")
        again = NICE.load(tmp_path / "run")
        assert np.array_equal(again.sample(50, random_state=1), drawn)
        assert again.get_params()["members"] == 3
        for method in (averaged.transform, averaged.inverse_transform):
            with pytest.raises(ValueError, match="the mean of 3 flows has no latent coordinates: fit with members=1"):
                method(rows[5:])
        with pytest.raises(NicestError, match=r"mean of 3 flows, which has no latent .*: train with model\.members=1"):
            spectrum(Run(tmp_path / "run"))


class TestSizes:
    @pytest.mark.parametrize("n", [2, 49, 50, 100, 1_000, 30_000, 1_000_000])
    @pytest.mark.parametrize("dim", [1, 2, 100, 10_000])
    @pytest.mark.parametrize("effort", WORK)
    def test_there_are_recipes_for_every_size_and_their_work_is_bounded(self, n: int, dim: int, effort: str):
        """Multiplications of the networks, forward, in all steps together."""
        for recipe in recipes_for(n, dim, {"model": {}, "train": {"effort": effort}}):
            flow, batch = build(recipe.changed({"data": {"shape": [min(dim, 100)]}}, "")), recipe.train.batch
            each = sum(p.numel() for p in flow.parameters() if p.ndim == 2) * dim / min(dim, 100)
            per_epoch = max(1, round(n * (1 - held_out(n))) // batch)
            steps = recipe.train.epochs * per_epoch
            assert steps <= 10_000 + per_epoch
            assert steps * batch * each < 3 * WORK[effort] or steps <= 300 + per_epoch
            assert (recipe.model.couplings == 0) == (n < 50 or dim == 1)

    def test_what_is_given_stays(self):
        given = {"model": {"width": 7, "couplings": 6}, "train": {"batch": 10, "epochs": 3}}
        for recipe in recipes_for(1_000, 5, given):
            assert (recipe.model.width, recipe.model.couplings) == (7, 6)
            assert (recipe.train.batch, recipe.train.epochs) == (10, 3)

    def test_a_large_table_takes_bounded_time_for_each_row(self):
        x = np.random.default_rng(0).normal(size=(50_000, 20)).astype(np.float32)
        began = time.perf_counter()
        model = NICE(law="additive", random_state=0, epochs=1).fit(x)
        assert model.score(x[:1_000]) == pytest.approx(-20 * 0.5 * np.log(2 * np.pi * np.e), abs=1.0)
        assert time.perf_counter() - began < 60


def clusters(n: int, seed: int = 0) -> np.ndarray:
    """Sixteen narrow bumps in a square, of entropy 2 log 4 + log(2 pi e 0.03^2)."""
    random = np.random.default_rng(seed)
    return random.integers(0, 4, (n, 2)) + random.normal(0, 0.03, (n, 2))


class TestEffort:
    def test_splines_are_tried_and_kept_where_they_are_better(self, capsys: pytest.CaptureFixture):
        x, unseen = clusters(1_000), clusters(500, seed=1)
        small = {"epochs": 40, "couplings": 4, "width": 64, "random_state": 0}
        model = NICE(effort="medium", verbose=1, **small).fit(x)
        assert model.recipe_.model.law == "spline"
        assert model.recipe_.train.epochs == 40
        line = next(line for line in capsys.readouterr().err.splitlines() if "short trainings" in line)
        assert re.search(r"splines -?\d+\.\d\d, splines after a whitening -?\d+.*, additive couplings -?\d+", line)
        entropy = 2 * np.log(4) + np.log(2 * np.pi * np.e * 0.03**2)
        assert model.score(unseen) == pytest.approx(-entropy, abs=0.8)
        assert NICE(law="additive", **small).fit(x).score(unseen) < -entropy - 2
        drawn = model.sample(2_000, random_state=0)
        assert (np.abs(drawn - drawn.round()) < 0.15).mean() > 0.85  # 0.88 to 0.92 over eight seeds

    def test_of_few_rows_no_more_is_learnt_than_they_teach(self):
        """Sixty Gaussian rows of twenty columns: nothing beyond the shrunk covariance of the start."""
        x = np.random.default_rng(0).normal(size=(160, 20)) @ np.random.default_rng(1).normal(size=(20, 20))
        start = NICE(couplings=0, random_state=0).fit(x[:60])
        assert NICE(epochs=40, random_state=0).fit(x[:60]).score(x[60:]) > start.score(x[60:]) - 0.5

    def test_high_effort_on_few_rows_does_no_more_than_they_allow(self):
        model = NICE(effort="high", random_state=0).fit(gaussian_rows(30))
        assert model.recipe_.model.couplings == 0
        assert np.isfinite(model.score(gaussian_rows(10, seed=1)))

    def test_a_single_column_gets_a_spline_of_its_own(self):
        random = np.random.default_rng(0)
        x, unseen = (
            np.where(random.random((2_000, 1)) < 0.5, 0, 5) + random.normal(0, 0.3, (2_000, 1)) for _ in range(2)
        )
        entropy = 0.5 * np.log(2 * np.pi * np.e * 0.3**2) + np.log(2)
        model = NICE(effort="low", random_state=0).fit(x)
        assert model.score(unseen) == pytest.approx(-entropy, abs=0.1)
        grid = np.linspace(-10, 15, 100_001)[:, None]
        assert np.trapezoid(np.exp(model.score_samples(grid)), grid[:, 0]) == pytest.approx(1, abs=1e-3)

    def test_an_effort_that_there_is_not(self):
        with pytest.raises(ValueError, match="effort is one of low, medium, high; got 'huge'"):
            NICE(effort="huge").fit(gaussian_rows(60))


class TestTypes:
    """Whether a column is discrete is a matter of its type, unless its values are to decide."""

    def test_integers_of_arrays_and_frames_are_discrete_and_floats_are_not(self):
        pd = pytest.importorskip("pandas")
        random = np.random.default_rng(0)
        table = pd.DataFrame(
            {"n": random.poisson(4, 200), "x": random.normal(size=200), "f": random.poisson(4, 200) * 1.0}
        )
        table["b"] = random.random(200) < 0.5
        model = NICE(law="additive", epochs=1, random_state=0).fit(table)
        assert [column.kind for column in model.columns_] == ["steps", "real", "real", "steps"]
        whole = NICE(law="additive", epochs=1, random_state=0).fit(random.poisson(4, (200, 2)))
        assert [column.kind for column in whole.columns_] == ["steps", "steps"]
        by_values = NICE(law="additive", discrete="values", epochs=1, random_state=0).fit(table)
        assert [column.kind for column in by_values.columns_] == ["steps", "real", "steps", "steps"]

    def test_polars(self):
        polars = pytest.importorskip("polars")
        random = np.random.default_rng(0)
        table = polars.DataFrame({"n": random.poisson(4, 200), "x": random.normal(size=200)})
        model = NICE(law="additive", epochs=1, random_state=0).fit(table)
        assert [column.kind for column in model.columns_] == ["steps", "real"]

    def test_anything_else_is_refused(self):
        with pytest.raises(ValueError, match="discrete is 'types' or 'values', got 'all'"):
            NICE(discrete="all").fit(gaussian_rows(60))


class TestImpute:
    """Missing cells, against the closed form of a Gaussian."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> NICE:
        random = np.random.default_rng(0)
        x = random.standard_normal((800, 1))
        rows = np.hstack([x, 3 * x + random.standard_normal((800, 1)), random.standard_normal((800, 1))])
        return NICE(law="additive", random_state=0).fit(rows)

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
    model = NICE(law="additive", epochs=1, couplings=4, random_state=0, warm_start=True).fit(rows)
    model.fit(rows)  # the same: nothing is said
    with pytest.warns(UserWarning, match="continues to train the fitted flow: a new couplings has no effect"):
        model.set_params(couplings=3).fit(rows)
