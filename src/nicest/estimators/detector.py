"""Outliers by the conventions of PyOD: high scores and the label 1 are of outliers."""

from __future__ import annotations

import math
import warnings
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.mixture import GaussianMixture
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from threadpoolctl import threadpool_limits

from nicest.flows import Flow, Logistic, nice
from nicest.recipes.recipe import TrainSettings
from nicest.train.fit import fit

STEPS, BATCH = 400, 256  # of each flow
NOISE, COPIES = 0.1, 8  # standard deviation of the noise in training rows, and noisy copies of few rows
SIZES = (1, 2, 4, 8, 16, 32)  # components of the mixtures
FEWEST = 4  # rows for every component
MOST = 5_000  # rows that mixtures are fitted to
FARTHEST = 1e3  # standard deviations, beyond which a cell counts no more


class NICEDetector(BaseEstimator):
    """A detector of outliers: additive NICE flows and mixtures of Gaussians, with the interface of PyOD.

        detector = NICEDetector(contamination=0.05, random_state=0).fit(X)
        detector.labels_                      # of the training rows: 1 for outliers, 0 for inliers
        detector.predict(X_new)               # of other rows
        detector.decision_function(X_new)     # high for outliers

    The score of a row is minus a mean of log-densities of standardised columns: one half is that of the paper's flows
    with additive couplings, each in another order of the columns and trained on noisy rows; the other half is that of
    mixtures of 1 to 32 Gaussians. Additive couplings preserve volume, so that a flow cannot praise a row for lying
    where training rows share a value (arXiv 2510.09452, 2602.09593).

    Parameters
    ----------
    members : int
        Flows.
    contamination : float
        Fraction of the training rows that are outliers, in (0, 0.5].
    device : str
        "cpu", "cuda" or "auto".
    random_state : int, RandomState or None

    Attributes
    ----------
    decision_scores_ : array of shape (N,)
        Scores of the training rows; NaN for rows with missing cells, whose label is 0.
    threshold_ : float
        The score above which a row is an outlier.
    labels_ : array of shape (N,)
    """

    mean_: np.ndarray
    scale_: np.ndarray
    flows_: list[tuple[np.ndarray, Flow]]
    mixtures_: list[GaussianMixture]
    decision_scores_: np.ndarray
    threshold_: float
    labels_: np.ndarray

    def __init__(
        self,
        *,
        members: int = 4,
        contamination: float = 0.1,
        device: str = "auto",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.members, self.contamination, self.device, self.random_state = members, contamination, device, random_state

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Fit to the rows of X, (N, D), and set the threshold by their scores; y is ignored."""
        if not (isinstance(self.contamination, Real) and 0 < self.contamination <= 0.5):
            raise ValueError(f"contamination is in (0, 0.5], got {self.contamination!r}")
        if not (isinstance(self.members, int) and self.members > 0):
            raise ValueError(f"members is a positive integer, got {self.members!r}")
        rows = self._rows(X, reset=True)
        complete = rows[~np.isnan(rows).any(1)]
        if len(complete) < 2:
            raise ValueError(f"expected at least 2 rows without NaN, got {len(complete)}")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        rng = np.random.default_rng(seed)
        with np.errstate(over="ignore"):
            self.mean_, self.scale_ = complete.mean(0), complete.std(0)
        self.scale_ = np.where(np.isfinite(self.scale_) & (self.scale_ > 0), self.scale_, 1.0)
        x = self._standardised(complete)
        self.flows_ = []
        for k in range(self.members if x.shape[1] > 1 else 0):
            order = rng.permutation(x.shape[1])
            noisy = np.tile(x[:, order], (COPIES if len(x) < BATCH * COPIES else 1, 1))
            noisy = noisy + NOISE * rng.standard_normal(noisy.shape)
            self.flows_.append((order, self._trained(noisy.astype(np.float32), seed + k)))
        some = x[rng.choice(len(x), MOST, replace=False)] if len(x) > MOST else x
        self.mixtures_ = []
        with warnings.catch_warnings(), threadpool_limits(1):
            warnings.simplefilter("ignore")  # rows may be the same, and EM need not converge
            for size in SIZES:
                if size == 1 or size * FEWEST <= len(some):
                    mixture = GaussianMixture(size, reg_covar=NOISE**2, max_iter=50, random_state=seed)
                    self.mixtures_.append(mixture.fit(some))
        self.decision_scores_ = self.decision_function(X)
        self.threshold_ = float(np.nanquantile(self.decision_scores_, 1 - self.contamination))
        self.labels_ = (self.decision_scores_ > self.threshold_).astype(int)
        return self

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """Return the score of every row, (N,), high for outliers; NaN for rows with missing cells."""
        check_is_fitted(self, "mixtures_")
        rows = self._rows(X)
        missing = np.isnan(rows).any(1)
        x, scores = self._standardised(rows[~missing]), np.full(len(rows), np.nan)
        if len(x):
            parts = [np.mean([each.score_samples(x) for each in self.mixtures_], 0)]
            if self.flows_:
                parts.append(np.mean([_log_prob(flow, x[:, order]) for order, flow in self.flows_], 0))
            scores[~missing] = -np.mean(parts, 0)
        return scores

    def score_samples(self, X: ArrayLike) -> np.ndarray:
        """Return minus `decision_function`, (N,): low for outliers."""
        return -self.decision_function(X)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return 1 for outliers, 0 for inliers and for rows with missing cells, (N,)."""
        check_is_fitted(self, "mixtures_")
        return (self.decision_function(X) > self.threshold_).astype(int)

    def _trained(self, rows: np.ndarray, seed: int) -> Flow:
        """Train one additive flow on noisy rows."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            flow = nice(rows.shape[1], hidden=(64, 64), prior=Logistic(rows.shape[1]))
        batch = min(BATCH, len(rows))
        epochs = math.ceil(STEPS / (len(rows) // batch))
        settings = TrainSettings(
            epochs=epochs, batch=batch, lr=2e-3, schedule="cosine", loss="nats-per-dim", clip=5.0, seed=seed,
            precision="float32", evaluate_every=epochs,
        )  # fmt: skip
        fitted = fit(flow, rows, settings=settings, callbacks=(), device=self.device)
        found: Flow = fitted.flow.cpu()
        return found

    def _rows(self, X: ArrayLike, *, reset: bool = False) -> np.ndarray:
        """Return checked rows in float64."""
        options: dict[str, Any] = {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
        found: np.ndarray = validate_data(self, X, reset=reset, ensure_min_samples=1 + reset, **options)
        return found

    def _standardised(self, rows: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.clip((rows - self.mean_) / self.scale_, -FARTHEST, FARTHEST)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


@torch.no_grad()
def _log_prob(flow: Flow, rows: np.ndarray) -> np.ndarray:
    parts = torch.from_numpy(rows.astype(np.float32)).split(10_000)
    return torch.cat([flow.log_prob(part) for part in parts]).double().numpy()
