"""Compare imputation errors: NICE, column means, KNN, chained regressions and forests.

Cells are hidden at random in a fifth of the rows.

Example: python -m benchmarks compare imputation wine --seeds 1 --holes --hidden 0.5
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.compare import Comparison, Figures
from benchmarks.datasets import AS_STORED, Table, deviations, split
from nicest.estimators.table import NICETable
from nicest.tables.marginal import Marginal
from nicest.tasks import options

INTERVAL = 0.9
DRAWS = 20  # of the chained regressions
TREES, ROUNDS = 50, 5  # of the chained forests
DATASETS = 5  # imputed tables of miceforest, which are averaged
TIMED = 400  # rows


class Guess(NamedTuple):
    """Imputed rows (N, D), and if the method has them, the ends of intervals (2, N, D) and the CRPS of the truth."""

    values: np.ndarray
    ends: Callable[[], np.ndarray] | None = None
    crps: Callable[[np.ndarray], np.ndarray] | None = None


Impute = Callable[[np.ndarray], Guess]  # rows with NaN
Method = Callable[[np.ndarray, np.ndarray, int], Impute]  # training rows, rows with NaN, seed


def trial(method: Method, table: Table, seed: int, *, holes: bool, hidden: float) -> Mapping[str, Figures]:
    """Return the error of hidden cells in a fifth of the rows, and the seconds that 400 rows take after the fit.

    With `holes`, the same fraction of the training cells is missing.
    """
    rng = np.random.default_rng(seed)
    train, truth = split(table.rows, seed)
    missing = rng.random(truth.shape) < hidden
    scale = np.full(train.shape[1], train.std()) if table.one_unit else deviations(train)
    if holes:
        train = np.where(rng.random(train.shape) < hidden, np.nan, train)
    holed = np.where(missing, np.nan, truth)
    impute = method(train, holed, seed)
    guess = impute(holed)
    began = time.perf_counter()
    impute(np.resize(holed, (TIMED, holed.shape[1])))
    return {"": measures(guess, truth, missing, scale) | {f"seconds of {TIMED}": time.perf_counter() - began}}


def measures(guess: Guess, truth: np.ndarray, missing: np.ndarray, scale: np.ndarray) -> Figures:
    """Return the error of the hidden cells in units of `scale`, their CRPS, and the coverage of the intervals."""
    error = ((guess.values - truth) / scale)[missing]
    found = {"rmse": float(np.sqrt(np.mean(error**2)))}
    if guess.ends and guess.crps:
        low, high = guess.ends()
        found["crps"] = float((guess.crps(truth) / scale)[missing].mean())
        found["coverage"] = float(((low <= truth) & (truth <= high))[missing].mean())
        found["width"] = float(((high - low) / scale)[missing].mean())
    return found


def nice(train: np.ndarray, rows: np.ndarray, seed: int) -> Impute:
    """Impute by `NICETable`: the mean of every hidden cell, by one pass."""
    model = NICETable(random_state=seed, device="cpu").fit(train)

    def impute(rows: np.ndarray) -> Guess:
        found = model.table_.missing(model.schema_.encode(rows, unseen="missing"))

        def filled(result: Callable[[Marginal, np.ndarray], np.ndarray], known: np.ndarray = rows) -> np.ndarray:
            cells = known.copy()
            for i, marginal, missing in found:
                cells[missing, i] = result(marginal, known[missing, i])
            return cells

        def ends() -> np.ndarray:
            low = filled(lambda each, _: each.quantile((1 - INTERVAL) / 2))
            return np.stack([low, filled(lambda each, _: each.quantile((1 + INTERVAL) / 2))])

        return Guess(filled(lambda each, _: each.mean()), ends, partial(filled, Marginal.crps))

    return impute


def ends(draws: np.ndarray) -> np.ndarray:
    """Return the interval of draws (n, ...) as (2, ...), by quantiles whose coverage is exact for few draws."""
    return np.asarray(np.quantile(draws, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], axis=0, method="weibull"))


def crps_of(draws: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the CRPS of draws (n, ...), E|X - y| - E|X - X'| / 2, without bias for few draws."""
    n = len(draws)
    ranks = (2 * np.arange(1, n + 1) - n - 1).reshape(-1, *[1] * truth.ndim)
    pairs = (ranks * np.sort(draws, 0)).sum(0) / (n * (n - 1))
    return np.asarray(np.abs(draws - truth).mean(0) - pairs)


