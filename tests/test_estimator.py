"""`NICE` as scikit-learn knows estimators, and as a density."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from typer.testing import CliRunner

import nicest
from nicest import NICE, NicestError
from nicest.cli import app
from nicest.flows import Coupling
from nicest.inference.engine import Engine
from nicest.recipes.defaults import recipe_for_rows
from nicest.train.fit import train as train_recipe

MIXING = np.array([[1.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 2.0]])


def gaussian_rows(n: int = 400, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 3)) @ MIXING + [0, 5, -20]


@pytest.fixture(scope="module")
def fitted() -> NICE:
    return NICE(law="additive", random_state=0, epochs=20).fit(gaussian_rows())


@pytest.mark.filterwarnings("ignore:.*array_api:sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([NICE(effort="low", epochs=2)])
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

        monkeypatch.setattr("nicest.estimators.nice.Engine", Counted)
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

    def test_a_run_of_the_command_line_is_loaded(self, tmp_path: Path):
        x = gaussian_rows().astype(np.float32)
        np.save(tmp_path / "x.npy", x)
        recipe = recipe_for_rows(len(x), 3, {"model": {"law": "additive"}, "train": {"epochs": 2}})
        train_recipe(recipe.override(f"data.name={tmp_path / 'x.npy'}"), tmp_path / "run")
        model = NICE.load(tmp_path / "run")
        assert model.score(x) == pytest.approx(NICE(law="additive", random_state=0, epochs=2).fit(x).score(x), abs=0.1)
        assert (model.predict(x) == 1).mean() > 0.95
        assert model.get_params()["epochs"] == 2

    def test_a_model_of_images_is_not(self, tmp_path: Path):
        from nicest.recipes import load_recipe

        recipe = load_recipe("digits").override("train.epochs=1", "model.width=8", "model.hidden_layers=1")
        train_recipe(recipe, tmp_path / "run")
        with pytest.raises(NicestError, match="expected a model of rows of numbers"):
            NICE.load(tmp_path / "run")


class TestBadRows:
    @pytest.mark.parametrize(
        ("rows", "words"),
        [
            ([[1.0, np.nan], [2, 3]], "X with NaN: NICETable takes rows with missing cells"),
            ([[1.0, np.inf], [2, 3]], "infinity"),
            ([["a", "b"], ["c", "d"]], "expected numbers: NICETable takes tables of any columns"),
            ([[1.0, 2.0]], "minimum of 2"),
            ([1.0, 2.0, 3.0], "2D array"),
            (np.zeros((0, 3)), "0 sample"),
            (np.full((10, 2), 1e306), "expected values up to 1e.305, got 1e.306: rescale that column"),
        ],
    )
    def test_they_are_refused_in_words(self, rows: object, words: str):
        with pytest.raises(ValueError, match=words):
            NICE().fit(rows)

    @pytest.mark.parametrize(
        ("parameter", "words"),
        [
            ({"width": 0}, "^width must be from 1 to 100000; got 0"),
            ({"width": "wide"}, "^width is of type int; got 'wide'"),
            ({"law": "adittive"}, "^law is one of .*did you mean 'additive'"),
            ({"whitening": "some"}, "^whitening is one of"),
            ({"hidden_layers": [1, 2]}, "^hidden_layers must be one number, or one for each of the 4 couplings"),
            ({"effort": "huge"}, "effort is one of low, medium, high; got 'huge'"),
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
        np.testing.assert_allclose(far.transform(rows + offset), model.transform(rows), rtol=0, atol=1e-3)

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


def clusters(n: int, seed: int = 0) -> np.ndarray:
    """Sixteen narrow bumps in a square, of entropy 2 log 4 + log(2 pi e 0.03^2)."""
    random = np.random.default_rng(seed)
    return random.integers(0, 4, (n, 2)) + random.normal(0, 0.03, (n, 2))


class TestEffort:
    def test_splines_follow_what_additive_couplings_cannot(self):
        x, unseen = clusters(1_000), clusters(500, seed=1)
        small = {"epochs": 40, "couplings": 4, "width": 64, "random_state": 0}
        model = NICE(effort="medium", **small).fit(x)
        assert model.recipe_.model.law == "spline"
        assert model.recipe_.train.epochs == 40
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
