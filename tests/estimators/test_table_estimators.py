"""NICETable, NICERegressor and NICEClassifier as scikit-learn and people use them; trainings of a few steps."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from scipy import stats
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import parametrize_with_checks

from nicest.estimators.predictors import NICEClassifier, NICERegressor
from nicest.estimators.table import NICETable, TableEstimator
from nicest.tables import sizes

ESTIMATORS = [NICETable(effort="low"), NICERegressor(effort="low"), NICEClassifier(effort="low")]


@pytest.fixture(autouse=True, scope="module")
def _few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sizes.STEPS, "low", 0.01)
        yield


@pytest.mark.filterwarnings("ignore:.*array_api:sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(ESTIMATORS)
def test_they_are_estimators(estimator: TableEstimator, check: Callable, monkeypatch: pytest.MonkeyPatch):
    if "invariance" in str(check):  # the network is in float32, whose last digits depend on the size of a batch
        for name in ("assert_allclose", "assert_allclose_dense_sparse"):
            looser = partial(loosely, getattr(estimator_checks, name))
            monkeypatch.setattr(estimator_checks, name, looser)
    check(estimator)


def loosely(function: Callable, *args: Any, **options: Any) -> None:
    function(*args, **options | {"rtol": 1e-4, "atol": 1e-5})


def frame(n: int = 200, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    height = rng.normal(170, 10, n).round(1)
    data = pd.DataFrame(
        {
            "height": height,
            "age": rng.integers(18, 80, n),
            "sex": rng.choice(["F", "M"], n),
            "member": rng.random(n) < 0.5,
            "since": pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 1_000, n), "D"),
            "weight": (height - 100 + rng.normal(0, 3, n)).round(1),
        },
        index=np.arange(n) + 7,
    )
    data.loc[data.index[::9], "weight"] = np.nan
    data.loc[data.index[::11], "sex"] = None
    return data


@pytest.fixture(scope="module")
def fitted() -> NICETable:
    return NICETable(effort="low", random_state=0).fit(frame())


class TestTables:
    def test_a_frame_in_and_out(self, fitted: NICETable):
        data = frame(30, seed=1)
        assert fitted.score_samples(data).shape == (30,)
        assert fitted.score(data) == pytest.approx(fitted.score_samples(data).mean())
        surprise = fitted.surprise(data)
        np.testing.assert_array_equal(np.isnan(surprise), data.isna())
        filled = fitted.impute(data)
        assert list(filled.columns) == list(data.columns)
        assert (filled.dtypes == data.dtypes).all()
        assert not filled.isna().any(axis=None)
        pd.testing.assert_frame_equal(filled.where(data.notna()), data, check_dtype=False)
        first, second = fitted.impute(data, draws=2, random_state=0)
        assert (first["weight"] != second["weight"]).any()
        pd.testing.assert_frame_equal(first, fitted.impute(data, draws=1, random_state=0)[0])
        drawn = fitted.sample(40, random_state=1)
        assert (drawn.dtypes == data.dtypes).all()
        assert set(drawn["sex"]) <= {"F", "M"}
        assert np.isfinite(fitted.score_samples(drawn)).all()
        women = fitted.sample(40, where='sex = "F" and age >= 50', random_state=1)
        assert set(women["sex"]) == {"F"}
        assert women["age"].min() >= 50

    def test_predictions_of_any_column(self, fitted: NICETable):
        data = frame(30, seed=1)
        weight = fitted.predict(data.drop(columns="weight"), "weight")
        np.testing.assert_allclose(weight, fitted.predict(data, "weight"))  # the column itself is not read
        np.testing.assert_allclose(weight, fitted.predict_distribution(data).mean())  # by default the last
        assert np.corrcoef(weight, data["height"])[0, 1] > 0.9
        low, high = fitted.predict_interval(data, "weight", 0.9).T
        known = data["weight"].notna()
        assert ((low <= data["weight"]) & (data["weight"] <= high))[known].mean() > 0.7
        p = fitted.probabilities(data, "sex")
        np.testing.assert_allclose(p.sum(1), 1)
        np.testing.assert_array_equal(fitted.predict(data, "sex"), np.array(["F", "M"])[p.argmax(1)])
        assert set(fitted.predict(data, "member")) <= {True, False}

    def test_arrow(self, fitted: NICETable):
        data = pa.Table.from_pandas(frame(), preserve_index=False)
        model = NICETable(effort="low", random_state=0).fit(data)
        np.testing.assert_allclose(model.score_samples(data), fitted.score_samples(frame()), rtol=1e-5)
        assert isinstance(model.sample(5), pa.Table)
        filled = model.impute(data)
        assert filled.schema.equals(data.schema)
        assert all(column.null_count == 0 for column in filled.columns)

    @pytest.mark.skipif(find_spec("polars") is None, reason="polars is not installed")
    def test_polars(self):
        import polars as pl

        data = pl.from_pandas(frame())
        model = NICETable(effort="low", random_state=0).fit(data)
        assert isinstance(model.sample(5), pl.DataFrame)
        assert model.impute(data).null_count().sum_horizontal().item() == 0

    def test_an_array_with_missing_cells(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(150, 3))
        x[:, 1] = x[:, 0] + 0.1 * x[:, 1]
        holed = np.where(rng.random(x.shape) < 0.2, np.nan, x)
        model = NICETable(effort="low", random_state=0).fit(holed)
        filled = model.impute(holed)
        known = ~np.isnan(holed)
        np.testing.assert_array_equal(filled[known], x[known])
        hidden = ~known[:, 1] & known[:, 0]
        assert np.abs(filled - x)[hidden, 1].mean() < 0.3
        assert model.sample(4).shape == (4, 3)
        assert model.predict(holed, 1).shape == (150,)
        assert model.score_samples(np.full((2, 3), np.nan)) == pytest.approx([0, 0])

    def test_saved_and_loaded(self, fitted: NICETable, tmp_path: Path, refusal: Callable[..., str]):
        fitted.save(tmp_path / "run")
        loaded = NICETable.load(tmp_path / "run")
        data = frame(30, seed=1)
        np.testing.assert_array_equal(loaded.score_samples(data), fitted.score_samples(data))
        np.testing.assert_array_equal(loaded.predict(data, "age"), fitted.predict(data, "age"))
        drawn = pa.Table.from_pandas(fitted.sample(3, random_state=0), preserve_index=False)
        assert loaded.sample(3, random_state=0).to_pydict() == drawn.to_pydict()
        assert loaded.get_params() == fitted.get_params()
        assert "expected a NICERegressor, got NICETable" in refusal(NICERegressor.load, tmp_path / "run")

    def test_target(self, refusal: Callable[..., str]):
        data = frame()
        model = NICETable(effort="low", target="age", random_state=0).fit(data)
        assert model.table_.model.targets == (1,)
        np.testing.assert_allclose(model.predict(data), model.predict(data, "age"))
        model = NICETable(effort="low", target=["age", "sex"], random_state=0).fit(data)
        assert model.table_.model.targets == (1, 2)
        assert "did you mean" in refusal(model.set_params(target="wieght").fit, data)

    def test_values_never_seen(self, fitted: NICETable):
        data = frame(4, seed=1)
        data.loc[data.index[1], "sex"] = "X"
        data["age"] = data["age"] + np.array([0, 0, 0.5, 0])
        nats = fitted.score_samples(data)
        assert np.isneginf(nats[1:3]).all()
        assert np.isfinite(nats[[0, 3]]).all()
        assert np.isfinite(fitted.predict(data, "weight")).all()
        assert np.isfinite(fitted.surprise(data)[1, 0])
        one = np.concatenate([fitted.score_samples(data.iloc[[i]]) for i in range(4)])
        np.testing.assert_allclose(one, nats, rtol=1e-4)

    @pytest.mark.parametrize("change", ["absent", "type"])
    def test_wrong_columns(self, fitted: NICETable, change: str, refusal: Callable[..., str]):
        data = frame(4)
        data = data.drop(columns="age") if change == "absent" else data.assign(age=["a", "b", "c", "d"])
        if change == "type":
            assert "expected numbers in column 'age'" in refusal(fitted.score_samples, data)
        else:
            with pytest.raises(ValueError, match="missing:\n- age"):  # scikit-learn's message
                fitted.score_samples(data)

    def test_constant_columns(self):
        data = frame().assign(country="US", year=2024, zero=0.0)
        model = NICETable(effort="low", random_state=0).fit(data)
        assert np.isfinite(model.score_samples(data)).all()
        np.testing.assert_allclose(model.surprise(data)[:, -3:], 0, atol=1e-5)
        drawn = model.sample(5, random_state=0)
        assert set(drawn["country"]) == {"US"}
        assert set(drawn["year"]) == {2024}
        other = data.head(2).assign(year=[2024, 2025])
        assert np.isneginf(model.score_samples(other)).tolist() == [False, True]

    def test_all_columns_constant(self):
        model = NICETable(effort="low", random_state=0).fit(np.ones((30, 2)))
        assert model.score_samples(np.ones((3, 2))) == pytest.approx([0, 0, 0], abs=1e-5)
        np.testing.assert_array_equal(model.sample(2), np.ones((2, 2)))

    @pytest.mark.parametrize("n", [0, 1])
    def test_too_few_rows(self, n: int, refusal: Callable[..., str]):
        assert "expected rows, at least 3" in refusal(NICETable(effort="low").fit, frame(3).head(n))

    def test_the_same_seed_gives_the_same_model(self, fitted: NICETable):
        again, other = (clone(fitted).set_params(random_state=seed).fit(frame()) for seed in (0, 1))
        data = frame(30, seed=1)
        np.testing.assert_array_equal(again.score_samples(data), fitted.score_samples(data))
        assert (other.score_samples(data) != fitted.score_samples(data)).any()
        pd.testing.assert_frame_equal(again.sample(9, random_state=3), fitted.sample(9, random_state=3))

    def test_the_state_of_the_process_is_left_alone(self):
        torch.manual_seed(3), np.random.seed(3)  # noqa: NPY002
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), torch.get_num_threads()  # noqa: NPY002
        deterministic, grad = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
        model = NICETable(effort="low", random_state=0).fit(frame())
        model.sample(3, random_state=1)
        model.impute(frame(9), draws=1, random_state=1)
        model.calibration(frame(9))
        assert torch.equal(torch.get_rng_state(), before[0])
        np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
        assert torch.get_num_threads() == before[2]
        assert (torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()) == (deterministic, grad)

    def test_bounds(self, refusal: Callable[..., str]):
        data = frame()[["height", "weight"]]
        model = NICETable(effort="low", random_state=0, bounds={"height": (100, 250)}).fit(data)
        assert np.isneginf(model.score_samples(data.head(1).assign(height=99.0)))
        assert model.sample(300, random_state=0)["height"].between(100, 250).all()
        assert "beyond its bounds" in refusal(NICETable(effort="low", bounds={"height": (0, 150)}).fit, data)

    def test_an_outlier_far_beyond_all_others(self):
        x = np.random.default_rng(0).normal(size=(200, 2))
        x[3, 0] = 1e15
        model = NICETable(effort="low", random_state=0).fit(x)
        nats = model.score_samples(x)
        assert np.isfinite(np.delete(nats, 3)).all()
        assert nats.argmin() == 3

    def test_calibration(self, fitted: NICETable):
        found = fitted.calibration(frame(100, seed=2))
        assert set(found["coverage"]) == {0.5, 0.8, 0.9, 0.95}
        assert ((found["pit"] >= 0) & (found["pit"] <= 1)).all()


class TestPredictors:
    def test_regression_of_a_known_law(self):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(600, 2))
        y = 1e3 + 50 * x[:, 0] + rng.normal(0, 10, 600)
        model = NICERegressor(effort="low", random_state=0).fit(x[:400], y[:400])
        assert model.score(x[400:], y[400:]) > 0.93
        low, high = model.predict_interval(x[400:], level=0.8).T
        assert np.mean((low <= y[400:]) & (y[400:] <= high)) == pytest.approx(0.8, abs=0.1)
        found = model.predict_distribution(x[400:])
        np.testing.assert_allclose(model.predict(x[400:]), found.mean())
        truth = stats.norm(1e3 + 50 * x[400:, 0], 10).logpdf(y[400:]).mean()
        assert found.log_prob(y[400:]).mean() == pytest.approx(truth, abs=0.15)
        assert cross_val_score(model, x[:200], y[:200], cv=2).min() > 0.8

    def test_mixed_columns_and_missing_cells(self, tmp_path: Path):
        data = frame().drop(columns="weight")
        y = data["height"] * 2 + data["age"]
        data.loc[data.index[5], "height"] = np.nan
        model = NICERegressor(effort="low", random_state=0).fit(data, y)
        assert np.corrcoef(model.predict(data)[np.arange(200) != 5], np.delete(y.to_numpy(), 5))[0, 1] > 0.8
        data.loc[data.index[6], "sex"] = "X"  # a value that training had not is as good as a missing one
        assert np.isfinite(model.predict(data)).all()
        model.save(tmp_path / "run")
        np.testing.assert_array_equal(NICERegressor.load(tmp_path / "run").predict(data), model.predict(data))

    @pytest.mark.parametrize("labels", [("no", "yes"), (3, -1, 12), (False, True)])
    def test_classes(self, labels: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sizes.STEPS, "low", 0.15)
        rng = np.random.default_rng(0)
        codes = rng.integers(0, len(labels), 200)
        x = rng.normal(size=(200, 2)) + 3 * codes[:, None] * [1, -1]
        y = np.array(labels)[codes]
        model = NICEClassifier(effort="low", random_state=0).fit(x, y)
        assert model.classes_.tolist() == sorted(labels)
        p = model.predict_proba(x)
        np.testing.assert_allclose(p.sum(1), 1)
        assert model.score(x, y) > 0.9
        np.testing.assert_array_equal(model.predict(x), model.classes_[p.argmax(1)])
        truth = np.stack([stats.multivariate_normal([3 * c, -3 * c]).pdf(x) for c in range(len(labels))], 1)
        truth /= truth.sum(1, keepdims=True)
        order = [model.classes_.tolist().index(each) for each in labels]
        assert np.abs(p[:, order] - truth).mean() < 0.05
        model.save(tmp_path / "run")
        loaded = NICEClassifier.load(tmp_path / "run")
        np.testing.assert_array_equal(loaded.predict_proba(x), p)
        np.testing.assert_array_equal(loaded.predict(x), model.predict(x))

    def test_a_feature_called_y(self):
        data = pd.DataFrame({"y": np.arange(60.0) % 7, "x": np.random.default_rng(0).normal(size=60)})
        model = NICERegressor(effort="low", random_state=0).fit(data, data["x"] * 2)
        assert model.schema_.names == ["y", "x", "forest", "y_"]
        assert model.predict(data).shape == (60,)
