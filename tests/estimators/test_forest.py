"""A forest as arrays against scikit-learn's."""

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

from nicest import NICERegressor
from nicest.estimators import forest as module
from nicest.estimators.forest import Forest


@pytest.fixture
def rows() -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 4)).astype(np.float32)
    return np.where(rng.random(x.shape) < 0.1, np.float32(np.nan), x)


@pytest.fixture(autouse=True)
def _few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TREES", 25)


def test_it_predicts_what_scikit_learn_does(rows: np.ndarray) -> None:
    y = np.nan_to_num(rows[:, 0]) + np.nan_to_num(rows[:, 1]) ** 2
    found, out_of_bag = Forest.fit(rows, y, seed=3)
    own = RandomForestRegressor(25, max_features=1 / 3, oob_score=True, random_state=3).fit(rows, y)
    np.testing.assert_allclose(found.predict(rows)[:, 0], own.predict(rows), atol=1e-12)
    np.testing.assert_allclose(out_of_bag[:, 0], own.oob_prediction_, atol=1e-12)
    assert found.columns == 1


def test_probabilities_become_log_odds(rows: np.ndarray) -> None:
    y = (np.nan_to_num(rows[:, 0]) > 0).astype(int) + (np.nan_to_num(rows[:, 1]) > 0)
    found, out_of_bag = Forest.fit(rows, y, classes=3, seed=3)
    own = RandomForestClassifier(25, max_features="sqrt", oob_score=True, random_state=3).fit(rows, y)
    p = own.predict_proba(rows)[:, :2]
    np.testing.assert_allclose(found.predict(rows), np.log((p + 0.01) / (1.01 - p)), atol=1e-9)
    assert found.columns == out_of_bag.shape[1] == 2


def test_a_stored_predictor_has_its_forest(rows: np.ndarray, tmp_path) -> None:
    y = np.nan_to_num(rows[:, 0]) * 1e6 + 3e9
    model = NICERegressor(effort="low", random_state=0).fit(rows, y)
    model.save(tmp_path / "run")
    np.testing.assert_array_equal(NICERegressor.load(tmp_path / "run").predict(rows[:9]), model.predict(rows[:9]))


def test_many_rows_and_constant_targets_have_none(rows: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NICERegressor(effort="low").fit(rows, np.ones(len(rows))).forest_ is None
    monkeypatch.setattr("nicest.estimators.predictors.MOST_ROWS", 100)
    assert NICERegressor(effort="low").fit(rows, np.nan_to_num(rows[:, 0])).forest_ is None
