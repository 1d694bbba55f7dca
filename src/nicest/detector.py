"""Outliers by the conventions of PyOD: high scores and the label 1 are of outliers."""

from __future__ import annotations

from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import check_is_fitted

from nicest.estimator import NICE
from nicest.flows import members
from nicest.inference.gaussians import Gaussians
from nicest.messages import shown


def latent_log_prob(flow: Any, y: torch.Tensor) -> torch.Tensor:
    """Return log p_H(f(y)), (B,), without the log-determinant; of a mixture the weighted mean over its members."""
    each = torch.stack([one.prior.log_prob(one.bijection(y)[0]) for one in members(flow)])
    return flow.weights.to(each) @ each if len(each) > 1 else each[0]


class NICEDetector(BaseEstimator):
    """A detector of outliers: `NICE` and mixtures of Gaussians, with the interface of PyOD, which is not needed.

        detector = NICEDetector(contamination=0.05).fit(X)
        detector.labels_                      # of the training rows: 1 for outliers, 0 for inliers
        detector.predict(X_new)               # of other rows
        detector.decision_function(X_new)     # high for outliers

    The score of a row x is minus a mean of log-densities: one third is log p_H(f(x)), that of its latent coordinates
    h = f(x) under the prior of the flow, two thirds are the mean of those of mixtures of 1, 2, 4, 8, 16 and 32
    Gaussians, fitted to the same rows. log p(x) has the log-determinant of f beside log p_H(f(x)), and is high wherever
    training rows share a value, whatever else is odd about a row: it is the better density and the worse detector.
    `model_.score_samples` gives it.

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
    gaussians_
        The mixtures.
    """

    model_: NICE
    gaussians_: Gaussians
    decision_scores_: np.ndarray
    threshold_: float
    labels_: np.ndarray

    def __init__(self, model: NICE | None = None, *, contamination: float = 0.1) -> None:
        self.model = model
        self.contamination = contamination

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Fit flow and mixtures to the rows of X, and set the threshold by their scores; y is ignored."""
        if not (isinstance(self.contamination, Real) and 0 < self.contamination <= 0.5):
            raise ValueError(f"contamination is in (0, 0.5], got {self.contamination!r}")
        if not (self.model is None or isinstance(self.model, NICE)):
            raise ValueError(f"model is a NICE or None, got {shown(self.model)}")
        self.model_ = (NICE() if self.model is None else clone(self.model)).fit(X)
        self.n_features_in_ = self.model_.n_features_in_
        codes = self.model_._codes(X)[0]
        complete = codes[~np.isnan(codes).any(1)]
        if not len(complete):
            raise ValueError("expected rows without NaN to set the threshold by, got none")
        self.gaussians_ = Gaussians.fit(self.model_._reals(complete).numpy(force=True), seed=0)
        self.decision_scores_ = self.decision_function(X)
        self.threshold_ = float(np.nanquantile(self.decision_scores_, 1 - self.contamination))
        self.labels_ = (self.decision_scores_ > self.threshold_).astype(int)
        return self

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """The score of every row, high for outliers: inf for values that training never saw, NaN for rows with NaN."""
        check_is_fitted(self, "gaussians_")
        codes, unknown, _ = self.model_._codes(X)
        missing = np.isnan(codes).any(1)
        scores, known = np.where(missing, np.nan, np.inf), ~missing & ~unknown
        if known.any():
            y = self.model_._reals(codes[known])
            found = -(self.model_._run(latent_log_prob, y) + 2 * self.gaussians_.log_prob(y.numpy(force=True))) / 3
            scores[known] = np.where(np.isnan(found), np.inf, found)
        return scores

    def predict(self, X: ArrayLike) -> np.ndarray:
        """1 for outliers, 0 for inliers and for rows with NaN, of which nothing is known."""
        check_is_fitted(self, "threshold_")
        return (self.decision_function(X) > self.threshold_).astype(int)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {name: each._asdict() for name, each in state.items() if isinstance(each, Gaussians)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = {name: Gaussians(**each) for name, each in state.items() if name == "gaussians_"}
        super().__setstate__(state | kept)
