"""Compare the probabilities of classes: NICE, boosted trees, a forest and logistic regression.

Classes are the last column, or `y` of a .npz file; numbers of many values are cut into terciles.

Example: python -m benchmarks compare classification --data my-tables --out classification.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from benchmarks.compare import Comparison, Figures
from benchmarks.datasets import AS_STORED, TABLES, Table, read_mixed, standardised
from nicest.estimators.predictors import NICEClassifier

CLASSES = 20  # at most; targets of more values are cut into terciles
CATEGORIES = 255  # most categories of a column that boosting accepts
TREES = 300
Method = Callable[[Table, np.ndarray, np.ndarray, int], np.ndarray]  # training rows, their y, test rows, seed -> (N, C)


def trial(method: Method, table: Table, seed: int) -> Mapping[str, Figures]:
    """Return log-loss and accuracy on a fifth of the rows."""
    table = with_classes(table)
    train, test, y, truth = train_test_split(
        table.rows, table.labels, test_size=0.2, stratify=table.labels, random_state=seed
    )
    chance = method(table._replace(rows=train), y, test, seed)
    of_truth = chance[np.arange(len(truth)), truth]
    return {"": {"log-loss": float(-np.log(of_truth).mean()), "accuracy": float((chance.argmax(1) == truth).mean())}}


def with_classes(table: Table) -> Table:
    """Return the table with classes 0, 1, ... as labels: its labels, or its last column, perhaps in terciles."""
    y = table.rows[:, -1] if table.labels is None else table.labels
    if len(np.unique(y)) > CLASSES:
        y = np.digitize(y, np.quantile(y, [1 / 3, 2 / 3]))
    classes = np.unique(y, return_inverse=True)[1]
    if table.labels is not None:
        return table._replace(labels=classes)
    last = len(table.names) - 1
    texts = {i: column for i, column in table.texts.items() if i < last}
    return table._replace(rows=table.rows[:, :-1], names=table.names[:-1], labels=classes, texts=texts)


def nice(train: Table, y: np.ndarray, rows: np.ndarray, seed: int) -> np.ndarray:
    """Predict by `NICEClassifier`, which gets texts as they are."""
    model = NICEClassifier(random_state=seed, device="cpu").fit(train.frame(train.rows), y)
    return model.predict_proba(train.frame(rows))


def boosting(train: Table, y: np.ndarray, rows: np.ndarray, seed: int) -> np.ndarray:
    """Predict by boosted trees that know which columns hold categories."""
    categories = [i for i, column in train.texts.items() if len(column.values) <= CATEGORIES]
    return (
        HistGradientBoostingClassifier(categorical_features=categories, random_state=seed)
        .fit(train.rows, y)
        .predict_proba(rows)
    )


def forest(train: Table, y: np.ndarray, rows: np.ndarray, seed: int) -> np.ndarray:
    """Predict by a forest; one more tree votes for every class alike, so that no probability is 0."""
    known, unseen = dummies(train, rows)
    chance = RandomForestClassifier(TREES, random_state=seed).fit(known, y).predict_proba(unseen)
    return (TREES * chance + 1 / chance.shape[1]) / (TREES + 1)


def logistic(train: Table, y: np.ndarray, rows: np.ndarray, seed: int) -> np.ndarray:
    """Predict by logistic regression of standardised numbers."""
    known, unseen = dummies(train, rows)
    return LogisticRegression(max_iter=2_000).fit(known, y).predict_proba(unseen)


def dummies(train: Table, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return training and test rows with standardised numbers, and a column of 0 and 1 for each category."""

    def coded(rows: np.ndarray) -> np.ndarray:
        columns = [
            rows[:, i, None] == np.arange(len(train.texts[i].values)) if i in train.texts else rows[:, i, None]
            for i in range(rows.shape[1])
        ]
        return np.concatenate(columns, axis=1, dtype=float)

    return standardised(coded(train.rows), coded(rows))


METHODS: dict[str, Method] = {
    "NICEClassifier": nice,
    "boosting": boosting,
    "forest": forest,
    "logistic regression": logistic,
}


def comparison() -> Comparison:
    """Return the comparison."""
    tables, figures = AS_STORED | {"houses": TABLES["houses"]}, {"log-loss": 4, "accuracy": 3, "seconds": 1}
    unit = "Log-loss of the classes of held-out rows, in nats"
    return Comparison("classification", unit, figures, False, tables, METHODS, trial, read=read_mixed)
