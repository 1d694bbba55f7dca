"""Conditional densities as scikit-learn estimators: a regressor that gives distributions, a classifier by Bayes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.special import log_softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    _check_y,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)

from nicest.data import scan
from nicest.data.arrays import jitter_constant_columns
from nicest.data.cells import codes_of, encode
from nicest.data.columns import Column, as_given, columns_from_json
from nicest.errors import NicestError
from nicest.estimator import (
    SOURCE,
    TRAIN,
    Frame,
    check_validation_fraction,
    columns_of,
    encoded,
    extremes,
    in_words_of_parameters,
    live_state,
    log_mean_density,
    plain_state,
    python_number,
    repetitions,
    rescaled,
    write_run,
)
from nicest.flows import Flow
from nicest.inference.engine import Engine
from nicest.inference.predictive import Predictive, crps, interval
from nicest.messages import brief, listed, shown
from nicest.recipes import Recipe
from nicest.runs.folder import RunFolder, newer
from nicest.runs.run import Run
from nicest.tasks.predict import given_codes, own_unit
from nicest.train.fit_table import fit_table

MODEL = {name: name for name in ("members", "trees", "couplings", "hidden_layers", "width", "bins", "dropout")}
FILE = "predictor.json"
TARGET = "y"
FINE = 512  # points of a distribution for its standard deviation: 64 miss a fiftieth of it, in the tails


class Predictor(BaseEstimator):
    """What regressor and classifier share: their parameters, and X as numbers."""

    flow_: Flow
    recipe_: Recipe
    columns_: tuple[Column, ...]
    n_features_in_: int

    def __init__(
        self,
        *,
        effort: str = "medium",
        members: int | None = None,
        trees: int | None = None,
        couplings: int | None = None,
        hidden_layers: int | None = None,
        width: int | None = None,
        bins: int | None = None,
        dropout: float | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        patience: int | None = None,
        validation_fraction: float | None = None,
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
    ) -> None:
        self.effort = effort
        self.members = members
        self.trees = trees
        self.couplings = couplings
        self.hidden_layers = hidden_layers
        self.width = width
        self.bins = bins
        self.dropout = dropout
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def _fit(
        self, codes: np.ndarray, columns: Sequence[Column], targets: Sequence[int], weight: ArrayLike | None, seed: int
    ) -> None:
        """Fit a flow of some columns given the others to rows of the model's numbers."""
        check_validation_fraction(self.validation_fraction)
        copies = None
        if weight is not None:
            found = _check_sample_weight(weight, codes, dtype=np.float64, ensure_non_negative=True)
            copies = repetitions(found, seed)
            codes, copies = codes[copies > 0], copies[copies > 0]
        if len(codes) < 2:
            raise ValueError(f"expected 2 rows or more, got n_samples = {len(codes)}")
        unit = extremes(codes)
        settings = {
            table: {
                name: python_number(getattr(self, ours))
                for ours, name in among.items()
                if getattr(self, ours) is not None
            }
            for table, among in (("model", MODEL), ("train", TRAIN))
        }
        with in_words_of_parameters():
            fitted = fit_table(
                codes / unit,
                seed=seed,
                given=settings,
                valid=self.validation_fraction,
                device=self.device,
                quiet=not self.verbose,
                columns=columns,
                copies=copies,
                targets=targets,
            )
        self.flow_, self.recipe_, self.columns_ = (
            rescaled(fitted.flow, unit, fitted.recipe.data),
            fitted.recipe,
            tuple(columns),
        )
        off = float(np.log(unit[list(targets)]).sum())
        self.history_ = [
            row | {name: row[name] - off for name in ("train_nats", "valid_nats")} for row in fitted.metrics
        ]
        self.n_epochs_ = int(fitted.figures["epoch"])

    def _read(self, X: Any, y: Any = None, **options: Any) -> tuple[Any, Any]:
        """X and y of a fit, checked: X as an array, or as a `Frame` if it has columns that are not numbers."""
        frame = Frame.of(X)
        self._frame = frame.kind if frame else ""
        if frame is None:
            both = {"dtype": np.float64, "ensure_min_samples": 2, "ensure_all_finite": "allow-nan"}
            return validate_data(self, X, y, **both, **options)
        self.feature_names_in_ = np.asarray(frame.table.column_names, dtype=object)
        self.n_features_in_ = frame.table.num_columns
        if y is None:
            raise ValueError("expected y beside X, got None")
        check_consistent_length(X, y)
        return frame, _check_y(y, y_numeric=options.get("y_numeric", False), estimator=self)

    def _given_columns(self, X: Any) -> tuple[tuple[Column, ...], np.ndarray]:
        """What the columns of X hold, as columns that are given, and their numbers."""
        if isinstance(X, Frame):
            with in_words_of_parameters():
                table, names = X.table, X.table.column_names
                found = scan.columns_of(table.schema, table.to_batches(), SOURCE, given=names)
                columns = tuple(as_given(column) for column in found)
                return columns, given_codes(table, columns, SOURCE)[0]
        if (empty := np.flatnonzero(np.isnan(X).all(0))).size:
            raise ValueError(
                f"expected a number in every column of X, got only NaN in {self._names(X.shape[1])[empty[0]]}"
            )
        columns = columns_of(X, self._names(X.shape[1]), [False] * X.shape[1], by_values=False)
        return columns, encoded(X, columns)[0]

    def _given(self, X: Any) -> np.ndarray:
        """The numbers of the columns of X, of rows to predict."""
        check_is_fitted(self)
        columns = self._x_columns()
        if not self._frame:
            rows = validate_data(self, X, dtype=np.float64, reset=False, ensure_all_finite="allow-nan")
            return encoded(rows, columns)[0]
        table = self._table(X)
        with in_words_of_parameters():
            return given_codes(table, columns, SOURCE)[0]

    def _table(self, X: Any) -> Any:
        frame = Frame.of(X, always=True)
        if frame is None:
            raise ValueError(f"expected a data frame with the columns of training, got {type(X).__name__}")
        missing = [name for name in self.feature_names_in_ if name not in frame.table.column_names]
        if missing:
            raise ValueError(f"expected the columns of training, got none called {listed(missing)}")
        return frame.table

    def _x_columns(self) -> tuple[Column, ...]:
        raise NotImplementedError

    def _names(self, dim: int) -> list[str]:
        return list(getattr(self, "feature_names_in_", [f"x{i}" for i in range(dim)]))

    def save(self, path: str | Path) -> None:
        """Write a run folder, as `nicest train` does, without pickle; `nicest predict` takes that of a regressor."""
        check_is_fitted(self)
        run = RunFolder(path)
        if run.model.exists():
            raise NicestError(f"{path} holds a run already: choose another folder")
        params = {name: python_number(value) for name, value in self.get_params().items()}
        if not isinstance(params["random_state"], int):
            params["random_state"] = None
        kept = {"kind": type(self).__name__, "params": params, **self._kept()}
        with run.open_for_writing():
            write_run(run, self, FILE, kept, {"epoch": self.n_epochs_})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The estimator that `save` wrote."""
        run = Run(path, dtype=torch.float64)
        file = run.path / FILE
        if not file.is_file():
            raise NicestError(f"{path}: expected what {cls.__name__}.save wrote, found no {file.name}")
        try:
            kept = json.loads(file.read_text("utf-8"))
            if kept["kind"] == cls.__name__:
                return cls._loaded(run, kept)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NicestError(f"{file} is damaged: take a copy of it, or fit again ({brief(error)})") from error
        raise NicestError(f"{path}: expected a {cls.__name__}, got a {brief(kept['kind'], 60)}")

    @classmethod
    def _loaded(cls, run: Run, kept: dict[str, Any]) -> Self:
        file = run.path / FILE
        if unknown := kept["params"].keys() - cls().get_params().keys():
            raise newer(f"{file}: unknown parameter {min(unknown)!r}")
        model = cls(**kept["params"])
        model.flow_, model.recipe_, model.history_ = run.flow, run.recipe, run.metrics
        model.n_epochs_, model._frame = int(run.figures.get("epoch", 0)), kept["frame"]
        model.columns_ = columns_from_json(kept["columns"], str(file))
        columns = model._x_columns()
        model.n_features_in_ = len(columns)
        if kept["named"]:
            model.feature_names_in_ = np.asarray([column.name for column in columns], dtype=object)
        model._restore(kept)
        return model

    def _kept(self) -> dict[str, Any]:
        return {}

    def _restore(self, kept: dict[str, Any]) -> None:
        """Take up what `_kept` gave."""

    def __getstate__(self) -> dict[str, Any]:
        return plain_state(super().__getstate__())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(live_state(state))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


class NICERegressor(RegressorMixin, Predictor):
    """p(y | X), by exact likelihood: a distribution for every row.

        model = NICERegressor(random_state=0).fit(X, y)
        model.predict(X)                      # means
        model.predict_interval(X, 0.9)        # the ends of central intervals, (N, 2)
        p = model.predict_distribution(X)     # p.log_prob(y), p.cdf(y), p.quantile(0.5), p.sample(10), p.crps(y)

    X may be a data frame with strings, booleans and missing cells (NaN). The distribution of y given x is a spline
    after a shift and a scaling, which networks compute from x; the densities of several such flows are averaged. None
    means chosen from the data.

    Parameters
    ----------
    effort
        "low", "medium" or "high": a fit takes seconds, about a minute, or minutes.
    members
        Flows whose densities are averaged; 5, or 2 with "low" and from 5,000 rows on.
    trees
        Trees of a random forest whose density is averaged with theirs, by a weight that validation rows choose: 200, or
        100 from 1,000 rows on; none with members=1, below 50 rows and from 20,000 on.
    couplings, hidden_layers, width, bins, dropout
        Of each flow, as for `NICE`.
    epochs, batch_size, learning_rate, weight_decay, validation_fraction
        Of the training, as for `NICE`.
    patience
        Stop after this many epochs without improvement; by default, after a third of the epochs.
    device
        "cpu", "cuda" or "auto".
    random_state
        Seed of the split, the initialisation, the order of rows and dropout.
    verbose
        1 for a progress bar.

    Attributes
    ----------
    flow_
        The `nicest.Flow` of rows [x | y], in float64.
    recipe_
        The `Recipe`, with every choice.
    history_
        The metrics of each validation.
    """

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the distribution of y, (N,), given the rows of X; a row of `sample_weight` 2 counts twice.

        If y holds only integers, of any dtype, its distribution is discrete: `log_prob` is then a log-probability.
        """
        rows, target = self._read(X, y, y_numeric=True)
        target = column_or_1d(target, warn=True).astype(np.float64)
        if not np.isfinite(target).all():
            raise ValueError("expected finite numbers in y, got NaN or infinity")
        if (target == target[0]).all():
            raise ValueError(f"expected y that varies, got {target[0]:g} in all {len(target)} rows")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        columns, codes = self._given_columns(rows)
        if TARGET in (names := {column.name for column in columns}):
            raise ValueError(f"expected no column called {TARGET!r} in X, got {listed(sorted(names))}")
        values = jitter_constant_columns(target[:, None], seed)  # y may vary by no more than rounding error
        found = columns_of(values, [TARGET], [bool((values == values.round()).all())], by_values=False)
        own = tuple(replace(column, spikes=(), floor=None, ceiling=None) for column in found)
        both = np.column_stack([codes, encoded(values, own)[0]])
        self._fit(both, (*columns, *own), [len(columns)], sample_weight, seed)
        return self

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The mean of y for every row."""
        return self.predict_distribution(X).mean()

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> np.ndarray:
        """The ends, (N, 2), of the central interval that holds y with probability `level`."""
        return self.predict_distribution(X).quantile(np.array(interval(level)))

    def predict_distribution(self, X: ArrayLike) -> PredictiveDistribution:
        """The distribution of y for every row."""
        codes = self._given(X)
        given = torch.from_numpy(codes).to(self.flow_.units.scale)
        return PredictiveDistribution(Predictive(self.flow_, given), self.columns_[-1])

    def _x_columns(self) -> tuple[Column, ...]:
        return self.columns_[:-1]


class PredictiveDistribution:
    """The distributions of y, one for every row of X, in arrays of NumPy."""

    def __init__(self, predictive: Predictive, column: Column) -> None:
        self._of, self._column = predictive, column

    def __len__(self) -> int:
        return len(self._of)

    def log_prob(self, y: ArrayLike) -> np.ndarray:
        """Return the log-density of y, (N,), in nats; its log-probability if it was fitted to integers."""
        impossible = codes_of(np.asarray(y, dtype=np.float64), self._column)[1]
        return np.where(impossible, -np.inf, self._of.log_prob(self._codes(y)).cpu().numpy())

    def cdf(self, y: ArrayLike) -> np.ndarray:
        """Return the probability of y or less, for y of shape (N,)."""
        return self._of.cdf(self._codes(y)).cpu().numpy()

    def quantile(self, share: ArrayLike) -> np.ndarray:
        """The y below which a share of the probability lies, (N,); of several shares (L,), (N, L)."""
        shares = torch.as_tensor(np.atleast_1d(np.asarray(share, dtype=np.float64)))
        if not bool(((shares > 0) & (shares < 1)).all()):
            raise ValueError(f"expected shares between 0 and 1, got {shares.tolist()}")
        found = self._values(self._of.quantile(shares))
        return found if np.ndim(share) else found[:, 0]

    def sample(self, n: int, random_state: int | np.random.RandomState | None = None) -> np.ndarray:
        """n draws for every row, (N, n)."""
        if n < 1:
            raise ValueError(f"expected at least 1 draw for every row, got n={n}")
        generator = torch.Generator(self._of.context.device)
        generator.manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
        return self._values(self._of.sample(n, generator))

    def mean(self) -> np.ndarray:
        """Return the mean of y for every row, (N,)."""
        return self._values(self._of.mean())

    def std(self) -> np.ndarray:
        """Return the standard deviation of y for every row, (N,)."""
        return self._values(self._of.points(FINE)).std(1)

    def points(self) -> np.ndarray:
        """Values (N, M) of equal weight that stand for each distribution."""
        return self._values(self._of.points())

    def crps(self, y: ArrayLike) -> np.ndarray:
        """Return the continuous ranked probability score of y, (N,), in its unit: lower is better."""
        return crps(self._of.points(), self._codes(y)).cpu().numpy() * (self._column.step or 1.0)

    def _codes(self, y: ArrayLike) -> torch.Tensor:
        """Encode y, one value for every row; values between two steps are rounded down."""
        values = np.asarray(y, dtype=np.float64)
        if values.shape != (len(self),):
            raise ValueError(f"expected y for each of {len(self)} rows, got shape {values.shape}")
        codes = self._column.code(values)
        return torch.from_numpy(np.floor(codes) if self._column.discrete else codes).to(self._of.context)

    def _values(self, codes: torch.Tensor) -> np.ndarray:
        return own_unit(codes.cpu().numpy(), self._column)


class NICEClassifier(ClassifierMixin, Predictor):
    """p(class | x) by Bayes' rule, from the exact likelihoods p(x | class) of one flow and the classes' frequencies.

        model = NICEClassifier(random_state=0).fit(X, y)
        model.predict_proba(X)
        model.log_likelihood(X)               # log p(x | class), (N, classes): is a row like any of them?

    X may be a data frame with strings and booleans, but without missing cells. Parameters and attributes are those of
    `NICERegressor`, and `classes_`.
    """

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the distribution of the rows of X given their classes y, (N,)."""
        rows, target = self._read(X, y)
        check_classification_targets(target)
        target = column_or_1d(target, warn=True)
        if not isinstance(rows, Frame) and np.isnan(rows).any():
            raise ValueError("expected X without NaN: fill in what is missing, with NICE().impute for example")
        self.classes_, codes = np.unique(target, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"expected at least 2 classes, got 1 class: {self.classes_[0]}")
        count = np.bincount(codes)
        if (single := self.classes_[count == 1]).size:
            warnings.warn(f"one row has the class {shown(single.tolist()[0])}: too few to learn from", stacklevel=2)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        columns, cells = self._target_columns(rows, seed)
        kinds = tuple(f"{each}" for each in range(len(self.classes_)))
        of_class = Column("", "string", "values", 0, len(kinds) - 1, 1.0, kinds)
        both = np.column_stack([codes.astype(np.float64), cells])
        places = range(1, 1 + len(columns))
        self._fit(both, (of_class, *columns), places, sample_weight, seed)
        share = count if sample_weight is None else np.bincount(codes, np.asarray(sample_weight, dtype=np.float64))
        with np.errstate(divide="ignore"):
            self.class_log_prior_ = np.log(share / share.sum())
        return self

    def log_likelihood(self, X: ArrayLike) -> np.ndarray:
        """Return log p(x | class), (N, classes); -inf for rows with values that training never saw."""
        cells, unknown = self._cells(X)
        x, engine = torch.from_numpy(cells), Engine(self.flow_)
        labels = [x.new_full((len(x), 1), k) for k in range(len(self.classes_))]
        nats = np.column_stack([log_mean_density(engine, x, each) for each in labels])
        return np.where(unknown[:, None] | np.isnan(nats), -np.inf, nats)

    def predict_log_proba(self, X: ArrayLike) -> np.ndarray:
        """The log-probability of each class, (N, classes), in the order of `classes_`."""
        joint = self.log_likelihood(X) + self.class_log_prior_
        joint = np.where(np.isneginf(joint).all(1, keepdims=True), self.class_log_prior_, joint)  # nothing is known
        found: np.ndarray = log_softmax(joint, axis=1)
        return found

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """The probability of each class, (N, classes), in the order of `classes_`."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The most probable class of every row."""
        likeliest = self.predict_log_proba(X).argmax(1)
        return self.classes_[likeliest]

    def _target_columns(self, rows: Any, seed: int) -> tuple[tuple[Column, ...], np.ndarray]:
        """Return the columns of X that are modelled, and their encoded cells; constant categories are left out."""
        if isinstance(rows, Frame):
            with in_words_of_parameters():
                found = scan.columns_of(rows.table.schema, rows.table.to_batches(), SOURCE, by_type=True)
                varying = [column for column in found if not column.constant]
                if not varying:
                    raise NicestError(f"expected a column of X that varies, got {len(found)} constant ones")
                columns = tuple(replace(column, spikes=(), floor=None, ceiling=None) for column in varying)
                cells = encode(rows.table, columns, SOURCE, np.float64).rows
            if np.isnan(cells).any():
                raise ValueError("expected X without missing cells: fill them in, with NICE().impute for example")
            return columns, cells
        values = jitter_constant_columns(rows, seed)
        columns = columns_of(values, self._names(rows.shape[1]), [False] * rows.shape[1], by_values=False)
        return columns, encoded(values, columns)[0]

    def _cells(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the rows of X, and which hold a value that training never saw."""
        check_is_fitted(self)
        if not self._frame:
            rows = validate_data(self, X, dtype=np.float64, reset=False)
            return encoded(rows, self._x_columns())
        table = self._table(X)
        with in_words_of_parameters():
            return encode(table, self._x_columns(), SOURCE, np.float64)

    def _x_columns(self) -> tuple[Column, ...]:
        return self.columns_[1:]

    def _kept(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "class_log_prior": self.class_log_prior_.tolist()}

    def _restore(self, kept: dict[str, Any]) -> None:
        self.classes_, self.class_log_prior_ = np.array(kept["classes"]), np.array(kept["class_log_prior"])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = False
        return tags
