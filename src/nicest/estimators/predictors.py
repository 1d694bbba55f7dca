"""A regressor and a classifier on a table model that favours their target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from safetensors.numpy import load_file, save_file
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import assert_all_finite, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from nicest.data.columns import Category, Column, Schema
from nicest.data.infer import schema_of
from nicest.estimators.forest import FEWEST_ROWS, MOST_CLASSES, MOST_ROWS, Forest
from nicest.estimators.table import Seed, TableEstimator, seed_of
from nicest.files import replacing
from nicest.tables.marginal import Marginal

TREES = "forest.safetensors"  # file of a stored forest
TARGET, FOREST = "y", "forest"  # names of the columns of the target and of the forest's predictions


class Predictor(TableEstimator):
    """A table model of X and y that favours the column of y. Abstract."""

    def __init__(
        self,
        *,
        effort: str = "medium",
        discrete: Literal["values", "types"] = "values",
        bounds: Mapping[Any, tuple[float, float | None]] | None = None,
        device: str = "auto",
        random_state: Seed = None,
        verbose: int = 0,
    ) -> None:
        self.effort, self.discrete, self.bounds, self.device = effort, discrete, bounds, device
        self.random_state, self.verbose = random_state, verbose

    def _fit(self, data: Any, y: np.ndarray, target: Column, classes: int = 0) -> Self:
        """Train on a read X, what a forest predicts for rows that it did not see, and the column `target` of y."""
        check_consistent_length(data, y)
        schema = self._schema(data)
        rows, more = schema.encode(data, "X"), Schema()
        numbers = y if classes else (y - y.mean()) / (y.std() or 1.0)
        self.forest_ = None
        if FEWEST_ROWS <= len(y) < MOST_ROWS and len(np.unique(y)) > 1 and classes <= MOST_CLASSES:
            known = np.where(np.isinf(rows), np.float32(np.nan), rows)
            self.forest_, found = Forest.fit(known, numbers, classes=classes, seed=seed_of(self.random_state))
            more = schema_of(found, discrete="types", source="the forest")
            rows = np.column_stack((rows, more.encode(found, "the forest")))
        columns = list(schema)
        for column, name in [*((each, FOREST) for each in more), (target, TARGET)]:
            while name in (each.name for each in columns):
                name += "_"
            columns.append(replace(column, name=name))
        codes = y if classes else target.encode(y)
        rows = np.column_stack((rows, codes)).astype(np.float32)
        self._train(Schema(columns), rows, [columns[-1].name])
        return self

    def _distribution(self, X: Any) -> Marginal:
        """Return p(y | the observed cells of X) of every row."""
        check_is_fitted(self)
        last, forest = len(self.schema_) - 1, self.forest_
        own = last - (forest.columns if forest else 0)
        rows = Schema(self.schema_[:own]).encode(self._read(X), "X", unseen="missing")
        if forest:
            found = Schema(self.schema_[own:last]).encode(forest.predict(rows), "the forest", unseen="missing")
            rows = np.column_stack((rows, found))
        return self.table_.marginals(np.insert(rows, last, np.nan, axis=1), [last])[0]

    def save(self, path: str | Path) -> None:
        """Write a run folder, with the forest as plain arrays; no pickle."""
        super().save(path)
        if self.forest_:
            with replacing(Path(path) / TREES) as temporary:
                save_file(self.forest_.arrays, temporary)

    def _restore(self, kept: dict[str, Any], folder: Path) -> None:
        super()._restore(kept, folder)
        file = folder / TREES
        self.forest_ = Forest(load_file(file)) if file.is_file() else None


class NICERegressor(RegressorMixin, Predictor):
    """Regression with a whole predictive distribution: p(y | the observed cells of x), from a table model.

        model = NICERegressor(random_state=0).fit(X, y)
        model.predict(X)                            # means
        model.predict_interval(X, level=0.9)        # central intervals
        model.predict_distribution(X).quantile(0.1)

    X may have missing cells, texts and dates. The parameters are those of `NICETable`.
    """

    def fit(self, X: Any, y: ArrayLike) -> Self:
        """Fit to rows X, (N, D), and numbers y, (N,)."""
        y, data = _targets(self, y, y_numeric=True), self._read(X, reset=True)
        (target,) = schema_of(y[:, None], discrete=self.discrete, source="y")
        return self._fit(data, y, target)

    def predict(self, X: Any) -> np.ndarray:
        """Return the means, (N,)."""
        return self._distribution(X).mean()

    def predict_interval(self, X: Any, level: float = 0.9) -> np.ndarray:
        """Return the ends of central intervals, (N, 2)."""
        return self._distribution(X).interval(level)

    def predict_distribution(self, X: Any) -> Marginal:
        """Return p(y | x) of every row."""
        return self._distribution(X)


class NICEClassifier(ClassifierMixin, Predictor):
    """Classification with calibrated probabilities: p(y | the observed cells of x), from a table model.

    X may have missing cells, texts and dates. The parameters are those of `NICETable`.
    """

    def fit(self, X: Any, y: ArrayLike) -> Self:
        """Fit to rows X, (N, D), and their classes y, (N,)."""
        y, data = _targets(self, y), self._read(X, reset=True)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        names = tuple(f"{i:06d}" for i in range(len(self.classes_)))
        return self._fit(data, codes, Category(TARGET, "string", names), len(names))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of every class, (N, C), in the order of `classes_`."""
        return self._distribution(X).probabilities()

    def predict(self, X: Any) -> np.ndarray:
        """Return the likeliest class of every row, (N,)."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def _kept(self) -> dict[str, Any]:
        return super()._kept() | {"classes": self.classes_.tolist()}

    def _restore(self, kept: dict[str, Any], folder: Path) -> None:
        super()._restore(kept, folder)
        self.classes_ = np.asarray(kept["classes"])


def _targets(model: BaseEstimator, y: Any, *, y_numeric: bool = False) -> np.ndarray:
    """Return checked targets, (N,)."""
    if y is None:
        raise ValueError(f"{type(model).__name__} requires y to be passed, but the target y is None")
    checked = column_or_1d(y, warn=True)
    if y_numeric or checked.dtype.kind == "f":
        assert_all_finite(checked, input_name="y")
    return checked.astype(np.float64) if y_numeric else checked