def of_sklearn(kind: str, train: np.ndarray, rows: np.ndarray, seed: int, **options: Any) -> Impute:
    """Fit an imputer of scikit-learn to the standardised training rows."""
    from sklearn import impute
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train)
    imputer = getattr(impute, kind)(**options, keep_empty_features=True).fit(scaler.transform(train))
    return lambda rows: Guess(scaler.inverse_transform(imputer.transform(scaler.transform(rows))))


def chained(train: np.ndarray, rows: np.ndarray, seed: int, *, draws: int = 1, trees: int = 0) -> Impute:
    """Impute with chained regressions, or with forests of `trees` trees as missForest does.

    Several draws give an interval. The model is fitted to training and test rows together: on complete rows it would
    stop after one round.
    """
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train)
    forest = RandomForestRegressor(trees, max_features="sqrt", random_state=seed) if trees else None
    how = {"max_iter": ROUNDS} if trees else {"sample_posterior": draws > 1}
    imputer = IterativeImputer(forest, random_state=seed, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged
        imputer.fit(scaler.transform(np.concatenate([train, rows])))

    def impute(rows: np.ndarray) -> Guess:
        found = np.stack([scaler.inverse_transform(imputer.transform(scaler.transform(rows))) for _ in range(draws)])
        return Guess(found.mean(0), partial(ends, found), partial(crps_of, found)) if draws > 1 else Guess(found[0])

    return impute


def miceforest(train: np.ndarray, rows: np.ndarray, seed: int) -> Impute:
    """Return the mean of the tables that miceforest imputes."""
    import pandas  # type: ignore[import-untyped]
    from miceforest import ImputationKernel

    table = pandas.DataFrame(np.concatenate([train, rows])).rename(columns=str)
    kernel = ImputationKernel(table, num_datasets=DATASETS, random_state=seed)
    kernel.mice(ROUNDS, num_threads=1)

    def impute(rows: np.ndarray) -> Guess:
        found = kernel.impute_new_data(pandas.DataFrame(rows).rename(columns=str))
        return Guess(np.mean([found.complete_data(i).to_numpy() for i in range(DATASETS)], axis=0))

    return impute


METHODS: dict[str, Method] = {
    "NICETable": nice,
    "column mean": partial(of_sklearn, "SimpleImputer"),
    "KNN": partial(of_sklearn, "KNNImputer"),
    "iterative": chained,
    "iterative, draws": partial(chained, draws=DRAWS),
    "missForest": partial(chained, trees=TREES),
    "miceforest": miceforest,
}


def comparison(
    holes: Annotated[bool, typer.Option("--holes", help="Remove cells from the training rows, too.")] = False,
    hidden: Annotated[float, options.real(0, 1, "Fraction of the cells that is hidden.")] = 0.2,
) -> Comparison:
    """Return the comparison: a fraction of the test cells is hidden, with `holes` also of the training cells."""
    unit = "Root mean square error of hidden cells, in standard deviations of their columns"
    figures = {"rmse": 3, "crps": 3, "coverage": 2, "width": 2, "seconds": 1, f"seconds of {TIMED}": 2}
    about = {"hidden": hidden, "holes_in_training": holes, "interval": INTERVAL}
    run, needs = partial(trial, holes=holes, hidden=hidden), {"miceforest": "miceforest"}
    return Comparison("imputation", unit, figures, False, AS_STORED, METHODS, run, needs, about)
