"""`NICERegressor` and `NICEClassifier` as scikit-learn knows estimators, and as distributions."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from scipy import stats
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import nicest
from nicest import NICE, NICEClassifier, NICERegressor, NicestError
from nicest.predictors import Predictor
from nicest.tasks.predict import predict

SMALL: dict[str, Any] = {"effort": "low", "width": 8, "hidden_layers": 2, "bins": 4, "learning_rate": 0.03}
REGRESSOR = SMALL | {"epochs": 12, "members": 2, "trees": 8}
CLASSIFIER = SMALL | {"epochs": 4, "members": 1, "couplings": 2, "batch_size": 64}
WEIGHTS = {  # `TestWeights` holds the weights to what is equivalent
    "check_sample_weight_equivalence_on_dense_data": "rows that come twice are in other batches than rows of weight 2"
}


@pytest.mark.filterwarnings("ignore:.*array_api:sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [NICERegressor(**REGRESSOR), NICEClassifier(**CLASSIFIER)], expected_failed_checks=lambda estimator: WEIGHTS
)
def test_they_are_estimators(estimator: Predictor, check: Callable):
    check(estimator)


def rows(n: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """y = 10 + 2 x0 + e, whose spread grows with x1."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    return X, 10 + 2 * X[:, 0] + np.exp(X[:, 1] / 2) * rng.normal(size=n)


