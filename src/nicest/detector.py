"""Outliers by the conventions of PyOD: high scores and the label 1 are of outliers."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import check_is_fitted

from nicest.estimator import NICE


class NICEDetector(BaseEstimator):
    """A `NICE` with the interface of PyOD's detectors; PyOD is not needed.

        detector = NICEDetector(contamination=0.05).fit(X)
        detector.labels_                      # of the training rows: 1 for outliers, 0 for inliers
        detector.predict(X_new)               # of other rows
        detector.decision_function(X_new)     # -log p(x), in nats: high for outliers

    Parameters
    ----------
    model
        The `NICE` that is fitted, as a copy; NICE() if None.
    contamination
        Fraction of training rows that are outliers, in (0, 0.5].

    Attributes
    ----------
    decision_scores_
        Scores of the training rows; NaN for rows with missing cells, whose label is 0.
    threshold_
        The score above which a row is an outlier.
    labels_
        Labels of the training rows.
    model_
        The fitted `NICE`.
    """

    def __init__(self, model: NICE | None = None, *, contamination: float = 0.1) -> None:
        self.model = model
        self.contamination = contamination

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Fit the density to the rows of X, and set the threshold by their scores; y is ignored."""
        if not 0 < self.contamination <= 0.5:
            raise ValueError(f"contamination is in (0, 0.5], got {self.contamination!r}")
        self.model_ = (NICE() if self.model is None else clone(self.model)).fit(X)
        self.n_features_in_ = self.model_.n_features_in_
        self.decision_scores_ = self.decision_function(X)
        if np.isnan(self.decision_scores_).all():
            raise ValueError("expected rows without NaN to set the threshold by, got none")
        self.threshold_ = float(np.nanquantile(self.decision_scores_, 1 - self.contamination))
        self.labels_ = (self.decision_scores_ > self.threshold_).astype(int)
        return self

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """-log p(x) of every row, in nats of the units of X."""
        check_is_fitted(self, "model_")
        return -self.model_.score_samples(X)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """1 for outliers, 0 for inliers and for rows with NaN, of which nothing is known."""
        check_is_fitted(self, "threshold_")
        return (self.decision_function(X) > self.threshold_).astype(int)
