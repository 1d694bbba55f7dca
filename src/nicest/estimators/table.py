"""One estimator of a whole table, which answers any question; a regressor and a classifier on top of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from safetensors.numpy import load_file, save_file
from sklearn.base import BaseEstimator, ClassifierMixin, DensityMixin, RegressorMixin
from sklearn.utils import assert_all_finite, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from nicest.data.columns import Category, Column, Schema
from nicest.data.frames import as_table, is_frame
from nicest.data.infer import schema_of
from nicest.data.splits import in_memory
from nicest.errors import NicestError
from nicest.estimators.forest import FEWEST_ROWS, MOST_CLASSES, MOST_ROWS, Forest
from nicest.files import replacing, to_json
from nicest.recipes import Recipe
from nicest.recipes.defaults import IN_MEMORY
from nicest.recipes.recipe import DataSettings, TableSettings, TrainSettings
from nicest.runs.run import Run, write_run
from nicest.runs.runtime import choose_device
from nicest.tables.marginal import Marginal
from nicest.tables.sizes import FEW, sized
from nicest.tables.table import Table
from nicest.train.callbacks import ProgressBar
from nicest.train.fit import fit_splits

FILE, TREES = "estimator.json", "forest.safetensors"
TARGET, FOREST = "y", "forest"  # names of the columns of the target and of the forest's predictions
Seed = int | np.random.RandomState | None


class TableEstimator(BaseEstimator):
    """What the estimators of tables share: reading data, training, saving. Abstract."""

    effort: str
    discrete: Literal["values", "types"]
    bounds: Mapping[Any, tuple[float, float | None]] | None
    device: str
    random_state: Seed
    verbose: int

    def _read(self, X: Any, *, reset: bool = False) -> Any:
        """Return a data frame as an Arrow table, anything else as a checked array; `reset` in `fit`."""
        if not is_frame(X):
            checks: dict[str, Any] = {"dtype": "numeric", "ensure_all_finite": "allow-nan"}
            return validate_data(self, X, reset=reset, ensure_min_samples=1 + reset, **checks)
        if reset or hasattr(self, "feature_names_in_"):  # else the schema checks them
            validate_data(self, X, reset=reset, skip_check_array=True)
        return as_table(X)[1]

    def _schema(self, X: Any) -> Schema:
        """Infer the columns; warn about those that are left out."""
        bounds = {self._name(key): value for key, value in (self.bounds or {}).items()}
        return schema_of(X, discrete=self.discrete, bounds=bounds, source="X")

    def _name(self, column: Any) -> str:
        """Return the name of a column given by its name or number."""
        return f"x{column}" if isinstance(column, int | np.integer) else str(column)

    def _train(self, schema: Schema, rows: np.ndarray, targets: Sequence[str] = ()) -> None:
        """Train the table model on encoded rows."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        held_out = 0.0 if len(rows) < FEW else min(0.1, 10_000 / len(rows))
        splits = in_memory(rows, seed, held_out, schema=schema)
        data = DataSettings(name=IN_MEMORY, kind="table")
        table = TableSettings(targets=tuple(targets))
        recipe = Recipe("table", "a table", data=data, table=table, train=TrainSettings(seed=seed))
        recipe = sized(recipe, len(rows), schema, {"table": {}, "train": {"effort": self.effort}})
        device = choose_device(self.device)
        fitted = fit_splits(recipe, splits, device, [ProgressBar()] if self.verbose else [])
        self.recipe_, self.history_, self.schema_ = fitted.recipe, fitted.metrics, schema
        self.table_ = Table(schema, fitted.flow.float())

    def save(self, path: str | Path) -> None:
        """Write a run folder, as `nicest train` does; no pickle."""
        check_is_fitted(self)
        params = {name: value for name, value in self.get_params().items() if _is_plain(value)}
        kept = {"estimator": type(self).__name__, "params": params} | self._kept()
        best = {"epoch": len(self.history_)}
        files = {FILE: to_json(kept)}
        write_run(
            path, self.table_.model, self.recipe_, schema=self.schema_, figures=best, metrics=self.history_, files=files
        )

    @classmethod
    def load(cls, path: str | Path, device: str = "cpu") -> Self:
        """Open a run folder that `save` or `nicest train` wrote."""
        run = Run(path, device=device)
        file = run.path / FILE
        kept: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        if run.schema is None or kept.get("estimator", cls.__name__) != cls.__name__:
            what = kept.get("estimator", "NICETable") if run.schema else "a model of other data"
            raise NicestError(f"{path}: expected a {cls.__name__}, got {what}")
        model = cls(**kept.get("params", {}))
        model.table_, model.schema_, model.recipe_, model.history_ = run.table, run.schema, run.recipe, run.metrics
        model._restore(kept, run.path)
        return model

    def _kept(self) -> dict[str, Any]:
        return {"names": list(getattr(self, "feature_names_in_", [])), "n_features": self.n_features_in_}

    def _restore(self, kept: dict[str, Any], folder: Path) -> None:
        self._like: Any = None
        self.n_features_in_ = int(kept.get("n_features", len(self.schema_)))
        if names := kept.get("names", self.schema_.names):
            self.feature_names_in_ = np.asarray(names, dtype=object)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.non_deterministic = False
        return tags


