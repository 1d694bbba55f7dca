"""NICE as a scikit-learn estimator of tables: density, samples, latent coordinates, outliers."""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from sklearn.base import (
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    DensityMixin,
    OutlierMixin,
    TransformerMixin,
)
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from nicest.data import scan
from nicest.data.arrays import jitter_constant_columns
from nicest.data.cells import Batch, cell_values, codes_of, decode, encode, family
from nicest.data.columns import Column, columns_from_json, columns_to_json, with_bounds
from nicest.data.scan import LARGEST, SMALLEST, Tally
from nicest.data.tables import require_pyarrow
from nicest.data.where import where as parsed
from nicest.errors import NicestError
from nicest.files import to_json
from nicest.flows import Flow, members
from nicest.inference.calibration import Calibration
from nicest.inference.conditional import Conditional
from nicest.inference.engine import Engine
from nicest.inference.impute import MIXED, STEPS
from nicest.messages import listed, one_line, shown
from nicest.progress import Bar
from nicest.recipes import Recipe, parse
from nicest.recipes.defaults import FEW
from nicest.recipes.recipe import DataSettings, ModelSettings
from nicest.runs.digests import ENVIRONMENT
from nicest.runs.folder import COLUMNS, FORMAT, METRICS, RunFolder, newer, restore_flow
from nicest.runs.run import DRAWS, Run
from nicest.runs.runtime import choose_device, environment
from nicest.runs.sinks import Saved
from nicest.tasks.calibrate import calibration
from nicest.tasks.impute_table import fill, filled
from nicest.tasks.score import QUANTILES, keep_quantiles
from nicest.train.fit_table import fit_table

FILE = "estimator.json"
SAME = ("members", "couplings", "hidden_layers", "width", "bins", "dropout", "law", "prior", "marginals", "shrinkage")
MODEL = {name: name for name in SAME} | {"whitening": "preprocess"}  # parameters, and their names in a recipe
TRAIN = {name: name for name in ("effort", "epochs", "weight_decay", "patience")}
TRAIN |= {"batch_size": "batch", "learning_rate": "lr"}
SCORED = 100_000  # training rows that are enough to set the threshold by
COPIES = 4  # of a row in the mean, where weights are not whole numbers
FARTHEST = 1e305  # beyond it differences overflow
SOURCE = Path("X")  # what errors call a data frame


@dataclass(frozen=True)
class Frame:
    """A data frame as an Arrow table, and the library it is of."""

    kind: str
    table: Any

    @classmethod
    def of(cls, X: Any, *, always: bool = False) -> Frame | None:
        """X, if it is a data frame with columns that are not numbers, or, `always`, with any."""
        kind = type(X).__module__.partition(".")[0]
        if kind not in ("pandas", "polars", "pyarrow") or not hasattr(X, "columns"):
            return None
        require_pyarrow()
        import pyarrow as pa

        if kind == "pandas":
            if not always and all(is_number(each) for each in X.dtypes):
                return None
            try:
                return cls(kind, pa.Table.from_pandas(X, preserve_index=False))
            except pa.ArrowException as error:
                raise ValueError(
                    f"expected columns of one type each: {'; '.join(map(one_line, error.args))}"
                ) from error
        table = X.to_arrow() if kind == "polars" else X
        numbers = all(
            family(each) in ("number", "bool") and not hasattr(each, "index_type") for each in table.schema.types
        )
        return None if numbers and kind == "polars" and not always else cls(kind, table)

    def back(self, table: Any = None) -> Any:
        """A table, by default its own, as a data frame of that library."""
        table = self.table if table is None else table
        if self.kind == "pandas":
            return table.to_pandas()
        if self.kind == "polars":
            return import_module("polars").from_arrow(table)
        return table


def is_number(kind: Any) -> bool:
    """Whether a type of pandas is of numbers or booleans."""
    return getattr(kind, "kind", "O") in "biuf"


