"""Compare outlier detection by ROC AUC: NICE, KNN, LOF, IsolationForest and a mixture.

Every method is trained on half of the inliers. Your tables hold labels: `y` in a .npz file, or a column `outlier` or
`y`; 1 is an outlier.

Example: python -m benchmarks compare outliers wine moons
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import LocalOutlierFactor, NearestNeighbors

from benchmarks.compare import Comparison, Figures
from benchmarks.compare_density import Method, mixture, nice, nice_table
from benchmarks.datasets import TABLES, Generator, Read, Table, standardised
from nicest.errors import NicestError
from nicest.messages import shown
from nicest.tasks.score import CAVEAT

LABELS = ("outlier", "y")  # columns that may hold the labels


def trial(method: Method, table: Table, seed: int) -> Mapping[str, Figures]:
    """Return the ROC AUC of all outliers and half of the inliers, after training on the other half."""
    rows, is_outlier = labelled(table)
    held, train = np.array_split(np.random.default_rng(seed).permutation(rows[~is_outlier]), 2)
    test = np.concatenate([held, rows[is_outlier]])
    return {"": {"auc": area(np.arange(len(test)) < len(held), method(train, test, seed))}}


def labelled(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and which are outliers, by the labels of the table or its column `outlier` or `y`."""
    rows, labels = table.rows, table.labels
    if labels is None:
        own = [name for name in LABELS if name in table.names]
        if not own:
            raise NicestError(f"expected labels y in a .npz file, or a column {' or '.join(LABELS)}: 1 for outliers")
        place = table.names.index(own[0])
        rows, labels = np.delete(rows, place, axis=1), rows[:, place]
    if set(np.unique(labels)) != {0, 1}:
        raise NicestError(f"expected labels 0 (inlier) and 1 (outlier), got {shown(np.unique(labels)[:5].tolist())}")
    return rows, labels == 1


def area(is_inlier: np.ndarray, scores: np.ndarray) -> float:
    """Return the probability that an inlier scores above an outlier; ties count half, and scores may be -inf."""
    return float(roc_auc_score(is_inlier, np.maximum(scores, -1e300)))


def detector(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """Score by `NICEDetector`."""
    from nicest.estimators.detector import NICEDetector

    return np.asarray(NICEDetector(random_state=seed, device="cpu").fit(train).score_samples(test))


def neighbours(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """Score by the distance to the fifth nearest training row."""
    train, test = standardised(train, test)
    return -NearestNeighbors(n_neighbors=min(5, len(train))).fit(train).kneighbors(test)[0][:, -1]


def local_outlier_factor(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """Score by the local outlier factor of 20 neighbours."""
    train, test = standardised(train, test)
    return LocalOutlierFactor(n_neighbors=min(20, len(train) - 1), novelty=True).fit(train).score_samples(test)


def isolation_forest(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """Score by an isolation forest."""
    return IsolationForest(random_state=seed).fit(train).score_samples(test)


def _against(inliers: np.ndarray, outliers: np.ndarray) -> Table:
    return Table(np.concatenate([inliers, outliers]), labels=np.repeat([0, 1], [len(inliers), len(outliers)]))


def _class(table: str, outlying: int, rng: Generator) -> Table:
    """Return a table of scikit-learn with one class as the outliers."""
    found = TABLES[table](rng)
    return found._replace(labels=np.asarray(found.labels == outlying, dtype=int))


def _scattered(inliers: np.ndarray, rng: Generator) -> Table:
    """Add 300 outliers, uniform in the bounding box of the inliers; some fall among them."""
    return _against(inliers, rng.uniform(inliers.min(0), inliers.max(0), (300, inliers.shape[1])))


def _moons(rng: Generator) -> Table:
    return _scattered(TABLES["moons"](rng).rows, rng)


def _copula(rng: Generator) -> Table:
    """Return outliers whose columns were shuffled independently: the marginals remain, the dependence is gone."""
    x = TABLES["copula"](rng).rows
    inliers, others = np.split(x, [len(x) * 3 // 4])
    return _against(inliers, rng.permuted(others, axis=0))


def _inside(rng: Generator) -> Table:
    """Return a Gaussian in 20 columns, and outliers at half its radius, where the density is higher."""
    return _against(rng.normal(size=(900, 20)), rng.normal(size=(300, 20)) / 2)


SETS: dict[str, Read] = {
    "iris": partial(_class, "iris", 2),
    "wine": partial(_class, "wine", 2),
    "breast_cancer": partial(_class, "breast_cancer", 0),
    "digits": partial(_class, "digits", 8),
    "moons": _moons,
    "copula": _copula,
    "inside": _inside,
}
METHODS: dict[str, Method] = {  # scores are high for inliers
    "NICEDetector": detector,
    "NICETable": partial(nice_table, discrete="values"),
    "NICE": nice,
    "KNN": neighbours,
    "LOF": local_outlier_factor,
    "IsolationForest": isolation_forest,
    "mixture": mixture,
}


def comparison() -> Comparison:
    """Return the comparison."""
    unit, about = "ROC AUC of the held-out half of the inliers and all outliers", {"caveat": CAVEAT}
    return Comparison("outliers", unit, {"auc": 3, "seconds": 1}, True, SETS, METHODS, trial, about=about)
