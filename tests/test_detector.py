"""The conventions of PyOD, and estimators that skops writes and reads."""

import io
import pickle
import pickletools

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import roc_auc_score

from nicest import NICE, NICEClassifier, NICEDetector

SMALL = {"effort": "low", "epochs": 3, "couplings": 4, "width": 8, "random_state": 0}


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    """190 rows of a correlated Gaussian, then 10 far from it."""
    rng = np.random.default_rng(0)
    inside = rng.normal(size=(190, 3)) @ np.array([[1, 0.9, 0], [0, 0.5, 0], [0, 0, 1]])
    return np.concatenate((inside, rng.normal(size=(10, 3)) * 0.3 + [3, -3, 4]))


@pytest.fixture(scope="module")
def detector(rows: np.ndarray) -> NICEDetector:
    return NICEDetector(NICE(**SMALL), contamination=0.05).fit(rows)


def test_scores_labels_and_threshold_are_as_pyod_has_them(detector: NICEDetector, rows: np.ndarray):
    scores, truth = detector.decision_scores_, np.arange(200) >= 190
    assert np.array_equal(scores, detector.decision_function(rows))
    assert detector.threshold_ == np.percentile(scores, 95)
    assert np.array_equal(detector.labels_, (scores > detector.threshold_).astype(int))
    assert detector.labels_.sum() == 10
    assert np.array_equal(detector.predict(rows), detector.labels_)
    assert roc_auc_score(truth, scores) > 0.95
    assert set(detector.predict(np.array([[0.0, 0, 0], [9.0, -9, 9]])).tolist()) == {0, 1}


def test_the_score_is_that_of_the_code_and_of_gaussians(detector: NICEDetector, rows: np.ndarray):
    model = detector.model_
    codes = model.flow_.prior.log_prob(torch.from_numpy(model.transform(rows))).numpy(force=True)
    origin = torch.tensor([each.origin for each in model.columns_])
    y = model.flow_.units.enter(torch.from_numpy(rows) - origin, noise=False)
    expected = -(codes + 2 * detector.gaussians_.log_prob(y.numpy())) / 3
    np.testing.assert_allclose(detector.decision_function(rows), expected)
    assert np.array_equal(pickle.loads(pickle.dumps(detector)).decision_function(rows), detector.decision_scores_)


def test_a_value_that_many_rows_share_hides_no_outlier():
    """A density is as high as you like at such a value, which makes rows without it look odd."""
    rng = np.random.default_rng(0)
    x, odd = rng.normal(size=(600, 3)), rng.normal(size=(100, 3)) * 0.3 + [0, 2, -2]
    x[:400, 0] = odd[:, 0] = 0
    found = NICEDetector(NICE(effort="low", law="spline", width=16, epochs=60, random_state=0)).fit(x[::2])
    test, truth = np.concatenate([x[1::2], odd]), np.arange(400) >= 300
    assert roc_auc_score(truth, found.decision_function(test)) > 0.85
    assert roc_auc_score(truth, -found.model_.score_samples(test)) < 0.75


def test_a_value_that_training_never_saw_is_an_outlier():
    table = pa.table({"a": ["x", "y"] * 40, "b": np.linspace(0, 1, 80)})
    found = NICEDetector(NICE(**SMALL)).fit(table)
    assert np.isposinf(found.decision_function(pa.table({"a": ["z", "x"], "b": [0.5, 0.5]}))).tolist() == [True, False]


def test_a_row_with_a_missing_cell_has_no_score_and_is_no_outlier(rows: np.ndarray):
    holes = rows.copy()
    holes[::20, 1] = np.nan
    found = NICEDetector(NICE(**SMALL), contamination=0.1).fit(holes)
    assert np.isnan(found.decision_scores_[::20]).all()
    assert (found.labels_[::20] == 0).all()
    assert found.labels_.sum() == pytest.approx(19, abs=1)


def test_it_is_an_estimator_that_refuses_what_cannot_be(rows: np.ndarray):
    copied = clone(NICEDetector(NICE(width=8), contamination=0.2))
    assert (copied.contamination, copied.model.width) == (0.2, 8)
    assert copied.set_params(model__width=16).model.width == 16
    with pytest.raises(ValueError, match=r"contamination is in \(0, 0.5\], got 0.7"):
        NICEDetector(contamination=0.7).fit(rows)
    with pytest.raises(ValueError, match="contamination is in"):
        NICEDetector(contamination="auto").fit(rows)
    with pytest.raises(ValueError, match="model is a NICE or None, got 'additive'"):
        NICEDetector("additive").fit(rows)
    with pytest.raises(NotFittedError):
        NICEDetector().predict(rows)


def test_a_state_holds_plain_values_alone(detector: NICEDetector):
    """So neither pickle nor skops has to trust torch or parts of nicest."""
    state = detector.model_.__getstate__()
    assert isinstance(state["flow_"], bytes)
    named = {arg for op, arg, _ in pickletools.genops(pickle.dumps(state)) if op.name == "SHORT_BINUNICODE"}
    assert not [name for name in named if name.startswith(("torch", "nicest."))]


@pytest.mark.parametrize("kind", ["density", "detector", "classifier"])
def test_skops_writes_and_reads_it(kind: str, detector: NICEDetector, rows: np.ndarray):
    skops = pytest.importorskip("skops.io")
    labels = np.where(rows[:, 0] > 0, "yes", "no")
    model = {
        "density": detector.model_,
        "detector": detector,
        "classifier": NICEClassifier(effort="low", epochs=2, width=8, members=2, random_state=0).fit(rows, labels)
        if kind == "classifier"
        else None,
    }[kind]
    file = io.BytesIO()
    skops.dump(model, file)
    asked = skops.get_untrusted_types(data=file.getvalue())
    assert asked
    assert all(each.startswith("nicest.") and each.rpartition(".")[2].startswith("NICE") for each in asked), asked
    again = skops.loads(file.getvalue(), trusted=asked)
    assert np.array_equal(again.predict(rows), model.predict(rows))
    if kind != "classifier":
        assert np.array_equal(again.decision_function(rows), model.decision_function(rows))
    else:
        assert np.array_equal(again.predict_proba(rows), model.predict_proba(rows))
