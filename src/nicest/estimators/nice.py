"""NICE as a scikit-learn estimator of rows of numbers: density, samples, latent coordinates, outliers."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, DensityMixin, OutlierMixin, TransformerMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from nicest.data import in_memory
from nicest.errors import NicestError
from nicest.estimators.parameters import MODEL, TRAIN, in_words_of_parameters, params_of, python_number
from nicest.files import to_json
from nicest.flows import Flow
from nicest.inference.engine import Engine
from nicest.messages import one_line
from nicest.recipes import Recipe
from nicest.recipes.defaults import IN_MEMORY, held_out
from nicest.recipes.recipe import DataSettings, TrainSettings
from nicest.runs.run import Run, write_run
from nicest.runs.runtime import choose_device
from nicest.train.callbacks import ProgressBar
from nicest.train.fit import fit_splits
from nicest.train.initial import sized

FILE = "estimator.json"
SCORED = 100_000  # training rows that are enough to set the threshold by
FARTHEST = 1e305  # beyond it differences overflow


@dataclass(kw_only=True, repr=False, eq=False)
class NICE(OutlierMixin, DensityMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A coupling flow as a density over rows of real numbers, with exact likelihood.

        model = NICE(random_state=0).fit(X)
        model.score_samples(X)                # log-density of every row, in nats in the units of X
        model.sample(100, random_state=1)     # new rows
        model.transform(X)                    # independent latent coordinates, and inverse_transform back
        model.predict(X)                      # -1 for outliers, +1 for inliers

    Columns are standardised. Then come couplings with splines, learned mixing and residual networks; or, with fewer
    than 20 rows a column, additive couplings after a whitening. For tables with missing cells, categories or integers
    use `NICETable`. Parameters that are None are chosen from the data.

    Parameters
    ----------
    effort
        "low", "medium" or "high": a fit takes seconds, about a minute, or minutes.
    law
        "spline", "additive" (the paper's), "affine" or "multiplicative".
    couplings
        Number of coupling layers; 4 or 6, and 0 below 50 rows or for a single column.
    hidden_layers, width
        Size of each coupling network; by the number of rows.
    bins
        Bins of the spline law; 16, or 8 beyond 100 columns.
    dropout
        Dropout inside the coupling networks; by the number of rows.
    prior
        "gaussian" or "logistic".
    marginals
        "sinh-arcsinh" or "none", by cross-validation; "none" below 50 rows.
    whitening
        "zca", "triangular" or "none".
    shrinkage
        How much whitening shrinks correlations, 0 to 1, by cross-validation.
    epochs
        Maximal passes over the rows; by `effort`.
    batch_size
        Rows per step; at most 256 with splines.
    learning_rate, weight_decay
        Of Adam; with splines 0.001, or 0.002 from 2,000 rows on, and 0.01.
    patience
        Epochs without improvement after which training stops; by default those of 10 validations.
    validation_fraction
        Fraction of validation rows; a quarter below 1,000 rows, then a tenth, at most 10,000 rows. With 0, and below 50
        rows, the training rows are used.
    contamination
        Fraction of training rows that `predict` calls outliers, in (0, 0.5]; "auto" is Tukey's fence, the lower
        quartile of their log-density minus 1.5 interquartile ranges.
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
        The `nicest.Flow` of rows of X, in float64.
    recipe_
        The `Recipe`, with every choice.
    offset_
        Log-density below which `predict` gives -1.
    history_
        The metrics of each validation.
    n_epochs_
        The epoch of the model that was kept; 0 if training did not improve on the start.
    """

    effort: str = "medium"
    law: str | None = None
    couplings: int | None = None
    hidden_layers: int | None = None
    width: int | None = None
    bins: int | None = None
    dropout: float | None = None
    prior: str | None = None
    marginals: str | None = None
    whitening: str | None = None
    shrinkage: float | None = None
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    patience: int | None = None
    validation_fraction: float | None = None
    contamination: float | str = "auto"
    warm_start: bool = False
    device: str = "cpu"
    random_state: int | np.random.RandomState | None = None
    verbose: int = 0

    flow_: Flow = field(init=False)
    recipe_: Recipe = field(init=False)
    n_features_in_: int = field(init=False)
    offset_: float = field(init=False)

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Fit the density to the rows of X, (N, D); y is ignored."""
        self._check_fractions()
        rows = self._rows(X, reset=True)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        middle, spread, codes = standardised(rows, seed)
        share = held_out(len(rows)) if self.validation_fraction is None else float(self.validation_fraction)
        splits = in_memory(codes.astype(np.float32), seed, share)
        recipe, flow = Recipe("rows", data=DataSettings(name=IN_MEMORY), train=TrainSettings(seed=seed)), None
        with in_words_of_parameters():
            recipe = sized(recipe, splits, {"model": self._given(MODEL), "train": self._given(TRAIN)})
            if self.warm_start and hasattr(self, "flow_") and self.flow_.dim == rows.shape[1]:
                self._warn_of_ignored()
                recipe = replace(recipe, model=self.recipe_.model)
                flow = moved(copy.deepcopy(self.flow_), -middle / spread, 1 / spread)
            bars = [ProgressBar()] if self.verbose else []
            fitted = fit_splits(recipe, splits, choose_device(self.device), bars, flow)
        self.flow_, self.recipe_ = moved(fitted.flow, middle, spread), fitted.recipe
        off = float(np.log(spread).sum())
        nats = ("train_nats", "valid_nats")
        self.history_ = [row | {name: row[name] - off for name in nats} for row in fitted.metrics]
        self.n_epochs_ = int(fitted.figures["epoch"])
        some = rows if len(rows) <= SCORED else np.random.default_rng(seed).permutation(rows)[:SCORED]
        self._set_offset(self._log_prob(some))
        return self

    def score_samples(self, X: ArrayLike) -> np.ndarray:
        """Return the log-density of every row, (N,), in nats in the units of X; -inf for rows too far out."""
        check_is_fitted(self)
        return self._log_prob(self._rows(X))

    def score(self, X: ArrayLike, y: Any = None) -> float:
        """Return the mean log-density of the rows, in nats."""
        return float(self.score_samples(X).mean())

    def sample(self, n_samples: int = 1, random_state: int | np.random.RandomState | None = None) -> np.ndarray:
        """Draw new rows, (n_samples, D)."""
        check_is_fitted(self)
        if n_samples < 1:
            raise ValueError(f"expected at least 1 sample, got n_samples={n_samples}")
        generator = torch.Generator(self.flow_.device)
        generator.manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
        return self._engine().sample(n_samples, generator=generator).cpu().numpy()

    def transform(self, X: ArrayLike) -> np.ndarray:
        """Return the latent coordinates h = f(x), (N, D): independent, each distributed as the prior."""
        check_is_fitted(self)
        return self._each("encode", self._rows(X))

    def inverse_transform(self, X: ArrayLike) -> np.ndarray:
        """Return the rows x = f⁻¹(h) of latent coordinates, (N, D)."""
        check_is_fitted(self)
        h = check_array(X, dtype=np.float64)
        if h.shape[1] != self.flow_.dim:
            raise ValueError(f"expected {self.flow_.dim} latent coordinates, got {h.shape[1]}")
        return self._each("decode", h)

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """Return the log-density less `offset_`, (N,): negative for outliers."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return -1 for outliers and +1 for inliers, (N,)."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def save(self, path: str | Path) -> None:
        """Write a run folder, as `nicest train` does; no pickle."""
        check_is_fitted(self)
        scale = self.flow_.units.scale
        if not bool(((scale > 1e-30) & (scale < 1e30)).all()):
            raise NicestError("expected columns whose spread is from 1e-30 to 1e+30: rescale X to save it")
        params = {name: python_number(each) for name, each in self.get_params().items()}
        if not isinstance(params["random_state"], int):
            params["random_state"] = None
        names = getattr(self, "feature_names_in_", None)
        kept = {"params": params, "names": None if names is None else list(names), "offset": self.offset_}
        figures = {"offset": self.offset_, "epoch": self.n_epochs_}
        files = {FILE: to_json(kept)}
        write_run(path, self.flow_, self.recipe_, figures=figures, metrics=self.history_, files=files)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Open a run folder that `save` wrote, or `nicest train` on rows of numbers.

        The latter has no training rows, so that `offset_` is taken from 10,000 samples of the model.
        """
        run = Run(path, dtype=torch.float64)
        recipe, file = run.recipe, run.path / FILE
        if recipe.data.levels or run.kind != "rows":
            other = "NICETable.load" if run.kind == "table" else "nicest.load"
            raise NicestError(
                f"{path}: expected a model of rows of numbers, got one of {recipe.data.name}: use {other}"
            )
        kept: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {"params": params_of(recipe)}
        model = cls(**{name: each for name, each in kept["params"].items() if name in cls().get_params()})
        model.flow_, model.recipe_, model.history_ = run.flow, recipe, run.metrics
        model.n_epochs_, model.n_features_in_ = int(run.figures.get("epoch", 0)), run.flow.dim
        if names := kept.get("names"):
            model.feature_names_in_ = np.asarray(names, dtype=object)
        if "offset" in kept:
            model.offset_ = kept["offset"]
        else:
            model._set_offset(model._log_prob(model.sample(10_000, 0)))
        return model

    @property
    def _n_features_out(self) -> int:
        return self.flow_.dim

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in super().__getstate__().items() if name != "_kept_engine"}

    def _check_fractions(self) -> None:
        share, outliers = self.validation_fraction, self.contamination
        if share is not None and not (isinstance(share, Real) and 0 <= share <= 0.9):
            raise ValueError(f"validation_fraction is None or from 0 to 0.9, got {share!r}")
        if outliers != "auto" and not (isinstance(outliers, Real) and 0 < outliers <= 0.5):
            raise ValueError(f"contamination is 'auto' or in (0, 0.5], got {outliers!r}")

    def _rows(self, X: ArrayLike, *, reset: bool = False) -> np.ndarray:
        """Validate rows and return them in float64."""
        options: dict[str, Any] = {"dtype": [np.float64, np.float32], "ensure_all_finite": "allow-nan"}
        try:
            rows = validate_data(self, X, reset=reset, ensure_min_samples=1 + reset, **options)
        except ValueError as error:
            if "could not convert" not in str(error):
                raise
            raise ValueError(f"expected numbers: NICETable takes tables of any columns ({one_line(error)})") from error
        if np.isnan(rows).any():
            raise ValueError("expected numbers, got X with NaN: NICETable takes rows with missing cells")
        if (largest := float(np.abs(rows).max(initial=0))) > FARTHEST:
            raise ValueError(f"expected values up to {FARTHEST:g}, got {largest:g}: rescale that column")
        return rows.astype(np.float64)  # a copy: torch needs memory that can be written

    def _given(self, names: dict[str, str]) -> dict[str, Any]:
        """Return the parameters that are not None, by their names in the recipe."""
        values = {name: python_number(getattr(self, ours)) for ours, name in names.items()}
        return {name: value for name, value in values.items() if value is not None}

    def _warn_of_ignored(self) -> None:
        """Warn of parameters of the model that a warm start cannot change."""
        had = params_of(self.recipe_)
        ignored = [name for name in MODEL if python_number(getattr(self, name)) not in (None, had[name])]
        if ignored:
            what = f"a new {', '.join(ignored)} has no effect"
            warnings.warn(f"warm_start continues to train the fitted flow: {what}", stacklevel=3)

    def _log_prob(self, rows: np.ndarray) -> np.ndarray:
        found = self._engine().log_prob(torch.from_numpy(rows)).cpu().numpy()
        return np.where(np.isnan(found), -np.inf, found)

    def _each(self, method: str, rows: np.ndarray) -> np.ndarray:
        return np.concatenate([part.cpu().numpy() for part in self._engine().each(method, torch.from_numpy(rows))])

    def _engine(self) -> Engine:
        """Return the engine of the flow; on a GPU it keeps its captured graphs."""
        kept: Engine | None = getattr(self, "_kept_engine", None)
        if kept is None or kept.flow is not self.flow_:
            kept = self._kept_engine = Engine(self.flow_)
        return kept

    def _set_offset(self, nats: np.ndarray) -> None:
        if isinstance(self.contamination, str):
            low, high = np.quantile(nats, [0.25, 0.75])
            self.offset_ = float(low - 1.5 * (high - low))
        else:
            self.offset_ = float(np.quantile(nats, self.contamination))


def standardised(rows: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the medians and mean absolute deviations of columns, (D,) each, and the standardised rows, (N, D).

    The density of a constant column would be infinite: it gets noise of a thousandth of its value.
    """
    middle = np.partition(rows, len(rows) // 2, axis=0)[len(rows) // 2]
    away = rows - middle
    largest = np.abs(rows).max(0)
    constant = rows.max(0) - rows.min(0) <= 4 * np.spacing(largest)  # no more than rounding errors
    spread = np.where(constant, 1e-3 * np.where(largest > 0, largest, 1.0), np.abs(away).mean(0))
    noise = np.random.default_rng(seed).standard_normal((len(rows), int(constant.sum())))
    codes = away / spread
    codes[:, constant] = noise
    return middle, spread, codes


def moved(flow: Flow, loc: np.ndarray, scale: np.ndarray) -> Flow:
    """Change a flow of rows x, in place, to one of rows loc + scale x."""
    units = flow.units
    shift, factor = (torch.from_numpy(each).to(units.loc) for each in (loc, scale))
    units.loc.mul_(factor).add_(shift)
    units.scale.mul_(factor)
    return flow
