"""Compare imputation: NICE, column means, nearest neighbours, chained regressions and chained forests."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.compare import Comparison, Figures
from benchmarks.datasets import AS_STORED, Table
from nicest.data.cells import codes_of
from nicest.data.columns import Column
from nicest.estimator import NICE, decoded
from nicest.tasks.impute_table import draw_hidden

HIDDEN = 0.2  # fraction of the test cells that are hidden, completely at random
TEST = 0.2  # fraction of the rows in the test set
INTERVAL = 0.9
POSTERIOR_DRAWS = 20  # per cell, of the chained regressions
ASCENT = 500  # steps from the likeliest draw to the mode
TREES, ROUNDS = 50, 5  # of the chained forests
DATASETS = 5  # imputed tables of miceforest, which are averaged


class Guess(NamedTuple):
    """Imputed test rows, the ends of their intervals if the method has some, and further metrics."""

    values: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    about: Mapping[str, float] = MappingProxyType({})


Method = Callable[[np.ndarray, np.ndarray, int], Mapping[str, Guess]]  # training rows, rows with NaN, seed


def trial(method: Method, table: Table, seed: int, *, holes: bool) -> Mapping[str, Figures]:
    """Return the error of a fifth of the cells in a fifth of the rows; with `holes`, also in training."""
    rng = np.random.default_rng(seed)
    test, fitted = np.split(rng.permutation(len(table.rows)), [round(TEST * len(table.rows))])
    train_rows, truth = table.rows[fitted], table.rows[test]
    missing = rng.random(truth.shape) < HIDDEN
    spread = train_rows.std(0)
    scale = np.full(len(spread), train_rows.std()) if table.one_unit else np.where(spread > 0, spread, 1)
    if holes:
        train_rows = np.where(rng.random(train_rows.shape) < HIDDEN, np.nan, train_rows)
    guesses = method(train_rows, np.where(missing, np.nan, truth), seed)
    return {name: {**measures(guess, truth, missing, scale), **guess.about} for name, guess in guesses.items()}


def measures(guess: Guess, truth: np.ndarray, missing: np.ndarray, scale: np.ndarray) -> Figures:
    """Return the error of the hidden cells in units of `scale`, and the coverage and width of the intervals."""
    error = ((guess.values - truth) / scale)[missing]
    found = {"rmse": float(np.sqrt(np.mean(error**2)))}
    if guess.low is not None and guess.high is not None:
        inside = (guess.low <= truth) & (truth <= guess.high)
        found["coverage"] = float(inside[missing].mean())
        found["width"] = float(((guess.high - guess.low) / scale)[missing].mean())
    return found


def nice(train_rows: np.ndarray, rows: np.ndarray, seed: int) -> Mapping[str, Guess]:
    """Impute with `nicest.NICE`: the mean of the draws and their interval, the mode, and diagnostics of the chains.

    A value of a discrete column that is not in the training rows counts as missing.
    """
    began = time.perf_counter()
    model = NICE(discrete="values", random_state=seed).fit(train_rows)
    about = {"fit_seconds": time.perf_counter() - began}
    codes = encoded_cells(rows, model.columns_)
    imputed = draw_hidden(model.flow_, codes, np.isnan(codes), model.columns_, seed=seed, ascent=ASCENT)
    about |= {"acceptance": float(imputed.acceptance.mean()), "rows_not_mixed": int((~imputed.mixed).sum())}
    draws, mode = imputed.draws.numpy(), imputed.mode.numpy()
    draws, (mode,) = (np.stack([decoded(each, model.columns_) for each in some]) for some in (draws, [mode]))
    draws, mode = (np.where(np.isnan(rows), each, rows) for each in (draws, mode))
    low, high = ends(draws)
    return {"": Guess(draws.mean(0), low, high, about), "mode": Guess(mode, about=about)}


def encoded_cells(rows: np.ndarray, columns: Sequence[Column]) -> np.ndarray:
    """Encode cells as the model does; missing and unknown cells are NaN."""
    pairs = [codes_of(cells, column) for cells, column in zip(rows.T, columns, strict=True)]
    return np.column_stack([np.where(new, np.nan, codes) for codes, new in pairs])


def ends(draws: np.ndarray) -> np.ndarray:
    """Return the interval of draws (n, ...) as (2, ...), by quantiles whose coverage is exact for few draws."""
    return np.asarray(np.quantile(draws, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], axis=0, method="weibull"))


def of_sklearn(kind: str, train_rows: np.ndarray, rows: np.ndarray, seed: int, **options: Any) -> Mapping[str, Guess]:
    """Fit an imputer of scikit-learn to the standardised training rows."""
    from sklearn import impute
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train_rows)
    imputer = getattr(impute, kind)(**options, keep_empty_features=True).fit(scaler.transform(train_rows))
    return {"": Guess(scaler.inverse_transform(imputer.transform(scaler.transform(rows))))}


def chained(
    train_rows: np.ndarray, rows: np.ndarray, seed: int, *, draws: int = 1, trees: int = 0
) -> Mapping[str, Guess]:
    """Impute with chained regressions, or with forests of `trees` trees as missForest does.

    Several draws give an interval. The model is fitted to training and test rows together: on complete rows it would
    stop after one round.
    """
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train_rows)
    known, unknown = scaler.transform(train_rows), scaler.transform(rows)
    forest = RandomForestRegressor(trees, max_features="sqrt", random_state=seed) if trees else None
    how = {"max_iter": ROUNDS} if trees else {"sample_posterior": draws > 1}
    imputer = IterativeImputer(forest, random_state=seed, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged
        imputer.fit(np.concatenate([known, unknown]))
        found = np.stack([scaler.inverse_transform(imputer.transform(unknown)) for _ in range(draws)])
    return {"": Guess(found.mean(0), *(ends(found) if draws > 1 else ()))}


def miceforest(train_rows: np.ndarray, rows: np.ndarray, seed: int) -> Mapping[str, Guess]:
    """Return the mean of the tables that miceforest imputes, for training and test rows together."""
    import pandas  # type: ignore[import-untyped]
    from miceforest import ImputationKernel

    table = pandas.DataFrame(np.concatenate([train_rows, rows])).rename(columns=str)
    kernel = ImputationKernel(table, num_datasets=DATASETS, random_state=seed)
    kernel.mice(ROUNDS, num_threads=1)
    found = [kernel.complete_data(i).to_numpy()[len(train_rows) :] for i in range(DATASETS)]
    return {"": Guess(np.mean(found, axis=0))}


METHODS: dict[str, Method] = {
    "column mean": partial(of_sklearn, "SimpleImputer"),
    "KNN": partial(of_sklearn, "KNNImputer"),
    "iterative": chained,
    "iterative, draws": partial(chained, draws=POSTERIOR_DRAWS),
    "missForest": partial(chained, trees=TREES),
    "miceforest": miceforest,
    "NICE": nice,
}
ABSENT = {} if find_spec("miceforest") else {"miceforest": "it is not installed: pip install miceforest"}


def imputation(*, holes: bool = False) -> Comparison:
    """Return the comparison; with `holes`, cells of the training rows are missing, too."""
    return Comparison(
        name="imputation",
        unit="Root mean square error of hidden cells, in standard deviations of their columns",
        figures={"rmse": 3, "coverage": 2, "width": 2, "seconds": 1},
        highest=False,
        tables=AS_STORED,
        methods={name: method for name, method in METHODS.items() if name not in ABSENT},
        trial=partial(trial, holes=holes),
        absent=ABSENT,
        about={"hidden": HIDDEN, "holes_in_training": holes, "interval": INTERVAL},
    )
