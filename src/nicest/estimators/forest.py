"""A random forest whose predictions the table model of a predictor reads as further columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import numpy as np
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

TREES, FEWER_TREES, MANY = 200, 100, 4_000  # fewer, with larger leaves, from MANY rows on
FEWEST_ROWS, MOST_ROWS, MOST_CLASSES = 40, 20_000, 20  # where a forest helps
AT_ONCE = 2_000  # rows that descend the trees together
FLOOR = 0.01  # added to probabilities before their log-odds


class Forest:
    """A forest as arrays of its nodes, which can be stored without pickle.

    Parameters
    ----------
    arrays : mapping of str to numpy.ndarray
        `roots` (T,), and of all nodes `left`, `right`, `feature` (-1: a leaf), `threshold`, `missing_left` and `value`,
        (nodes, C). Children are indices among all nodes.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = dict(arrays)

    @classmethod
    def fit(cls, rows: np.ndarray, y: np.ndarray, *, classes: int = 0, seed: int = 0) -> tuple[Self, np.ndarray]:
        """Fit to rows (N, D), NaN for missing cells, and numbers y, or classes 0 to `classes` - 1.

        Returns
        -------
        forest : Forest
        columns : numpy.ndarray of shape (N, C)
            What the trees that did not see a row predict for it, see `predict`.
        """
        kind = RandomForestClassifier if classes else RandomForestRegressor
        trees, leaf = (TREES, 1) if len(rows) < MANY else (FEWER_TREES, 5)
        features = "sqrt" if classes else 1 / 3
        model = kind(trees, min_samples_leaf=leaf, max_features=features, oob_score=True, random_state=seed).fit(
            rows, y
        )
        out_of_bag = model.oob_decision_function_ if classes else model.oob_prediction_[:, None]
        nodes = [tree.tree_.__getstate__()["nodes"] for tree in model.estimators_]
        sizes = np.array([len(each) for each in nodes])
        roots = np.cumsum(sizes) - sizes
        every, first = np.concatenate(nodes), np.repeat(roots, sizes)
        values = np.concatenate([tree.tree_.value[:, 0] for tree in model.estimators_])
        arrays = {
            "roots": roots,
            "left": (every["left_child"] + first).astype(np.int64),
            "right": (every["right_child"] + first).astype(np.int64),
            "feature": np.where(every["left_child"] < 0, -1, every["feature"]).astype(np.int64),
            "threshold": every["threshold"].astype(np.float64),
            "missing_left": every["missing_go_to_left"].astype(np.int64),
            "value": values / values.sum(1, keepdims=True) if classes else values,
        }
        return cls(arrays), log_odds(out_of_bag) if classes else out_of_bag

    @property
    def columns(self) -> int:
        """Number of columns that `predict` returns."""
        return max(1, self.arrays["value"].shape[1] - 1)

    def predict(self, rows: np.ndarray) -> np.ndarray:
        """Return the mean of the trees, (N, 1), or the log-odds of all classes but the last, (N, C - 1)."""
        parts = [self._predict(rows[start : start + AT_ONCE]) for start in range(0, len(rows), AT_ONCE)]
        found = np.concatenate(parts) if parts else np.empty((0, self.arrays["value"].shape[1]))
        return log_odds(found) if found.shape[1] > 1 else found

    def _predict(self, rows: np.ndarray) -> np.ndarray:
        a, places = self.arrays, np.arange(len(rows))[:, None]
        node = np.broadcast_to(a["roots"], (len(rows), len(a["roots"])))
        while (inner := a["feature"][node] >= 0).any():
            x = rows[places, a["feature"][node]]
            left = np.where(np.isnan(x), a["missing_left"][node] > 0, x <= a["threshold"][node])
            node = np.where(inner, np.where(left, a["left"][node], a["right"][node]), node)
        found: np.ndarray = a["value"][node].mean(1)
        return found


def log_odds(p: np.ndarray) -> np.ndarray:
    """Return log-odds, kept finite, of all classes but the last."""
    p = np.nan_to_num(p[:, :-1], nan=1 / p.shape[1])
    return np.log((p + FLOOR) / (1 - p + FLOOR))
