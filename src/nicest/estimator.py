"""NICE as a scikit-learn estimator of tables: density, samples, latent coordinates, outliers."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import (
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    DensityMixin,
    OutlierMixin,
    TransformerMixin,
)
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from nicest.data.arrays import origins
from nicest.data.columns import Column, columns_to_json
from nicest.errors import NicestError
from nicest.files import to_json, write_text
from nicest.flows import Flow
from nicest.inference.engine import Engine
from nicest.inference.impute import impute_rows, in_parts
from nicest.messages import listed
from nicest.recipes import Recipe
from nicest.recipes.defaults import FEW
from nicest.runs.digests import ENVIRONMENT
from nicest.runs.folder import COLUMNS, FORMAT, RunFolder, newer
from nicest.runs.run import Run
from nicest.runs.runtime import choose_device, environment
from nicest.runs.sinks import Saved
from nicest.tasks.score import QUANTILES, keep_quantiles
from nicest.train.fit_table import fit_table

FILE = "estimator.json"
LARGEST = 1e100  # beyond it squares overflow
MODEL = {
    "couplings": "couplings",
    "hidden_layers": "hidden_layers",
    "width": "width",
    "dropout": "dropout",
    "law": "law",
    "prior": "prior",
    "marginals": "marginals",
    "whitening": "preprocess",
    "shrinkage": "shrinkage",
}
TRAIN = {
    "epochs": "epochs",
    "batch_size": "batch",
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "patience": "patience",
}


class NICE(OutlierMixin, DensityMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A density over the rows of a table, by exact likelihood.

        model = NICE(random_state=0).fit(X)
        model.score_samples(X)                # log-density of every row, nats in the units of X
        model.sample(100, random_state=1)     # new rows
        model.transform(X)                    # independent latent coordinates, and inverse_transform back
        model.predict(X)                      # -1 for outliers, +1 for inliers
        model.impute(X_with_nan)              # missing cells filled in

    The flow: columns standardised, bent to a Gaussian's skew and tails, whitened, additive couplings, a scaling, a
    factorial prior. Untrained it is a copula of a shrunk covariance; training goes on from there while validation
    improves. None means chosen from the data, as `docs/estimator.md` tells.

    Parameters
    ----------
    couplings : coupling layers; 4, or 6 from 500 rows, and none below 50 rows or for a single column.
    hidden_layers, width : of each coupling function; 2, and 32 to 256 by the number of rows.
    dropout : inside the coupling functions; 0.2 below 50 rows for each column, else 0.
    law : "additive" (the paper's), "affine" or "multiplicative"; additive.
    prior : "gaussian" or "logistic"; whichever scores better on rows left out.
    marginals : "sinh-arcsinh" or "none"; chosen likewise, and "none" below 50 rows.
    whitening : "zca", "triangular" or "none"; zca up to 1,000 columns.
    shrinkage : share of the correlations that whitening disbelieves, 0 to 1; chosen likewise.
    epochs : most passes over the rows; 1,500 to 10,000 steps in all.
    batch_size : rows in a step; a tenth of the rows, between 64 and 1,024.
    learning_rate, weight_decay : of Adam; 0.003, or 0.001 from 10,000 rows, and 0.01.
    patience : epochs without a better validation after which training ends; those of 10 validations.
    validation_fraction : share of rows that validates; a quarter below 1,000 rows, then a tenth, at most 10,000 rows.
        With 0, and below 50 rows, the training rows validate.
    contamination : share of training rows that `predict` calls outliers, in (0, 0.5]; "auto" is Tukey's fence, the
        lower quartile of their log-density less 1.5 times its interquartile range. Of rows with NaN the whole ones
        count, or 10,000 draws of the model where fewer than 50 are whole.
    warm_start : let the next fit go on from the flow of the last one.
    device : "cpu", "cuda" or "auto".
    random_state : of the split, the initialisation, the order of rows, the dropout.
    verbose : whether to show the progress.

    Attributes
    ----------
    flow_ : the `nicest.Flow`, in float64.
    recipe_ : the `Recipe`, every choice written out.
    offset_ : log-density below which `predict` gives -1.
    typical_nats_ : median log-density of the training rows.
    history_ : a row of figures for each validation.
    n_epochs_ : epochs until the model that was kept; 0 if training did not improve on the start.
    origin_ : what is taken off every column before the flow: 0, but for columns far from 0, of which float32 would
        lose the digits, and for models that `nicest train` made of a table.
    range_ : smallest and largest number of every column in training, (2, D).
    """

    flow_: Flow
    recipe_: Recipe
    n_features_in_: int
    offset_: float
    typical_nats_: float
    origin_: np.ndarray
    range_: np.ndarray

    def __init__(
        self,
        *,
        couplings: int | None = None,
        hidden_layers: int | None = None,
        width: int | None = None,
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
        verbose: bool = False,
    ) -> None:
        self.couplings = couplings
        self.hidden_layers = hidden_layers
        self.width = width
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

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Fit the density to the rows of X; y is ignored.

        Cells that are NaN are missing: their rows train with cells that are drawn from the model while it learns.
        """
        self._check_shares()
        options = {"dtype": [np.float64, np.float32], "ensure_min_samples": 2, "ensure_all_finite": "allow-nan"}
        rows = validate_data(self, X, **options)
        missing = np.isnan(rows)
        if (few := np.flatnonzero((~missing).sum(0) < 2)).size:
            name = getattr(self, "feature_names_in_", range(rows.shape[1]))[few[0]]
            raise ValueError(f"expected 2 numbers or more in every column, got hardly any but NaN in column {name}")
        if (largest := float(np.nanmax(np.abs(rows)))) > LARGEST:
            raise ValueError(f"expected values up to {LARGEST:g}, got {largest:g}: rescale that column")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        warm = self.warm_start and self._fits(rows)
        if warm and (ignored := [name for name, value in self._given(MODEL).items() if self._had(name) != value]):
            warnings.warn(f"warm_start goes on with the flow that is there: {', '.join(ignored)} stays", stacklevel=2)
        origin = self.origin_ if warm else origins(rows)
        try:
            fitted = fit_table(
                rows - origin if origin.any() else rows,
                seed=seed,
                given={"model": self._given(MODEL), "train": self._given(TRAIN)},
                valid=self.validation_fraction,
                device=self.device,
                quiet=not self.verbose,
                warm=(self.flow_, self.recipe_.model) if warm else None,
            )
        except NicestError as error:
            raise ValueError(str(error)) from error
        self.flow_, self.recipe_, self.history_ = fitted.flow, fitted.recipe, fitted.metrics
        self.n_epochs_ = int(fitted.figures["epoch"])
        self.origin_ = origin
        self.range_ = np.stack([np.nanmin(rows, 0), np.nanmax(rows, 0)]).astype(np.float64)
        whole = rows[~missing.any(1)]
        enough = len(whole) >= FEW or len(whole) == len(rows)
        self._set_offset(self._log_prob(whole if enough else self.sample(10_000, random_state=0)))
        return self

    def score_samples(self, X: ArrayLike) -> np.ndarray:
        """The log-density of every row, in nats of the units of X; -inf for rows too far out for any number.

        Rows with NaN have none: NaN.
        """
        return self._log_prob(self._rows(X))

    def score(self, X: ArrayLike, y: Any = None) -> float:
        """The mean log-density of the rows without NaN, in nats."""
        nats = self.score_samples(X)
        if np.isnan(nats).all():
            raise ValueError("expected a row without NaN to score, got none: fill them in with impute")
        return float(np.nanmean(nats))

    def sample(self, n_samples: int = 1, random_state: int | np.random.RandomState | None = None) -> np.ndarray:
        """New rows, (n_samples, D), in the units of the data."""
        check_is_fitted(self)
        if n_samples < 1:
            raise ValueError(f"expected at least 1 sample, got n_samples={n_samples}")
        engine = self._engine()
        generator = torch.Generator(engine.device)
        generator.manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
        return engine.sample(n_samples, generator=generator).cpu().numpy() + self.origin_

    def transform(self, X: ArrayLike) -> np.ndarray:
        """The latent coordinates h = f(x) of every row: independent, each of the law of the prior; NaN of NaN."""
        return self._each("encode", self._rows(X) - self.origin_)

    def inverse_transform(self, X: ArrayLike) -> np.ndarray:
        """The rows x = f⁻¹(h) of latent coordinates."""
        check_is_fitted(self)
        h = check_array(X, dtype=np.float64)
        if h.shape[1] != self.n_features_in_:
            raise ValueError(f"expected {self.n_features_in_} latent coordinates, got {h.shape[1]}")
        return self._each("decode", h) + self.origin_

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
        steps: int = 1500,
        interval: float | None = None,
        random_state: int | np.random.RandomState | None = 0,
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray, np.ndarray]:
        """X with its NaN cells filled in by the mean of draws from the model, given the other cells of their row.

        With `interval`, such as 0.9, the ends of that share of the draws of every cell come too: (filled, low, high).
        Cells that are there come back as they are. Chains that do not agree are warned of; `steps` is their length.
        """
        rows = self._rows(X)
        x = torch.from_numpy(rows.astype(np.float64) - self.origin_).to(self.flow_.device)
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        filled, low, high = (np.array(rows) for _ in range(3))
        poor = 0
        for which, own in in_parts(np.isnan(rows), seed):
            how: dict[str, Any] = {"draws": draws, "steps": steps, "interval": 0.9 if interval is None else interval}
            try:
                found = impute_rows(self.flow_, x[which], x[which].isnan(), ascent=0, seed=own, **how)
            except NicestError as error:
                raise ValueError(str(error)) from error
            poor += int((~found.mixed).sum())
            for target, each in zip((filled, low, high), (found.mean, found.low, found.high), strict=True):
                target[which] = np.where(np.isnan(rows[which]), each.cpu().numpy() + self.origin_, rows[which])
        if poor:
            warnings.warn(f"the chains of {poor} rows do not agree: take more steps", stacklevel=2)
        return filled if interval is None else (filled, low, high)

    def save(self, path: str | Path) -> None:
        """Write a run folder, as `nicest train` does: `nicest sample` and the others take it; no pickle."""
        check_is_fitted(self)
        run = RunFolder(path)
        if run.model.exists():
            raise NicestError(f"{path} holds a run already: choose another folder")
        names = getattr(self, "feature_names_in_", None)
        figures = {"offset": self.offset_, "typical_nats": self.typical_nats_, "epoch": self.n_epochs_}
        with run.open_for_writing():
            write_text(run.path / "recipe.toml", self.recipe_.to_toml())
            made = environment(choose_device("cpu")) | {"format": f"nicest {FORMAT}"}
            write_text(run.path / ENVIRONMENT, to_json(made))
            write_text(run.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in self.history_))
            kept = figures | {
                "quantiles": self._quantiles.tolist(),
                "columns": None if names is None else list(names),
                "params": self._plain_params(),
            }
            write_text(run.path / FILE, to_json(kept))
            write_text(run.path / COLUMNS, to_json(columns_to_json(self._columns())))
            run.save_model(Saved(self.flow_.state_dict(), self.recipe_, figures))
            keep_quantiles(run.path, self._quantiles)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The estimator of a run folder: one that `save` wrote, or `nicest train` on rows or columns of real numbers.

        The latter knows no training rows, so that `offset_` is by 10,000 draws of the model.
        """
        run = Run(path, dtype=torch.float64)
        recipe, columns = run.recipe, run.columns
        if recipe.data.levels or len(recipe.data.shape) != 1:
            raise NicestError(f"{path}: expected a model of continuous rows, got {recipe.data.name}: use nicest.load")
        if discrete := [column.name for column in columns if column.discrete]:
            of = f"whole numbers or few values in {listed(discrete)}"
            raise NicestError(f"{path}: expected a model of real numbers, got {of}: use `nicest score` and its like")
        file = run.path / FILE
        kept: dict[str, Any] = {"params": _params_of(recipe)}
        if file.is_file():
            kept = json.loads(file.read_text("utf-8"))
        if unknown := kept["params"].keys() - cls().get_params().keys():
            raise newer(f"{file}: unknown parameter {min(unknown)!r}")
        model = cls(**kept["params"])
        model.flow_, model.recipe_, model.history_ = run.flow, recipe, run.metrics
        model.n_features_in_, model.n_epochs_ = recipe.data.dim, int(run.figures.get("epoch", 0))
        model.origin_ = np.array([column.taken_off for column in columns] or np.zeros(recipe.data.dim))
        if names := kept.get("columns", [column.name for column in columns]):
            model.feature_names_in_ = np.asarray(names, dtype=object)
        if "offset" in kept:
            model.offset_, model.typical_nats_ = kept["offset"], kept["typical_nats"]
            model._quantiles = np.array(kept["quantiles"])
        drawn = model.sample(10_000, random_state=0) if "offset" not in kept or not columns else np.zeros((1, 1))
        if "offset" not in kept:
            model._set_offset(model._log_prob(drawn))
        ends = [(column.low, column.high) for column in columns]
        model.range_ = np.array(ends).T if ends else np.stack([drawn.min(0), drawn.max(0)])
        return model

    def _columns(self) -> tuple[Column, ...]:
        """The columns as the command line knows them."""
        names = getattr(self, "feature_names_in_", [f"x{i}" for i in range(self.n_features_in_)])
        each = zip(names, self.range_[0].tolist(), self.range_[1].tolist(), self.origin_.tolist(), strict=True)
        return tuple(Column(name, "double", "real", low, high, origin=origin) for name, low, high, origin in each)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True  # in fit and impute
        return tags

    @property
    def _n_features_out(self) -> int:
        return self.n_features_in_

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in super().__getstate__().items() if name != "_kept_engine"}
        if "flow_" in state:  # any machine may read it
            state = state | {"flow_": copy.deepcopy(state["flow_"]).cpu()}
        return state

    def _given(self, names: dict[str, str]) -> dict[str, Any]:
        """The parameters that are not None, by their names in the recipe."""
        values = {name: _plain(getattr(self, ours)) for ours, name in names.items()}
        return {name: value for name, value in values.items() if value is not None}

    def _had(self, name: str) -> Any:
        """A setting of the model that was fitted, as a parameter gives it."""
        value = getattr(self.recipe_.model, name)
        return value[0] if isinstance(value, tuple) and len(value) == 1 else value

    def _fits(self, rows: np.ndarray) -> bool:
        return hasattr(self, "flow_") and self.flow_.dim == rows.shape[1]

    def _check_shares(self) -> None:
        if not (self.contamination == "auto" or _within(self.contamination, 0, 0.5, low_open=True)):
            raise ValueError(f"contamination is 'auto' or in (0, 0.5], got {self.contamination!r}")
        if self.validation_fraction is not None and not _within(self.validation_fraction, 0, 0.9):
            raise ValueError(f"validation_fraction is None or from 0 to 0.9, got {self.validation_fraction!r}")

    def _rows(self, X: ArrayLike) -> np.ndarray:
        check_is_fitted(self)
        options = {"dtype": [np.float64, np.float32], "reset": False, "ensure_all_finite": "allow-nan"}
        return validate_data(self, X, **options)

    def _log_prob(self, rows: np.ndarray) -> np.ndarray:
        nats = self._each("log_prob", rows - self.origin_)
        return np.where(np.isnan(nats) & ~np.isnan(rows).any(1), -np.inf, nats)

    def _each(self, method: str, rows: np.ndarray) -> np.ndarray:
        """What the flow makes of rows; NaN of those that hold NaN."""
        whole = ~np.isnan(rows).any(1)
        found = np.full(rows.shape[:1] if method == "log_prob" else rows.shape, np.nan)
        if whole.any():
            parts = self._engine().each(method, torch.from_numpy(rows[whole]))
            found[whole] = np.concatenate([part.cpu().numpy() for part in parts])
        return found

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
        plain = {name: _plain(value) for name, value in self.get_params().items()}
        return plain if isinstance(plain["random_state"], int) else plain | {"random_state": None}


def _plain(value: Any) -> Any:
    """A number of numpy's as one of Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _within(value: Any, low: float, high: float, *, low_open: bool = False) -> bool:
    if not isinstance(value, int | float | np.number):
        return False
    return bool((low < value if low_open else low <= value) and value <= high)


def _params_of(recipe: Recipe) -> dict[str, Any]:
    """The parameters that a recipe stands for."""
    depths = recipe.model.hidden_layers
    params = {ours: getattr(recipe.model, name) for ours, name in MODEL.items()}
    params |= {ours: getattr(recipe.train, name) for ours, name in TRAIN.items()}
    return params | {"hidden_layers": depths[0] if len(depths) == 1 else list(depths)}
