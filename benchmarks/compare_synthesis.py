"""Compare synthetic rows by how well trees tell them from real ones: NICE, a mixture, a copula, ctgan.

The metric is the ROC AUC of the trees; 0.5 is perfect. CTGAN and TVAE need the package ctgan.

Example: python -m benchmarks compare synthesis --data my-tables --out synthesis.json
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from scipy import stats
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from benchmarks.compare import Comparison, Figures
from benchmarks.compare_density import best_mixture
from benchmarks.datasets import TABLES, Table, deviations, read_mixed, split, standardised
from nicest.estimators.table import NICETable

Method = Callable[[Table, int, int], np.ndarray]  # training rows, n, seed -> n rows
FOLDS = 5
CATEGORIES = 255  # most categories of a column that the classifier accepts


def trial(method: Method, table: Table, seed: int) -> Mapping[str, Figures]:
    """Return the ROC AUC of real against synthetic rows, and the fraction of rows outside of the training range.

    The real rows are a fifth of the table, which the methods do not see. There are as many synthetic rows.
    """
    train, test = split(table.rows, seed)
    table = table._replace(rows=train)
    drawn = method(table, len(test), seed)
    outside = ((drawn < train.min(0)) | (drawn > train.max(0))).any(1)
    return {"": {"auc": told_apart(test, drawn, table, seed), "outside": float(outside.mean())}}


def told_apart(real: np.ndarray, drawn: np.ndarray, table: Table, seed: int) -> float:
    """Return the cross-validated ROC AUC of boosted trees; at least 0.5, which means no difference."""
    categories = [i for i, column in table.texts.items() if len(column.values) <= CATEGORIES]
    trees = HistGradientBoostingClassifier(categorical_features=categories, random_state=seed)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    is_real = np.arange(len(real) + len(drawn)) < len(real)
    chance = cross_val_predict(trees, np.concatenate([real, drawn]), is_real, cv=folds, method="predict_proba")
    return max(0.5, float(roc_auc_score(is_real, chance[:, 1])))


def snapped(drawn: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Round the columns that hold whole numbers in training, and clip them to the range of training."""
    whole = (train == train.round()).all(0)
    return np.where(whole, drawn.round().clip(train.min(0), train.max(0)), drawn)


def nice(table: Table, n: int, seed: int) -> np.ndarray:
    """Draw from `NICETable`."""
    model = NICETable(random_state=seed, device="cpu").fit(table.frame(table.rows))
    return table.numbers(model.sample(n, random_state=seed))


def mixture(table: Table, n: int, seed: int) -> np.ndarray:
    """Draw from Gaussians of standardised numbers, in which categories are numbered alphabetically."""
    train = table.rows
    fitted = best_mixture(standardised(train, train)[0], seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nearly singular covariances
        drawn, _ = fitted.sample(n)
    return snapped(np.random.default_rng(seed).permutation(drawn) * deviations(train) + train.mean(0), train)


def copula(table: Table, n: int, seed: int) -> np.ndarray:
    """Draw normal scores with the correlations of training, and take values of training with the same ranks."""
    train, rng = table.rows, np.random.default_rng(seed)
    correlation = np.corrcoef(stats.norm.ppf(stats.rankdata(train, axis=0) / (len(train) + 1)).T)
    ranks = stats.norm.cdf(rng.multivariate_normal(np.zeros(train.shape[1]), np.atleast_2d(correlation), n))
    pairs = zip(train.T, ranks.T, strict=True)
    return np.column_stack([np.quantile(column, each, method="inverted_cdf") for column, each in pairs])


def of_ctgan(kind: str, table: Table, n: int, seed: int) -> np.ndarray:
    """Draw from a model of the package ctgan with default settings; whole numbers are rounded."""
    import ctgan
    import pandas  # type: ignore[import-untyped]

    names = list(table.names)
    model = getattr(ctgan, kind)(enable_gpu=False)
    model.set_random_state(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(pandas.DataFrame(table.rows, columns=names), [names[i] for i in table.texts])
        return snapped(model.sample(n)[names].to_numpy(np.float64), table.rows)


def real(table: Table, n: int, seed: int) -> np.ndarray:
    """Return training rows, which no method can beat."""
    return table.rows[np.random.default_rng(seed).choice(len(table.rows), n, replace=False)]


METHODS: dict[str, Method] = {
    "NICETable": nice,
    "mixture": mixture,
    "copula": copula,
    "CTGAN": partial(of_ctgan, "CTGAN"),
    "TVAE": partial(of_ctgan, "TVAE"),
    "training rows": real,
}


def comparison() -> Comparison:
    """Return the comparison."""
    unit = "ROC AUC of boosted trees that tell held-out rows from synthetic ones, 0.5 if they cannot"
    figures, needs = {"auc": 3, "outside": 3, "seconds": 1}, dict.fromkeys(["CTGAN", "TVAE"], "ctgan")
    return Comparison("synthesis", unit, figures, False, TABLES, METHODS, trial, needs, read=read_mixed)
