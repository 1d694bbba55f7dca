"""One estimator of a whole table, which answers any question; and what the predictors share with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from nicest.data.columns import Schema
from nicest.data.frames import as_table, is_frame
from nicest.data.infer import schema_of
from nicest.data.splits import in_memory
from nicest.errors import NicestError
from nicest.files import to_json
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

FILE = "estimator.json"
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
        seed = seed_of(random_state)
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
        drawn = self.table_.sample(n_samples, where, seed=seed_of(random_state)).rows
        rows = self.schema_.decode(self.schema_.plausible(drawn))
        return rows if self._like is None else as_table(self._like)[2](rows)

    def calibration(self, X: Any, *, random_state: Seed = 0) -> dict[str, Any]:
        """Hide a fifth of the cells and compare their distributions with the truth; see `Table.calibration`."""
        return self.table_.calibration(self._rows(X), seed=seed_of(random_state))

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


def seed_of(random_state: Seed) -> int:
    return int(check_random_state(random_state).randint(2**31 - 1))


def _is_plain(value: Any) -> bool:
    """Return whether a parameter can be stored as JSON."""
    return value is None or isinstance(value, str | int | float | list)
