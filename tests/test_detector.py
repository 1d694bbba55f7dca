"""The conventions of PyOD, and estimators that skops writes and reads."""

import io
import pickle
import pickletools

import numpy as np
import pytest
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
    assert np.array_equal(scores, -detector.model_.score_samples(rows))
    assert detector.threshold_ == np.percentile(scores, 95)
    assert np.array_equal(detector.labels_, (scores > detector.threshold_).astype(int))
    assert detector.labels_.sum() == 10
    assert np.array_equal(detector.predict(rows), detector.labels_)
    assert roc_auc_score(truth, scores) > 0.95
    assert set(detector.predict(np.array([[0.0, 0, 0], [9.0, -9, 9]])).tolist()) == {0, 1}


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