class NICETable(DensityMixin, TableEstimator):
    """A density of whole tables, fitted once, which answers any question about them.

        model = NICETable(random_state=0).fit(frame)
        model.score_samples(frame)                    # log-density of every row
        model.surprise(frame)                         # log-probability of every cell given the rest of its row
        model.impute(frame_with_holes)                # missing cells filled in
        model.predict(frame, "price")                 # any column from the others
        model.predict_interval(frame, "price")        # intervals that hold 90 %
        model.probabilities(frame, "species")         # of every category
        model.sample(100, where="age >= 30")          # new rows that meet conditions

    One network gives the distribution of every cell given any other cells of its row. Texts, booleans, numbers, dates
    and missing cells may be mixed; data comes as a data frame (pandas, polars, Arrow) or as an array.

    Parameters
    ----------
    effort : {"low", "medium", "high"}
        How long a fit takes: seconds, up to a minute, or minutes.
    target : str, int or sequence of these, optional
        Columns that training favours, since they will be predicted.
    discrete : {"values", "types"}
        Whether to find discrete columns, and numbers with a probability of their own, by the values of every column or
        by its type.
    bounds : mapping, optional
        (low, high) of columns, by name or number; `high` may be None. No density lies beyond.
    device : str
        "cpu", "cuda" or "auto".
    random_state : int, RandomState or None
        Seed of the split, the weights and the masks.
    verbose : int
        1 for a progress bar.

    Attributes
    ----------
    schema_ : Schema
        The columns.
    table_ : Table
        The trained table.
    recipe_ : Recipe
        Every setting.
    history_ : list of dict
        Metrics of every validation.
    """

    def __init__(
        self,
        *,
        effort: str = "medium",
        target: Any = None,
        discrete: Literal["values", "types"] = "values",
        bounds: Mapping[Any, tuple[float, float | None]] | None = None,
        device: str = "auto",
        random_state: Seed = None,
        verbose: int = 0,
    ) -> None:
        self.effort, self.target, self.discrete, self.bounds = effort, target, discrete, bounds
        self.device, self.random_state, self.verbose = device, random_state, verbose

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit the density to the rows of X; y is ignored."""
        data = self._read(X, reset=True)
        self._like: Any = X[:0] if is_frame(X) else np.empty((0, data.shape[1]))  # for samples of the same kind
        schema = self._schema(data)
        given = () if self.target is None else self.target
        targets = [given] if isinstance(given, str | int) else list(given)
        names = [self._name(each) for each in targets]
        for name in names:
            schema.index(name)
        self._train(schema, schema.encode(data, "X"), names)
        return self

    def score_samples(self, X: Any) -> np.ndarray:
        """Return the log-density of every row, (N,), in nats: of its observed cells."""
        return self.table_.score(self._rows(X)).astype(np.float64)

    def score(self, X: Any, y: Any = None) -> float:
        """Return the mean log-density of the rows."""
        return float(self.score_samples(X).mean())

    def surprise(self, X: Any) -> np.ndarray:
        """Return log p(cell | the other cells of its row), (N, D) in the order of `schema_`; NaN of missing cells."""
        return self.table_.surprise(self._rows(X))

    def impute(self, X: Any, *, draws: int = 0, random_state: Seed = None) -> Any:
        """Return X with its missing cells filled in.

        Parameters
        ----------
        X : frame or array
        draws : int
            0 for one table with the best guess of each cell; otherwise a list of so many tables, each a joint draw.
        random_state : int, RandomState or None
        """
        rows = self._rows(X)
        if not draws:
            return self._filled(X, rows, self.table_.impute(rows))
        seed = _seed(random_state)
        return [self._filled(X, rows, self.table_.impute(rows, draw=True, seed=seed + k)) for k in range(draws)]

    def predict_distribution(self, X: Any, column: Any = None) -> Marginal:
        """Return the distribution of a column given the observed other cells of every row.

        Parameters
        ----------
        X : frame or array
            Rows; the cells of the column are not read and may be absent from a frame.
        column : str or int, optional
            By default the target, or the last column.
        """
        i = self._column(column)
        return self.table_.marginals(self._rows(X, without=i), [i])[0]

    def predict(self, X: Any, column: Any = None) -> np.ndarray:
        """Return the best guess of a column for every row: the mean of numbers, the likeliest category."""
        found = self.predict_distribution(X, column)
        return found.mean() if found.numeric else found.column.plain(found.best())

    def predict_interval(self, X: Any, column: Any = None, level: float = 0.9) -> np.ndarray:
        """Return the ends of central intervals of a column for every row, (N, 2)."""
        return self.predict_distribution(X, column).interval(level)

    def probabilities(self, X: Any, column: Any = None) -> np.ndarray:
        """Return the probability of each value of a column of few values, (N, C), in the order of the schema."""
        return self.predict_distribution(X, column).probabilities()

    def sample(self, n_samples: int = 1, where: str = "", random_state: Seed = None) -> Any:
        """Draw rows, as data of the kind that was fitted; see `Table.sample` for conditions and their probability."""
        check_is_fitted(self)
        drawn = self.table_.sample(n_samples, where, seed=_seed(random_state)).rows
        rows = self.schema_.decode(self.schema_.plausible(drawn))
        return rows if self._like is None else as_table(self._like)[2](rows)

    def calibration(self, X: Any, *, random_state: Seed = 0) -> dict[str, Any]:
        """Hide a fifth of the cells and compare their distributions with the truth; see `Table.calibration`."""
        return self.table_.calibration(self._rows(X), seed=_seed(random_state))

    def _rows(self, X: Any, without: int | None = None) -> np.ndarray:
        """Return encoded rows; cells of the column `without` are missing, and a frame may lack it."""
        check_is_fitted(self)
        if without is None:
            return self.schema_.encode(self._read(X), "X")
        name, schema = self.schema_[without].name, self.schema_
        if is_frame(X) and name not in X.columns and name not in getattr(X, "column_names", ()):
            schema = Schema(column for column in schema if column.name != name)
            return np.insert(schema.encode(as_table(X)[1], "X", unseen="missing"), without, np.nan, axis=1)
        rows = schema.encode(self._read(X), "X", unseen="missing")
        rows[:, without] = np.nan
        return rows

    def _column(self, column: Any) -> int:
        check_is_fitted(self)
        if column is None:
            column = self.target if isinstance(self.target, str | int) else self.schema_[-1].name
        return self.schema_.index(self._name(column))

    def _filled(self, X: Any, rows: np.ndarray, filled: np.ndarray) -> Any:
        """Return X with the cells that are missing in its encoded rows taken from `filled`."""
        _, table, back = as_table(X)
        return back(self.schema_.fill(table, rows, filled))


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
            self.forest_, found = Forest.fit(known, numbers, classes=classes, seed=_seed(self.random_state))
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


def _seed(random_state: Seed) -> int:
    return int(check_random_state(random_state).randint(2**31 - 1))


def _is_plain(value: Any) -> bool:
    """Return whether a parameter can be stored as JSON."""
    return value is None or isinstance(value, str | int | float | list)