class NICE(OutlierMixin, DensityMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A density over the rows of a table, by exact likelihood.

        model = NICE(random_state=0).fit(X)
        model.score_samples(X)                # log-density of every row, nats in the units of X
        model.sample(100, random_state=1)     # new rows
        model.sample(100, where="x0 > 2")     # new rows that meet conditions
        model.transform(X)                    # independent latent coordinates, and inverse_transform back
        model.predict(X)                      # -1 for outliers, +1 for inliers
        model.impute(X_with_nan)              # missing cells filled in
        model.calibration(X_held_out)         # do its intervals hold what they claim?

    Columns are standardised and transformed towards the skew and tails of a Gaussian. Then come couplings with
    splines, learned mixing and residual networks; or, if short trainings score better on validation rows, the same
    after a whitening, or additive couplings for few rows. None means chosen from the data: see `docs/estimator.md`.

    Parameters
    ----------
    effort
        "low", "medium" or "high": a fit takes seconds, about a minute, or minutes.
    discrete
        Which columns are discrete: "types" for columns of integers and booleans; "values", as in `nicest
        train`, also for floats that are multiples of a step or take few values, and for spikes, numbers in more
        than 5 % of the rows. The scores of discrete columns and of spikes are probabilities, not densities.
    bounds
        A mapping of columns, by name or number, to (low, high): no density and no sample lies beyond them;
        `high` may be None. With "values", columns that end at 0, at 1 or at a spike are bounded automatically.
    law
        "spline", "additive" (the paper's), "affine" or "multiplicative".
    members
        Flows whose densities are averaged, which is still an exact density; 5 with effort "high", or 2 from 5,000
        rows, else 1. The mean of several flows has no latent coordinates: `transform` needs one.
    couplings
        Coupling layers; 4 or 6, and none below 50 rows or for a single column.
    hidden_layers, width
        Of each coupling network; depend on the number of rows.
    bins
        Of the spline law; 16, or 8 beyond 100 columns.
    dropout
        Inside the coupling networks; depends on the number of rows.
    prior
        "gaussian" or "logistic".
    marginals
        "sinh-arcsinh" or "none"; whichever scores better on held-out rows; "none" below 50 rows.
    whitening
        "zca", "triangular" or "none".
    shrinkage
        How much whitening shrinks correlations, 0 to 1; chosen by cross-validation.
    epochs
        Maximal passes over the rows; as many as the steps that `effort` allows.
    batch_size
        Rows per step; at most 256 with splines.
    learning_rate, weight_decay
        Of Adam; with splines 0.001, or 0.002 from 2,000 rows on, and 0.01.
    patience
        Stop after this many epochs without improvement; by default, after 10 validations.
    validation_fraction
        Fraction of validation rows; a quarter below 1,000 rows, then a tenth, at most 10,000 rows. With 0, and
        below 50 rows, the training rows are used.
    contamination
        Fraction of training rows that `predict` calls outliers, in (0, 0.5]; "auto" is Tukey's fence, the lower
        quartile of their log-density minus 1.5 interquartile ranges. With NaN, only complete rows count, or
        10,000 samples of the model if fewer than 50 are complete.
    warm_start
        Continue from the flow of the previous fit.
    device
        "cpu", "cuda" or "auto".
    random_state
        Seed of the split, the initialisation, the order of rows and dropout.
    verbose
        1 for a progress bar.

    Attributes
    ----------
    flow_
        The `nicest.Flow`, in float64.
    recipe_
        The `Recipe`, with every choice.
    offset_
        Log-density below which `predict` gives -1.
    typical_nats_
        Median log-density of the training rows.
    history_
        The metrics of each validation.
    n_epochs_
        The epoch of the model that was kept; 0 if training did not improve on the start.
    columns_
        A `Column` for each: its `kind` ("real", "steps" or "values"), `low` and `high` in training, and the
        `origin` that is subtracted before the flow.
    """

    flow_: Flow
    recipe_: Recipe
    n_features_in_: int
    offset_: float
    typical_nats_: float
    columns_: tuple[Column, ...]

    def __init__(
        self,
        *,
        effort: str = "medium",
        discrete: str = "types",
        bounds: Mapping[Any, tuple[float, float | None]] | None = None,
        members: int | None = None,
        couplings: int | None = None,
        hidden_layers: int | None = None,
        width: int | None = None,
        bins: int | None = None,
        dropout: float | None = None,
        law: str | None = None,
        prior: str | None = None,
        marginals: str | None = None,
        whitening: str | None = None,
        shrinkage: float | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        patience: int | None = None,
        validation_fraction: float | None = None,
        contamination: float | str = "auto",
        warm_start: bool = False,
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
    ) -> None:
        self.effort = effort
        self.discrete = discrete
        self.bounds = bounds
        self.members = members
        self.couplings = couplings
        self.hidden_layers = hidden_layers
        self.width = width
        self.bins = bins
        self.dropout = dropout
        self.law = law
        self.prior = prior
        self.marginals = marginals
        self.whitening = whitening
        self.shrinkage = shrinkage
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.contamination = contamination
        self.warm_start = warm_start
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: ArrayLike, y: Any = None, sample_weight: ArrayLike | None = None) -> Self:
        """Fit the density to the rows of X; y is ignored.

        Cells that are NaN are missing: their rows train with cells that are drawn from the model while it learns. A
        row of `sample_weight` 2 counts as if it came twice, one of 0 as if it were not there.
        """
        self._check_shares()
        frame = Frame.of(X)
        rows: Any = frame.table if frame else self._numbers(X)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        copies = None
        if sample_weight is not None:
            like = np.empty((len(rows), 1))
            weight = _check_sample_weight(sample_weight, like, dtype=np.float64, ensure_non_negative=True)
            copies = repetitions(weight, seed)
            rows = frame.table.filter(copies > 0) if frame else rows[copies > 0]
            copies = copies[copies > 0]
            if len(rows) < 2:
                raise ValueError(f"expected 2 rows or more of a positive sample_weight, got {len(rows)}")
        warm = self.warm_start and hasattr(self, "flow_") and len(self.columns_) == rows.shape[1]
        with in_words_of_parameters():
            columns, codes, unknown = self._columns_and_codes(X, rows, frame, seed, warm)
        varying = self._varying if warm else [i for i, column in enumerate(columns) if not column.constant]
        if not varying:
            raise ValueError(f"expected a column that varies, got {len(columns)} constant ones")
        codes, unknown = without_constants(codes, unknown, varying)
        if unknown.any():
            where = f"row {int(unknown.argmax())}"
            raise ValueError(f"expected values that the first fit saw, got others in {where}: fit without warm_start")
        had = _params_of(self.recipe_) if warm else {}
        if ignored := [name for name in MODEL if warm and python_number(getattr(self, name)) not in (None, had[name])]:
            warnings.warn(
                f"warm_start continues to train the fitted flow: a new {', '.join(ignored)} has no effect", stacklevel=2
            )
        unit = extremes(codes)
        modelled = tuple(
            columns[i] if each == 1 else replace(columns[i], spikes=(), floor=None, ceiling=None)
            for i, each in zip(varying, unit, strict=True)
        )
        with in_words_of_parameters():
            fitted = fit_table(
                codes / unit,
                seed=seed,
                given={"model": self._given(MODEL), "train": self._given(TRAIN)},
                valid=self.validation_fraction,
                device=self.device,
                quiet=not self.verbose,
                warm=self._warm(unit) if warm else None,
                columns=modelled if any(c.discrete or c.spikes or c.floor is not None for c in modelled) else (),
                copies=copies,
            )
        self.flow_, self.recipe_ = rescaled(fitted.flow, unit, fitted.recipe.data), fitted.recipe
        off = float(np.log(unit).sum())
        self.history_ = [
            row | {name: row[name] - off for name in ("train_nats", "valid_nats")} for row in fitted.metrics
        ]
        self.n_epochs_, self.columns_ = int(fitted.figures["epoch"]), merged(columns, varying, modelled)
        self._frame = frame.kind if frame else ""
        complete = np.flatnonzero(~np.isnan(codes).any(1))
        if len(complete) < min(FEW, len(codes)):
            self._set_offset(self._log_prob(self._draw(10_000, 0)))
            return self
        some = complete if len(complete) <= SCORED else np.random.default_rng(seed).permutation(complete)[:SCORED]
        nats = self._log_prob(codes[some])
        self._set_offset(nats if copies is None else nats.repeat(copies[some]))
        return self

    def score_samples(self, X: ArrayLike) -> np.ndarray:
        """The log-density of every row, in nats of the units of X; -inf for rows too far out for any number.

        For discrete columns it is the log-probability, from below; -inf where a value is none of those in training.
        Rows with NaN have none: NaN.
        """
        return self._log_prob(*self._codes(X)[:2])

    def score(self, X: ArrayLike, y: Any = None) -> float:
        """The mean log-density of the rows without NaN, in nats."""
        nats = self.score_samples(X)
        if np.isnan(nats).all():
            raise ValueError("expected a row without NaN to score, got none: fill them in with impute")
        return float(np.nanmean(nats))

    def sample(
        self,
        n_samples: int = 1,
        random_state: int | np.random.RandomState | None = None,
        *,
        where: str | None = None,
    ) -> Any:
        """New rows, (n_samples, D), in the units of the data; a data frame if X had columns that are not numbers.

        With `where`, such as `"age = 30 and income > 50000"`, rows that meet conditions on columns (x0, x1, ... of an
        array), from the density given these; chains that do not agree are warned of.
        """
        check_is_fitted(self)
        if n_samples < 1:
            raise ValueError(f"expected at least 1 sample, got n_samples={n_samples}")
        if where is None:
            return self._values(self._draw(n_samples, random_state))
        with in_words_of_parameters():
            asked = parsed(where, self._modelled)
            seed = int(check_random_state(random_state).randint(2**31 - 1))
            drawn = Conditional(self.flow_, asked.ranges, seed=seed)
            rows = asked.clip(np.concatenate([each.cpu().numpy() for each in drawn.draws(n_samples)]))
        if drawn.r_hat >= MIXED:
            warnings.warn(f"the chains do not agree (R-hat {drawn.r_hat:.2f})", stacklevel=2)
        return self._values(rows, asked.columns)

    def transform(self, X: ArrayLike) -> np.ndarray:
        """The latent coordinates h = f(x) of every row: independent, each of the law of the prior.

        Discrete columns are taken at the middle of their steps. NaN of NaN, and of values that training never saw.
        """
        check_is_fitted(self)
        self._require_coordinates()
        codes, unknown, _ = self._codes(X)
        codes[unknown] = np.nan
        return self._each("encode", codes, noise=False)

    def inverse_transform(self, X: ArrayLike) -> Any:
        """The rows x = f⁻¹(h) of latent coordinates."""
        check_is_fitted(self)
        self._require_coordinates()
        h = check_array(X, dtype=np.float64)
        if h.shape[1] != self.flow_.dim:
            raise ValueError(f"expected {self.flow_.dim} latent coordinates, got {h.shape[1]}")
        return self._values(self._each("decode", h))

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """The log-density less `offset_`: negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: ArrayLike) -> np.ndarray:
        """-1 for outliers, +1 for inliers, and for rows with NaN, of which nothing is known."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def typicality(self, X: ArrayLike) -> np.ndarray:
        """-|log p(x) - median of training rows|: near 0 for typical rows, also where the density is too high.

        In many dimensions a density is highest where no data is; a low `typicality` finds rows there as well.
        """
        return -np.abs(self.score_samples(X) - self.typical_nats_)

    def impute(
        self,
        X: ArrayLike,
        *,
        draws: int = 400,
        steps: int = STEPS,
        interval: float | None = None,
        random_state: int | np.random.RandomState | None = 0,
    ) -> Any:
        """X with its missing cells filled in by the mean of draws from the model, given the other cells of their row.

        With `interval`, such as 0.9, the ends of that share of the draws of every cell come too: (filled, low, high).
        Cells that are there come back as they are. An integer, and a number of a column with spikes, gets the median
        of its draws, a category the most frequent. Chains stop when they agree, after at most `steps` steps. You get a
        warning for rows whose chains still disagree.
        """
        codes, unknown, rows = self._codes(X)
        hidden = np.isnan(codes) & ~unknown[:, None]
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        how: dict[str, Any] = {"draws": draws, "steps": steps, "interval": 0.9 if interval is None else interval}
        with in_words_of_parameters():
            found = fill(self.flow_, codes, hidden, self._modelled, seed=seed, **how)
        value, low, high = (self._filled(rows, each, hidden) for each in found[:3])
        if poor := int((np.nan_to_num(found.r_hat).max(1) >= MIXED).sum()):
            warnings.warn(f"the chains of {poor} rows do not agree: use more steps", stacklevel=2)
        if left := int((unknown & np.isnan(codes).any(1)).sum()):
            warnings.warn(f"{left} rows hold values that training never saw, and were left as they are", stacklevel=2)
        return value if interval is None else (value, low, high)

    def calibration(
        self,
        X: ArrayLike,
        *,
        cells: int = 1000,
        draws: int = 100,
        steps: int = 200,
        random_state: int | np.random.RandomState | None = 0,
    ) -> Calibration:
        """How far the model can be trusted, on rows that it was not fitted to: PITs, coverage, a verdict, a `plot`.

        `cells` of the rows are hidden one at a time and drawn by the chains of `impute`, of `steps` and `draws` each;
        0 leaves the coverage out. Rows with NaN, or with values that training never saw, are left out.
        """
        codes, unknown, _ = self._codes(X)
        how: dict[str, Any] = {"cells": cells, "draws": draws, "steps": steps, "engine": self._engine()}
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        with in_words_of_parameters(), ExitStack() as stack:
            if self.verbose:
                bar = stack.enter_context(Bar("calibrating", 1000))
                how["watch"] = lambda share: bar.update(round(1000 * share))
            return calibration(self.flow_, Batch(codes, unknown), self._modelled, seed=seed, **how)

    def save(self, path: str | Path) -> None:
        """Write a run folder, as `nicest train` does: `nicest sample` and the others take it; no pickle."""
        check_is_fitted(self)
        run = RunFolder(path)
        if run.model.exists():
            raise NicestError(f"{path} holds a run already: choose another folder")
        scale = self.flow_.units.scale
        if not bool(((scale > SMALLEST) & (scale < LARGEST)).all()):
            raise NicestError(
                f"expected columns whose spread is from {SMALLEST:g} to {LARGEST:g}: rescale X to save it"
            )
        figures = {"offset": self.offset_, "typical_nats": self.typical_nats_, "epoch": self.n_epochs_}
        kept = figures | {"quantiles": self._quantiles.tolist(), "params": self._plain_params()}
        with run.open_for_writing():
            write_run(run, self, FILE, kept, figures)
            keep_quantiles(run.path, self._quantiles, DRAWS if self.flow_.units.discrete else 1)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The estimator of a run folder: one that `save` wrote, or `nicest train` on rows or columns of numbers.

        The latter knows no training rows, so that `offset_` is by 10,000 draws of the model.
        """
        run = Run(path, dtype=torch.float64)
        recipe, file = run.recipe, run.path / FILE
        if recipe.data.levels or len(recipe.data.shape) != 1:
            raise NicestError(f"{path}: expected a model of continuous rows, got {recipe.data.name}: use nicest.load")
        run.require_whole_rows()
        kept: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {"params": _params_of(recipe)}
        if unknown := kept["params"].keys() - cls().get_params().keys():
            raise newer(f"{file}: unknown parameter {min(unknown)!r}")
        model = cls(**kept["params"])
        model.flow_, model.recipe_, model.history_ = run.flow, recipe, run.metrics
        model.n_epochs_ = int(run.figures.get("epoch", 0))
        model.columns_ = columns_from_json(kept["columns"], str(file)) if "named" in kept else run.columns
        if kept.get("named", bool(kept.get("columns", run.columns))):
            model.feature_names_in_ = np.asarray([column.name for column in model.columns_], dtype=object)
        texts = any(isinstance(next(iter(column.values), 0), str) for column in model.columns_)
        model._frame = kept.get("frame", "pandas" if texts else "")
        if not model.columns_:  # of plain rows, whose range is not known
            drawn = run.engine.sample(10_000, generator=torch.Generator().manual_seed(0)).numpy()
            ranges = zip(model._names(recipe.data.dim), drawn.min(0).tolist(), drawn.max(0).tolist(), strict=True)
            model.columns_ = tuple(Column(name, "double", "real", low, high, origin=0.0) for name, low, high in ranges)
        model.n_features_in_ = len(model.columns_)
        if "offset" in kept:
            model.offset_, model.typical_nats_ = kept["offset"], kept["typical_nats"]
            model._quantiles = np.array(kept["quantiles"])
        else:
            model._set_offset(model._log_prob(model._draw(10_000, 0)))
        return model

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True  # in fit and impute
        return tags

    @property
    def _n_features_out(self) -> int:
        return self.flow_.dim

    @property
    def _varying(self) -> list[int]:
        """The columns that the flow models: all but constant ones, which only a run of `nicest train` includes."""
        everything = self.flow_.dim == len(self.columns_)
        return [i for i, column in enumerate(self.columns_) if everything or not column.constant]

    @property
    def _modelled(self) -> tuple[Column, ...]:
        return tuple(self.columns_[i] for i in self._varying)

    def __getstate__(self) -> dict[str, Any]:
        return plain_state({name: each for name, each in super().__getstate__().items() if name != "_kept_engine"})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(live_state(state))

    def _given(self, names: dict[str, str]) -> dict[str, Any]:
        """The parameters that are not None, by their names in the recipe."""
        values = {name: python_number(getattr(self, ours)) for ours, name in names.items()}
        return {name: value for name, value in values.items() if value is not None}

    def _names(self, dim: int) -> Sequence[str]:
        return list(getattr(self, "feature_names_in_", [f"x{i}" for i in range(dim)]))

    def _require_numbers(self, rows: np.ndarray) -> None:
        if (few := np.flatnonzero((~np.isnan(rows)).sum(0) < 2)).size:
            name = getattr(self, "feature_names_in_", range(rows.shape[1]))[few[0]]
            raise ValueError(f"expected 2 numbers or more in every column, got hardly any but NaN in column {name}")
        if (largest := float(np.nanmax(np.abs(rows)))) > FARTHEST:
            raise ValueError(f"expected values up to {FARTHEST:g}, got {largest:g}: rescale that column")

    def _require_coordinates(self) -> None:
        if (count := len(members(self.flow_))) > 1:
            raise ValueError(f"the mean of {count} flows has no latent coordinates: fit with members=1")

    def _check_shares(self) -> None:
        check_validation_fraction(self.validation_fraction)
        outliers = self.contamination
        if outliers != "auto" and not (isinstance(outliers, Real) and 0 < outliers <= 0.5):
            raise ValueError(f"contamination is 'auto' or in (0, 0.5], got {outliers!r}")
        if self.discrete not in ("types", "values"):
            raise ValueError(f"discrete is 'types' or 'values', got {self.discrete!r}")

    def _numbers(self, X: ArrayLike) -> np.ndarray:
        """The rows to fit, of numbers."""
        options = {"dtype": [np.float64, np.float32], "ensure_min_samples": 2, "ensure_all_finite": "allow-nan"}
        try:
            return validate_data(self, X, **options).astype(np.float64, copy=False)
        except ValueError as error:
            if "could not convert" not in str(error):
                raise
            raise ValueError(f"expected numbers, or a data frame with columns of strings: {error}") from error

    def _columns_and_codes(
        self, X: Any, rows: Any, frame: Frame | None, seed: int, warm: bool
    ) -> tuple[tuple[Column, ...], np.ndarray, np.ndarray]:
        """What the columns hold, the model's numbers, and which rows hold values that no fit saw."""
        if frame:
            self.feature_names_in_, self.n_features_in_ = np.asarray(rows.column_names, dtype=object), rows.shape[1]
            by_type = self.discrete == "types"
            columns = (
                self.columns_ if warm else scan.columns_of(rows.schema, rows.to_batches(), SOURCE, by_type=by_type)
            )
            columns = self.columns_ if warm else with_bounds(columns, self._named_bounds(columns), SOURCE)
            return columns, *encode(rows, columns, SOURCE, np.float64)
        self._require_numbers(rows)
        whole, dim = whole_columns(X, rows.shape[1]), rows.shape[1]
        varied = rows if warm else jitter_constant_columns(rows, seed, whole)
        columns = self.columns_ if warm else columns_of(varied, self._names(dim), whole, self.discrete == "values")
        columns = self.columns_ if warm else with_bounds(columns, self._named_bounds(columns), SOURCE)
        return columns, *encoded(varied, columns)

    def _named_bounds(self, columns: Sequence[Column]) -> dict[str, tuple[float, float | None]]:
        given, found = {} if self.bounds is None else self.bounds, {}
        if not isinstance(given, Mapping):
            raise ValueError(f"expected bounds as a mapping of columns to (low, high), got {shown(given)}")
        for key, pair in given.items():
            if isinstance(key, int) and not 0 <= key < len(columns):
                raise ValueError(f"bounds: expected columns 0 to {len(columns) - 1}, or their names, got {key}")
            try:
                low, high = pair
                numbers = isinstance(low, Real) and isinstance(high, Real | None)
            except (TypeError, ValueError):
                numbers = False
            if not numbers:
                raise ValueError(f"bounds: expected (low, high) for column {shown(key)}, got {shown(pair)}")
            found[columns[key].name if isinstance(key, int) else key] = low, high
        return found

    def _codes(self, X: Any) -> tuple[np.ndarray, np.ndarray, Any]:
        """Encode the columns that are modelled, NaN where a cell is missing.

        With the codes come a mask of rows that hold values not seen in training, and the rows as an array or a `Frame`.
        """
        check_is_fitted(self)
        if self._frame:
            frame = Frame.of(X, always=True)
            if frame is None:
                raise ValueError(f"expected a data frame with the columns of training, got {type(X).__name__}")
            with in_words_of_parameters():
                missing = [each.name for each in self.columns_ if each.name not in frame.table.column_names]
                if missing:
                    raise NicestError(f"expected the columns of training, got none called {listed(missing)}")
                batch = encode(frame.table, self.columns_, SOURCE, np.float64)
                return *without_constants(*batch, self._varying), frame
        options = {"dtype": [np.float64, np.float32], "reset": False, "ensure_all_finite": "allow-nan"}
        rows = validate_data(self, X, **options)
        return *without_constants(*encoded(rows, self.columns_), self._varying), rows

    def _draw(self, n: int, random_state: int | np.random.RandomState | None) -> np.ndarray:
        """New rows of the model's numbers."""
        engine = self._engine()
        generator = torch.Generator(engine.device)
        generator.manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
        return engine.sample(n, generator=generator).cpu().numpy()

    def _filled(self, rows: Any, cells: np.ndarray, hidden: np.ndarray) -> Any:
        """Return rows with decoded `cells` where they are `hidden`, and constants where these are missing."""
        if isinstance(rows, Frame):
            missing = np.column_stack([rows.table[each.name].is_null() for each in self.columns_])
            return rows.back(filled(rows.table, self.columns_, self._full(cells), self._full(hidden, missing)))
        return np.where(self._full(hidden, np.isnan(rows)), self._values(cells), rows).astype(rows.dtype)

    def _full(self, modelled: np.ndarray, others: np.ndarray | float = 0.0) -> np.ndarray:
        """Return an array of all columns from one of those that are modelled; constant columns are those of `others`.

        The code of a constant is 0.
        """
        found = np.empty((len(modelled), len(self.columns_)), modelled.dtype)
        found[:] = others
        found[:, self._varying] = modelled
        return found

    def _log_prob(self, codes: np.ndarray, unknown: np.ndarray | bool = False) -> np.ndarray:
        """Return the log-density of encoded rows: NaN for incomplete rows, -inf for `unknown` ones."""
        complete = ~np.isnan(codes).any(1)
        nats = np.where(complete, -np.inf, np.nan)
        scored = complete & ~np.asarray(unknown)
        found = log_mean_density(self._engine(), torch.from_numpy(codes[scored]))
        nats[scored] = np.where(np.isnan(found), -np.inf, found)
        return nats

    def _reals(self, codes: np.ndarray) -> torch.Tensor:
        """What the chain of the flow is given for complete rows: of a step its middle."""
        return self.flow_.units.enter(torch.from_numpy(codes).to(self.flow_.device), noise=False)

    def _each(self, method: str, rows: np.ndarray, **options: bool) -> np.ndarray:
        """What the flow makes of rows; NaN of those that hold NaN."""
        whole = ~np.isnan(rows).any(1)
        found = np.full(rows.shape, np.nan)
        if whole.any():
            found[whole] = self._run(method, torch.from_numpy(rows[whole]), **options)
        return found

    def _warm(self, unit: np.ndarray) -> tuple[Any, ModelSettings]:
        """Return a copy of the fitted flow, for rows divided by `unit`, and its settings."""
        return rescaled(copy.deepcopy(self.flow_), 1 / unit, self.recipe_.data), self.recipe_.model

    def _run(self, method: str | Callable[..., Any], rows: torch.Tensor, **options: Any) -> np.ndarray:
        return np.concatenate([part.cpu().numpy() for part in self._engine().each(method, rows, **options)])

    def _values(self, codes: np.ndarray, columns: Sequence[Column] = ()) -> Any:
        """Decode rows to what X is: an array, or a data frame; `columns` may replace those that are modelled."""
        codes, columns = self._full(codes), merged(self.columns_, self._varying, columns or self._modelled)
        if self._frame:
            return Frame(self._frame, decode(codes, columns)).back()
        return decoded(codes, columns)

    def _engine(self) -> Engine:
        """One engine for as long as the flow is the same, since on a GPU each captures its own graphs."""
        kept: Engine | None = getattr(self, "_kept_engine", None)
        if kept is None or kept.flow is not self.flow_:
            kept = self._kept_engine = Engine(self.flow_)
        return kept

    def _set_offset(self, nats: np.ndarray) -> None:
        self.typical_nats_, self._quantiles = float(np.median(nats)), np.quantile(nats, np.linspace(0, 1, QUANTILES))
        if isinstance(self.contamination, str):
            low, high = np.quantile(nats, [0.25, 0.75])
            self.offset_ = float(low - 1.5 * (high - low))
        else:
            self.offset_ = float(np.quantile(nats, self.contamination))

    def _plain_params(self) -> dict[str, Any]:
        """The parameters as JSON has them; a generator of random numbers is not kept."""
        plain = {name: python_number(value) for name, value in self.get_params().items()}
        plain["bounds"] = {name: list(pair) for name, pair in self._named_bounds(self.columns_).items()} or None
        return plain if isinstance(plain["random_state"], int) else plain | {"random_state": None}


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an estimator in plain values: the flow as safetensors, recipe and columns as text and lists."""
    if "flow_" not in state:
        return state
    tensors = {name: each.detach().cpu().clone() for name, each in state["flow_"].state_dict().items()}
    told = {"recipe_": state["recipe_"].to_toml(), "columns_": columns_to_json(state["columns_"])}
    return state | {"flow_": save_tensors(tensors)} | told


def live_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state of which `plain_state` made plain values."""
    if "flow_" not in state:
        return state
    source, recipe = "a stored estimator", parse(state["recipe_"], "a stored estimator")
    flow = restore_flow(recipe, load_tensors(state["flow_"]), source).eval()
    return state | {"flow_": flow, "recipe_": recipe, "columns_": columns_from_json(state["columns_"], source)}


def check_validation_fraction(share: float | None) -> None:
    if share is not None and not (isinstance(share, Real) and 0 <= share <= 0.9):
        raise ValueError(f"validation_fraction is None or from 0 to 0.9, got {share!r}")


def write_run(run: RunFolder, model: Any, file: str, kept: dict[str, Any], figures: dict[str, Any]) -> None:
    """Write what is known of a fitted estimator into a run folder; what it needs beside the model goes to `file`."""
    columns = columns_to_json(model.columns_)
    kept = kept | {"columns": columns, "frame": model._frame, "named": hasattr(model, "feature_names_in_")}
    made = environment(choose_device("cpu")) | {"format": f"nicest {FORMAT}"}
    lines = "".join(json.dumps(row) + "\n" for row in model.history_)
    modelled = columns_to_json(getattr(model, "_modelled", model.columns_))
    run.begin(
        model.recipe_, {ENVIRONMENT: to_json(made), METRICS: lines, file: to_json(kept), COLUMNS: to_json(modelled)}
    )
    run.save_model(Saved(model.flow_.state_dict(), model.recipe_, figures))


def without_constants(codes: np.ndarray, unknown: np.ndarray, varying: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the encoded columns that vary; rows with another value in a constant column are `unknown`, too."""
    others = np.delete(codes, varying, axis=1)
    return codes[:, varying], unknown | (np.nan_to_num(others) != 0).any(1)


def merged(columns: Sequence[Column], places: Sequence[int], others: Sequence[Column]) -> tuple[Column, ...]:
    """Return the columns with those at `places` replaced by `others`."""
    found = dict(enumerate(columns)) | dict(zip(places, others, strict=True))
    return tuple(found.values())


def whole_columns(X: Any, dim: int) -> list[bool]:
    """Which columns are of integers or booleans, by the types of a data frame or of an array."""
    types = list(X.dtypes) if hasattr(X, "dtypes") else [np.asarray(X).dtype] * dim
    return [getattr(each, "kind", "f") in "biu" or str(each).startswith(("Int", "UInt", "Bool")) for each in types]


def columns_of(rows: np.ndarray, names: Sequence[str], whole: Sequence[bool], by_values: bool) -> tuple[Column, ...]:
    """What the columns of rows (N, D) hold, as `nicest train` finds it; only of those that are `whole`, or of all.

    The origin of reals is one of them: so rows that are the same but for an offset stay the same, to the bit.
    """
    found = []
    for name, cells, integers in zip(names, rows.T, whole, strict=True):
        there = cells[~np.isnan(cells)]
        tally = Tally(name, "double", seen=len(there))
        tally.add_numbers(there)
        middle = float(np.partition(there, len(there) // 2)[len(there) // 2])
        real = Column(name, "double", "real", tally.low, tally.high, origin=middle)
        known = integers or by_values
        column = (tally.discrete("double") if known else None) or real
        found.append(tally.with_support(column) if known else column)
    return tuple(found)


def encoded(rows: np.ndarray, columns: Sequence[Column]) -> tuple[np.ndarray, np.ndarray]:
    """The model's numbers, (N, D) in float64, NaN where a cell is; and which rows hold values unknown in training."""
    pairs = [codes_of(cells.astype(np.float64), column) for cells, column in zip(rows.T, columns, strict=True)]
    return np.column_stack([codes for codes, _ in pairs]), np.any([new for _, new in pairs], axis=0)


def decoded(codes: np.ndarray, columns: Sequence[Column]) -> np.ndarray:
    """The rows, (N, D), that the model's numbers stand for."""
    return np.column_stack([cell_values(each, column) for each, column in zip(codes.T, columns, strict=True)])


def extremes(codes: np.ndarray) -> np.ndarray:
    """For every column 1, or where it is too large or small for float32 the power of 2 to divide it by in training."""
    largest = np.nanmax(np.abs(codes), axis=0)
    return np.where((largest > 1e-20) & (largest < 1e20), 1.0, np.ldexp(1.0, np.frexp(largest)[1]))


def rescaled(flow: Any, unit: np.ndarray, data: DataSettings) -> Any:
    """Adapt a flow, in place, to numbers that are `unit` times as large."""
    modelled, context = data.split(torch.from_numpy(unit)[None])
    flow.units.rescale(modelled[0])
    if context is not None:
        members(flow)[0].embedding.rescale(context[0])
    return flow


def log_mean_density(engine: Engine, rows: torch.Tensor, context: torch.Tensor | None = None) -> np.ndarray:
    """Return the log of the density of each row (n, D), averaged over a few points of the dequantisation noise.

    The points are a Latin hypercube, the same for all rows; without discrete columns there is one. Rows are processed
    in batches, so that memory does not grow with their number.
    """
    units = engine.flow.units
    n = DRAWS if units.discrete else 1
    points = torch.from_numpy((np.random.default_rng(0).random((n, units.dim)).argsort(0) + 0.5) / n).to(units.scale)
    nats = [np.empty(0)]
    for start in range(0, len(rows), engine.batch):
        some = slice(start, start + engine.batch)
        given = None if context is None else context[some].to(engine.device)
        drawn = [units.enter(rows[some].to(engine.device), noise=point) for point in points]
        each = [torch.cat(list(engine.each("log_density", y, given))) + units.log_det(y) for y in drawn]
        nats.append((torch.stack(each).logsumexp(0) - math.log(n)).cpu().numpy())
    return np.concatenate(nats)


def repetitions(weight: np.ndarray, seed: int) -> np.ndarray:
    """How often to take each row: its weight if all are integers, or integer multiples of the least that is not 0.

    Otherwise, and for integers too large for it, in proportion to the weights, in the mean over seeds.
    """
    for each in (weight, weight / weight[weight > 0].min(initial=np.inf)):
        if np.allclose(each, each.round(), rtol=1e-9, atol=0) and each.sum() <= 10 * len(each):
            return each.round().astype(int)
    ends = np.cumsum(weight) * (COPIES * len(weight) / weight.sum())
    return np.diff(np.floor(ends + np.random.default_rng(seed).random()), prepend=0).astype(int)


@contextmanager
def in_words_of_parameters() -> Iterator[None]:
    """Errors inside as ValueError, in which settings of recipes are the parameters of NICE."""
    ours = {name: ours for ours, name in (MODEL | TRAIN).items()}
    try:
        yield
    except NicestError as error:
        text = re.sub(r"^(NICE|recipe|table|X): | or set train\.clip \([^)]*\)|; the last good state.*", "", str(error))
        text = re.sub(r"(leave it out)(?: by|: set) .*", r"\1", text)
        text = re.sub(r"\b(?:model|train)\.(\w+)", lambda found: ours.get(found[1], found[1]), text)
        raise ValueError(text) from error


def python_number(value: Any) -> Any:
    """A number of numpy's as one of Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _params_of(recipe: Recipe) -> dict[str, Any]:
    """The parameters that a recipe stands for."""
    depths = recipe.model.hidden_layers
    params = {ours: getattr(recipe.model, name) for ours, name in MODEL.items()}
    params |= {ours: getattr(recipe.train, name) for ours, name in TRAIN.items()}
    return params | {"hidden_layers": depths[0] if len(depths) == 1 else list(depths)}