def frame(n: int = 200, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Texts, booleans and dates beside numbers, with missing cells; y goes with the kind."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(["a", "b", "c"], n).astype(object)
    y = np.select([kind == "a", kind == "b"], [0.0, 5.0], 10.0) + rng.normal(size=n)
    table = pd.DataFrame(
        {
            "x": np.where(rng.random(n) < 0.1, np.nan, rng.normal(size=n)),
            "kind": np.where(rng.random(n) < 0.1, None, kind),
            "member": rng.random(n) < 0.5,
            "count": rng.integers(0, 5, n),
        }
    )
    return table, y


@pytest.fixture(scope="module")
def fitted() -> NICERegressor:
    return NICERegressor(**REGRESSOR | {"epochs": 40}, random_state=0).fit(*rows(1000))


@pytest.fixture(scope="module")
def framed() -> NICERegressor:
    return NICERegressor(**REGRESSOR, random_state=0).fit(*frame())


@pytest.fixture(scope="module")
def iris() -> NICEClassifier:
    return NICEClassifier(**CLASSIFIER | {"epochs": 60}, random_state=0).fit(*load_iris(return_X_y=True))


class TestRegressor:
    def test_finds_the_mean_and_the_spread(self, fitted: NICERegressor):
        X, y = rows(500, 1)
        truth = stats.norm(10 + 2 * X[:, 0], np.exp(X[:, 1] / 2))
        assert fitted.score(X, y) > 0.6
        p = fitted.predict_distribution(X)
        assert p.log_prob(y).mean() > truth.logpdf(y).mean() - 0.1
        low, high = fitted.predict_interval(X, 0.9).T
        assert 0.84 < ((y >= low) & (y <= high)).mean() < 0.96
        assert stats.spearmanr(high - low, truth.std()).statistic > 0.8
        assert p.crps(y).mean() < 1.1 * truth.std().mean() / math.sqrt(math.pi)  # of the truth: σ / √π

    def test_a_distribution_agrees_with_itself(self, fitted: NICERegressor):
        X, y = rows(20, 1)
        p = fitted.predict_distribution(X)
        assert len(p) == 20
        step = 1e-4
        slope = (p.cdf(y + step) - p.cdf(y - step)) / (2 * step)
        np.testing.assert_allclose(p.log_prob(y), np.log(slope), atol=1e-4)
        found = p.quantile([0.1, 0.5, 0.9])
        assert found.shape == (20, 3)
        for share, column in zip((0.1, 0.5, 0.9), found.T, strict=True):
            np.testing.assert_allclose(p.cdf(column), share, atol=1e-8)
        np.testing.assert_allclose(p.quantile(0.5), found[:, 1], rtol=1e-12)  # products of other sizes round otherwise
        np.testing.assert_allclose(fitted.predict_interval(X, 0.8), found[:, [0, 2]])
        drawn = p.sample(4000, random_state=0)
        assert drawn.shape == (20, 4000)
        np.testing.assert_array_equal(drawn, p.sample(4000, random_state=0))
        np.testing.assert_allclose(drawn.mean(1), p.mean(), atol=5 * p.std().max() / math.sqrt(4000) + 0.05)
        np.testing.assert_allclose(drawn.std(1), p.std(), rtol=0.15)
        np.testing.assert_allclose(p.mean(), fitted.predict(X))
        np.testing.assert_allclose(p.points().mean(1), p.mean())

    def test_the_unit_of_y_does_not_matter(self):
        X, y = rows(100)
        options = {**REGRESSOR, "random_state": 0, "trees": 0}  # of two splits that are as good, rounding chooses one
        small, large = (NICERegressor(**options).fit(X, y * unit) for unit in (1e-25, 1e25))
        np.testing.assert_allclose(large.predict(X) / 1e50, small.predict(X), rtol=1e-3)
        off = small.predict_distribution(X).log_prob(y * 1e-25) - large.predict_distribution(X).log_prob(y * 1e25)
        np.testing.assert_allclose(off, 50 * math.log(10), rtol=1e-4)
        assert small.history_[-1]["valid_nats"] - large.history_[-1]["valid_nats"] == pytest.approx(115.1, abs=0.1)

    def test_integers_have_probabilities_that_no_model_can_better(self):
        random = np.random.default_rng(0)
        X = random.normal(size=(1500, 2))
        truth = stats.poisson(np.exp(0.5 * X[:, 0] + 1))
        y = 3 * truth.rvs(random_state=random)
        model = NICERegressor(**REGRESSOR, random_state=0).fit(X[:1000], y[:1000])
        p, best = model.predict_distribution(X[1000:]), truth.logpmf(y // 3)[1000:].mean()
        assert best - 0.2 < p.log_prob(y[1000:]).mean() < best + 0.05  # of a sample, that is not the expectation
        few = model.predict_distribution(X[1000:1010])
        total = sum(np.exp(few.log_prob(np.full(10, k))) for k in range(-60, 300, 3))
        np.testing.assert_allclose(total, 1, atol=1e-3)
        assert np.isneginf(p.log_prob(y[1000:] + 1)).all()
        np.testing.assert_allclose(
            p.cdf(np.full(500, 4.5)) - p.cdf(np.full(500, -0.5)),
            np.exp(p.log_prob(np.zeros(500))) + np.exp(p.log_prob(np.full(500, 3))),
        )
        assert set(np.unique(p.sample(5, random_state=0) % 3)) == {0}
        assert p.std().mean() == pytest.approx(3 * truth.std()[1000:].mean(), rel=0.25)
        assert p.crps(y[1000:]).mean() == pytest.approx(p.std().mean() / math.sqrt(math.pi), rel=0.15)

    def test_missing_cells_are_read_and_predicted_from(self):
        X, y = rows(300)
        X[::3, 0] = np.nan
        model = NICERegressor(**REGRESSOR, random_state=0).fit(X, y)
        found = model.predict_interval([[np.nan, 0.0], [0.0, 0.0], [np.nan, np.nan]])
        assert np.isfinite(found).all()
        assert found[0, 1] - found[0, 0] > found[1, 1] - found[1, 0]  # less is known

    @pytest.mark.parametrize("shares", [0, 1, -0.1, [0.5, 2], np.nan])
    def test_shares_that_are_none(self, fitted: NICERegressor, shares: object):
        with pytest.raises(ValueError, match="expected shares between 0 and 1"):
            fitted.predict_distribution(rows(5)[0]).quantile(shares)

    def test_wrong_arguments_of_a_distribution(self, fitted: NICERegressor):
        p = fitted.predict_distribution(rows(5)[0])
        for method in (p.log_prob, p.cdf, p.crps):
            with pytest.raises(ValueError, match=r"expected y for each of 5 rows, got shape \(4,\)"):
                method(np.zeros(4))
        with pytest.raises(ValueError, match="expected at least 1 draw for every row, got n=0"):
            p.sample(0)
        with pytest.raises(ValueError, match=r"expected a probability between 0 and 1, got 1\.5"):
            fitted.predict_interval(rows(5)[0], 1.5)


class TestClassifier:
    def test_probabilities_are_by_bayes(self, iris: NICEClassifier):
        X, y = load_iris(return_X_y=True)
        joint = np.exp(iris.log_likelihood(X)) * np.bincount(y) / len(y)
        np.testing.assert_allclose(iris.predict_proba(X), joint / joint.sum(1, keepdims=True), rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(np.exp(iris.predict_log_proba(X)).sum(1), 1)
        assert iris.score(X, y) > 0.9

    def test_likelihoods_are_densities_given_the_class(self):
        """Of one column, by quadrature."""
        rng = np.random.default_rng(0)
        y = rng.random(200) < 0.3
        X = np.where(y, 3.0, -1.0)[:, None] + rng.normal(size=(200, 1))
        model = NICEClassifier(**CLASSIFIER | {"epochs": 60}, random_state=0).fit(X, y)
        grid = np.linspace(-60, 60, 20_001)
        nats = model.log_likelihood(grid[:, None])
        np.testing.assert_allclose(np.trapezoid(np.exp(nats), grid, axis=0), 1, atol=1e-3)
        assert model.classes_.tolist() == [False, True]
        assert model.predict([[5.0], [-4.0]]).tolist() == [True, False]

    def test_rows_that_are_like_no_class_have_the_prior(self, iris: NICEClassifier):
        assert iris.predict_proba([[1e30] * 4])[0] == pytest.approx([1 / 3] * 3)

    def test_many_classes_and_columns(self):
        X = np.random.default_rng(0).normal(size=(60, 400))
        y = np.arange(60) % 30
        X[:, 0] += y
        model = NICEClassifier(**CLASSIFIER | {"epochs": 1}, random_state=0).fit(X, y)
        assert model.predict_proba(X[:3]).shape == (3, 30)

    def test_words_are_classes(self):
        X, y = load_iris(return_X_y=True)
        names = np.array(["setosa", "versicolor", "virginica"])[y]
        model = NICEClassifier(**CLASSIFIER, random_state=0).fit(X, names)
        assert set(model.predict(X)) <= set(names)

    def test_a_frame_of_texts(self):
        X, y = frame()
        X = X.assign(x=X["x"].fillna(0.0), kind=X["kind"].fillna("a"))
        model = NICEClassifier(**CLASSIFIER, random_state=0).fit(X, y > 5)
        assert model.predict_proba(X).shape == (200, 2)
        unseen = model.predict_proba(X[:2].assign(kind="z"))
        np.testing.assert_allclose(unseen, np.exp(model.class_log_prior_)[None].repeat(2, 0))
        with pytest.raises(ValueError, match="expected X without missing cells: fill them in"):
            NICEClassifier(**CLASSIFIER).fit(frame()[0], y > 5)


class TestInScikitLearn:
    def test_pipelines_and_grid_search_over_numpy_numbers(self):
        X, y = rows(80)
        pipe = make_pipeline(StandardScaler(), NICERegressor(**REGRESSOR, random_state=0))
        grid = {"niceregressor__members": np.array([1, 2]), "niceregressor__dropout": [0.0]}
        search = GridSearchCV(pipe, grid, cv=2).fit(X, y)
        assert search.best_params_["niceregressor__members"] in (1, 2)
        assert search.predict(X).shape == (80,)

    def test_cross_validation_of_a_frame(self):
        X, y = frame(90)
        X.loc[:88, "count"] = 0  # constant in a fold
        assert np.isfinite(cross_val_score(NICERegressor(**REGRESSOR, random_state=0), X, y, cv=2)).all()

    @pytest.mark.parametrize("name", ["fitted", "framed", "iris"])
    def test_clone_and_pickle(self, name: str, request: pytest.FixtureRequest):
        model = request.getfixturevalue(name)
        copied = clone(model)
        assert copied.get_params() == model.get_params()
        assert not hasattr(copied, "flow_")
        X = {"fitted": rows(9)[0], "framed": frame(9)[0], "iris": load_iris().data[:9]}[name]
        assert np.array_equal(pickle.loads(pickle.dumps(model)).predict(X), model.predict(X))

    def test_the_same_random_state_gives_the_same_numbers(self):
        X, y = rows(80)
        one, same, other = (NICERegressor(**REGRESSOR, random_state=seed).fit(X, y).predict(X) for seed in (1, 1, 2))
        assert np.array_equal(one, same)
        assert not np.array_equal(one, other)

    def test_random_numbers_of_others_stay_as_they_were(self):
        before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        model = NICERegressor(**REGRESSOR, random_state=0).fit(*rows(60))
        model.predict_distribution(rows(5)[0]).sample(3, random_state=0)
        assert torch.equal(torch.get_rng_state(), before)
        assert np.array_equal(np.random.get_state()[1], numbers)  # noqa: NPY002

    def test_they_print_nothing_unless_asked(self, capfd: pytest.CaptureFixture[str]):
        NICERegressor(**REGRESSOR, random_state=0).fit(*rows(60))
        assert capfd.readouterr() == ("", "")
        NICERegressor(**REGRESSOR, random_state=0, verbose=1).fit(*rows(60))
        assert "valid" in capfd.readouterr().err


class TestFrames:
    @pytest.mark.parametrize("library", ["pyarrow", "polars"])
    def test_of_other_libraries_are_the_same(self, framed: NICERegressor, library: str):
        X, _ = frame(30, 1)
        table: Any = pa.Table.from_pandas(X)
        other = table if library == "pyarrow" else pytest.importorskip("polars").from_arrow(table)
        np.testing.assert_array_equal(framed.predict(other), framed.predict(X))

    def test_texts_count(self, framed: NICERegressor):
        X, _ = frame(30, 1)
        a, c = (framed.predict(X.assign(kind=kind)).mean() for kind in "ac")
        assert a + 3 < c

    def test_an_unseen_text_is_a_missing_one(self, framed: NICERegressor):
        X, _ = frame(30, 1)
        unseen, missing = (framed.predict(X.assign(kind=kind)) for kind in ("z", None))
        np.testing.assert_array_equal(unseen, missing)
        assert not np.array_equal(missing, framed.predict(X.assign(kind="a")))

    def test_columns_go_by_name(self, framed: NICERegressor):
        X, _ = frame(30, 1)
        np.testing.assert_array_equal(framed.predict(X[list(X)[::-1]].assign(more=1)), framed.predict(X))
        with pytest.raises(ValueError, match="expected the columns of training, got none called 'kind'"):
            framed.predict(X.drop(columns="kind"))
        with pytest.raises(ValueError, match="expected a data frame with the columns of training, got ndarray"):
            framed.predict(X.to_numpy())

    def test_constant_columns_may_be_given(self):
        X, y = frame(60)
        model = NICERegressor(**REGRESSOR, random_state=0).fit(X.assign(x=1.5, count=3, member=True), y)
        assert np.isfinite(model.predict(X)).all()


class TestRunFolder:
    @pytest.mark.parametrize("name", ["fitted", "framed", "iris"])
    def test_saved_and_loaded_to_the_bit(self, name: str, request: pytest.FixtureRequest, tmp_path: Path):
        model = request.getfixturevalue(name)
        model.save(tmp_path / "run")
        again = type(model).load(tmp_path / "run")
        X = {"fitted": rows(9)[0], "framed": frame(9)[0], "iris": load_iris().data[:9]}[name]
        assert np.array_equal(again.predict(X), model.predict(X))
        assert again.get_params() == model.get_params()
        assert again.history_ == model.history_
        assert again.n_features_in_ == model.n_features_in_
        assert hasattr(again, "feature_names_in_") == hasattr(model, "feature_names_in_")
        if name == "iris":
            assert np.array_equal(again.predict_proba(X), model.predict_proba(X))
            assert again.classes_.dtype == model.classes_.dtype
        with pytest.raises(NicestError, match="holds a run already"):
            model.save(tmp_path / "run")

    @pytest.mark.parametrize("y", [["no", "yes"], [False, True], [3, 7], [0.0, 1.0]], ids=str)
    def test_classes_come_back_as_they_were(self, tmp_path: Path, y: list):
        X = np.random.default_rng(0).normal(size=(60, 2))
        model = NICEClassifier(**CLASSIFIER, random_state=0).fit(X, np.array(y)[np.arange(60) % 2])
        model.save(tmp_path / "run")
        again = NICEClassifier.load(tmp_path / "run")
        assert again.classes_.dtype == model.classes_.dtype
        assert again.predict(X).tolist() == model.predict(X).tolist()

    def test_another_kind_is_refused(self, fitted: NICERegressor, tmp_path: Path):
        fitted.save(tmp_path / "run")
        with pytest.raises(NicestError, match="expected a NICEClassifier, got a NICERegressor"):
            NICEClassifier.load(tmp_path / "run")
        with pytest.raises(NicestError, match="is a model of 'y' given the other columns"):
            NICE.load(tmp_path / "run")
        NICE(law="additive", epochs=1, effort="low").fit(rows(60)[0]).save(tmp_path / "other")
        with pytest.raises(NicestError, match=r"what NICERegressor\.save wrote, found no predictor\.json"):
            NICERegressor.load(tmp_path / "other")

    @pytest.mark.parametrize("damage", ["", "{", "[]", '{"kind": "NICERegressor"}'])
    def test_a_damaged_file_is_refused_in_a_line(self, fitted: NICERegressor, tmp_path: Path, damage: str):
        fitted.save(tmp_path / "run")
        (tmp_path / "run" / "predictor.json").write_text(damage)
        with pytest.raises(NicestError) as refused:
            NICERegressor.load(tmp_path / "run")
        assert "\n" not in str(refused.value)

    def test_the_command_line_predicts_with_it(self, framed: NICERegressor, tmp_path: Path):
        X, _ = frame(20, 1)
        framed.save(tmp_path / "run")
        X.to_parquet(tmp_path / "new.parquet")
        predict(nicest.open(tmp_path / "run"), tmp_path / "new.parquet", out=tmp_path / "p.parquet")
        found = pd.read_parquet(tmp_path / "p.parquet")
        np.testing.assert_allclose(found["y_mean"], framed.predict(X), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(found[["y_low", "y_high"]], framed.predict_interval(X), rtol=1e-3, atol=1e-3)


class TestWeights:
    def test_rows_of_weight_zero_are_not_there(self):
        X, y = rows(120)
        weight = (np.arange(120) % 2).astype(float)
        y[weight == 0] += 100
        one = NICERegressor(**REGRESSOR, random_state=0).fit(X, y, sample_weight=weight).predict(X)
        other = NICERegressor(**REGRESSOR, random_state=0).fit(X[1::2], y[1::2]).predict(X)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=0.05)

    def test_weight_moves_the_prediction(self):
        X = np.zeros((100, 1))
        y = np.where(np.arange(100) % 2, 1.0, -1.0) + 0.1 * np.random.default_rng(0).normal(size=100)
        weight = np.where(y > 0, 9.0, 1.0)
        model = NICERegressor(**REGRESSOR, random_state=0).fit(X, y, sample_weight=weight)
        assert model.predict([[0.0]]) > NICERegressor(**REGRESSOR, random_state=0).fit(X, y).predict([[0.0]]) + 0.3

    def test_of_classes_are_in_their_prior(self):
        X, y = load_iris(return_X_y=True)
        model = NICEClassifier(**CLASSIFIER, random_state=0).fit(X, y, sample_weight=np.where(y == 2, 2.0, 1.0))
        np.testing.assert_allclose(np.exp(model.class_log_prior_), [0.25, 0.25, 0.5])


class TestBadInput:
    def test_of_y(self):
        X, y = rows(60)
        with pytest.raises(ValueError, match="expected y that varies, got 3 in all 60 rows"):
            NICERegressor(**REGRESSOR).fit(X, np.full(60, 3.0))
        for bad in (np.nan, np.inf):
            for table in (X, pd.DataFrame({"a": ["x", "y"] * 30})):
                with pytest.raises(ValueError, match=r"NaN|inf"):
                    NICERegressor(**REGRESSOR).fit(table, np.where(np.arange(60) == 7, bad, y))
        with pytest.raises(ValueError, match="at least 2 classes, got 1"):
            NICEClassifier(**CLASSIFIER).fit(X, np.zeros(60, dtype=int))
        with pytest.raises(ValueError, match=r"NaN"):
            NICEClassifier(**CLASSIFIER).fit(X, np.where(np.arange(60) == 7, np.nan, np.arange(60) % 2))
        table = pd.DataFrame({"a": ["x", "y"] * 30})
        with pytest.raises(ValueError, match=r"NaN"):
            NICEClassifier(**CLASSIFIER).fit(table, np.where(np.arange(60) == 7, np.nan, np.arange(60) % 2))
        with pytest.raises(ValueError, match="inconsistent numbers of samples"):
            NICERegressor(**REGRESSOR).fit(table, y[:50])

    def test_a_class_with_one_row_is_warned_of(self):
        X, y = load_iris(return_X_y=True)
        with pytest.warns(UserWarning, match="one row has the class 2: too few to learn from"):
            model = NICEClassifier(**CLASSIFIER, random_state=0).fit(X[:101], y[:101])
        assert np.isfinite(model.predict_log_proba(X)).all()

    def test_of_x(self):
        X, y = rows(60)
        with pytest.raises(ValueError, match="expected a number in every column of X, got only NaN in x1"):
            NICERegressor(**REGRESSOR).fit(np.column_stack([X[:, 0], np.full(60, np.nan)]), y)
        with pytest.raises(ValueError, match="column 'a' is missing in all rows; leave it out"):
            NICERegressor(**REGRESSOR).fit(pd.DataFrame({"a": [None] * 60, "b": ["x", "y"] * 30}), y)
        many = pd.DataFrame({"a": [f"{i} names" for i in range(120)]})
        with pytest.raises(ValueError, match="more than 100 different strings"):
            NICERegressor(**REGRESSOR).fit(many, rows(120)[1])
        with pytest.raises(ValueError, match="expected X without NaN"):
            NICEClassifier(**CLASSIFIER).fit(np.where(X > 2, np.nan, X), y > 10)

    @pytest.mark.parametrize("more", [{}, {"b": ["x", "y"] * 30}], ids=["numbers", "texts"])
    def test_a_column_called_as_the_target(self, more: dict):
        X, y = rows(60)
        with pytest.raises(ValueError, match="expected no column called 'y' in X"):
            NICERegressor(**REGRESSOR).fit(pd.DataFrame({"y": X[:, 0], **more}), y)

    @pytest.mark.parametrize(
        ("parameter", "said"),
        [
            ({"members": 0}, "members must be"),
            ({"effort": "huge"}, "effort"),
            ({"width": -1}, "width must be"),
            ({"dropout": 1.5}, "dropout must be"),
            ({"learning_rate": -1.0}, "learning_rate must be"),
            ({"validation_fraction": 2.0}, "validation_fraction is None or from 0 to 0.9, got 2.0"),
        ],
        ids=str,
    )
    def test_parameters_are_named_as_they_are_here(self, parameter: dict, said: str):
        with pytest.raises(ValueError, match=said) as refused:
            NICERegressor(**REGRESSOR | parameter).fit(*rows(60))
        assert "\n" not in str(refused.value)
