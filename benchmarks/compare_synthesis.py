"""Compare synthetic rows by a classifier: NICE, mixtures, a copula, and the models of ctgan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from benchmarks.compare import Comparison, Figures
from benchmarks.compare_density import TEST, best_mixture, standardised
from benchmarks.datasets import TABLES, Table, read_mixed
from nicest.data import copula
from nicest.data.columns import Column
from nicest.estimator import columns_of, encoded
from nicest.inference.engine import Engine
from nicest.train.fit_table import fit_table

Method = Callable[[np.ndarray, Sequence[Column], int, int], np.ndarray]  # training rows, columns, n, seed -> n rows
FOLDS = 5
CATEGORIES = 255  # most categories of a column that the classifier accepts


def trial(method: Method, table: Table, seed: int) -> Mapping[str, Figures]:
    """Return the ROC AUC of real against synthetic rows, and the fraction of rows outside of the training range.

    The real rows are a fifth of the table, which the methods do not see. There are as many synthetic rows.
    """
    rows, columns = numbers(table)
    test, train = np.split(np.random.default_rng(seed).permutation(rows), [len(rows) // TEST])
    drawn = method(train, columns, len(test), seed)
    outside = ((drawn < train.min(0)) | (drawn > train.max(0))).any(1)
    return {"": {"auc": told_apart(test, drawn, columns, seed), "outside": float(outside.mean())}}


def numbers(table: Table) -> tuple[np.ndarray, tuple[Column, ...]]:
    """Encode all cells of a table as numbers; return them with the columns."""
    if table.columns:
        return table.rows, table.columns
    dim = table.rows.shape[1]
    columns = columns_of(table.rows, table.names or [f"x{i}" for i in range(dim)], [True] * dim, by_values=True)
    return encoded(table.rows, columns)[0].astype(np.float32), columns


def told_apart(real: np.ndarray, drawn: np.ndarray, columns: Sequence[Column], seed: int) -> float:
    """Return the cross-validated ROC AUC of boosted trees; at least 0.5, which means no difference."""
    categories = [bool(column.values) and len(column.values) <= CATEGORIES for column in columns]
    trees = HistGradientBoostingClassifier(categorical_features=categories, random_state=seed)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    is_real = np.arange(len(real) + len(drawn)) < len(real)
    said = cross_val_predict(trees, np.concatenate([real, drawn]), is_real, cv=folds, method="predict_proba")
    return max(0.5, float(roc_auc_score(is_real, said[:, 1])))


def snapped(drawn: np.ndarray, columns: Sequence[Column]) -> np.ndarray:
    """Round discrete cells, and clip them to the range of training."""
    ends = np.array([column.most if column.discrete else np.inf for column in columns])
    discrete = np.isfinite(ends)
    return np.where(discrete, drawn.round().clip(0, ends), drawn).astype(np.float32)


def nice(train: np.ndarray, columns: Sequence[Column], n: int, seed: int) -> np.ndarray:
    flow = fit_table(train, seed=seed, columns=columns).flow
    drawn = Engine(flow).sample(n, generator=torch.Generator(flow.device).manual_seed(seed))
    return snapped(drawn.cpu().numpy(), columns)


def mixture(train: np.ndarray, columns: Sequence[Column], n: int, seed: int) -> np.ndarray:
    """Draw from Gaussians of standardised numbers, in which categories are numbered alphabetically."""
    mean, spread = train.mean(0), np.where(train.std(0) > 0, train.std(0), 1)
    fitted = best_mixture(standardised(train, train)[0], seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nearly singular covariances
        drawn, _ = fitted.sample(n)
    return snapped(np.random.default_rng(seed).permutation(drawn) * spread + mean, columns)


def gaussian_copula(train: np.ndarray, columns: Sequence[Column], n: int, seed: int) -> np.ndarray:
    """Draw from the normal scores of the columns with their correlations; always the same rows."""
    return copula.fill(train, np.full((n, len(columns)), np.nan, np.float32), np.array([c.discrete for c in columns]))


def of_ctgan(kind: str, train: np.ndarray, columns: Sequence[Column], n: int, seed: int) -> np.ndarray:
    """Draw from a model of the package ctgan with default settings; discrete numbers are rounded."""
    import ctgan
    import pandas  # type: ignore[import-untyped]

    names = [str(i) for i in range(len(columns))]
    model = getattr(ctgan, kind)(enable_gpu=False)
    model.set_random_state(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = pandas.DataFrame(train.astype(np.float64), columns=names)
        model.fit(table, [name for name, column in zip(names, columns, strict=True) if column.values])
        return snapped(model.sample(n)[names].to_numpy(np.float64), columns)


def real(train: np.ndarray, columns: Sequence[Column], n: int, seed: int) -> np.ndarray:
    """Return training rows, which no method can beat."""
    return train[np.random.default_rng(seed).choice(len(train), n, replace=False)]


METHODS: dict[str, Method] = {
    "NICE": nice,
    "mixture": mixture,
    "copula": gaussian_copula,
    "CTGAN": partial(of_ctgan, "CTGAN"),
    "TVAE": partial(of_ctgan, "TVAE"),
    "training rows": real,
}
ABSENT = {} if find_spec("ctgan") else dict.fromkeys(["CTGAN", "TVAE"], "ctgan is not installed: pip install ctgan")
COMPARISON = Comparison(
    name="synthesis",
    unit="ROC AUC of boosted trees that tell held-out rows from synthetic ones, 0.5 if they cannot",
    figures={"auc": 3, "outside": 3, "seconds": 1},
    highest=False,
    tables=TABLES,
    methods={name: method for name, method in METHODS.items() if name not in ABSENT},
    trial=trial,
    absent=ABSENT,
    read=read_mixed,
)
