"""Rows that do not belong: NICE beside scikit-learn's detectors, all trained on inliers alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import LocalOutlierFactor
from sklearn.svm import OneClassSVM

from nicest.errors import NicestError
from nicest.files import to_json, write_text
from nicest.inference.engine import Engine
from nicest.progress import track
from nicest.runs.runtime import choose_device, environment
from nicest.studies.compare import CLASSICAL
from nicest.studies.datasets import TABLES, Generator
from nicest.tasks.score import CAVEAT
from nicest.train.fit_table import fit_table

Sides = tuple[np.ndarray, np.ndarray]
Scores = dict[str, np.ndarray]
Detector = Callable[[np.ndarray, np.ndarray, int], Scores]
TEST = 3  # one inlier in so many is kept from training
DENSITY, TYPICALITY = "NICE, density", "NICE, typicality"


def compare_outliers(*, tables: tuple[str, ...] = (), seeds: int = 3, out: str | Path | None = None) -> dict[str, Any]:
    """ROC AUC of held-out inliers against outliers that no method has seen, for each table, method and seed.

    Every method gets columns standardised by the training rows, which are inliers, and is told nothing of outliers.
    """
    for name in tables:
        if name not in SETS:
            raise NicestError(f"no table {name!r}; there are {', '.join(SETS)}")
    cases = [(table, detector) for table in tables or SETS for detector in DETECTORS]
    rows = [row for case in track(cases, "comparing", len(cases)) for row in _case(*case, seeds)]
    result = environment(choose_device("cpu")) | {"unit": "ROC AUC", "seeds": seeds, "caveat": CAVEAT, "rows": rows}
    if out is not None:
        write_text(Path(out), to_json(result))
    return result


def _case(table: str, detector: Detector, seeds: int) -> list[dict[str, Any]]:
    """A record for every score of one detector."""
    areas: dict[str, list[float]] = {}
    began = time.perf_counter()
    for seed in range(seeds):
        train, test, is_inlier = standardised_sides(table, seed)
        for name, scores in detector(train, test, seed).items():
            areas.setdefault(name, []).append(area(is_inlier, scores))
    about = {"table": table, "train": len(train), "inliers": int(is_inlier.sum()), "outliers": int((~is_inlier).sum())}
    about |= {"dim": train.shape[1], "seconds": (time.perf_counter() - began) / seeds}
    return [
        {**about, "method": name, "mean_auc": float(np.mean(each)), "sd_auc": float(np.std(each)), "auc": each}
        for name, each in areas.items()
    ]


def standardised_sides(table: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Training rows, test rows, and which of the latter are inliers; standardised by the former."""
    rng = np.random.default_rng(seed)
    inliers, outliers = SETS[table](rng)
    held, train = np.split(inliers[rng.permutation(len(inliers))], [len(inliers) // TEST])
    mean, spread = train.mean(0), train.std(0)
    test = np.concatenate([held, outliers])
    return (train - mean) / spread, (test - mean) / spread, np.arange(len(test)) < len(held)


def area(is_inlier: np.ndarray, scores: np.ndarray) -> float:
    """The chance that an inlier scores above an outlier, ties counted half; scores may be -inf."""
    return float(roc_auc_score(is_inlier, np.maximum(scores, -1e300)))


def typicality(nats: np.ndarray, train_nats: np.ndarray) -> np.ndarray:
    """-|log p(x) - median of training rows|, as `nicest.NICE.typicality` has it."""
    return -np.abs(nats - np.median(train_nats))


def _nice(train: np.ndarray, test: np.ndarray, seed: int) -> Scores:
    """What nicest.NICE(random_state) does, with its defaults."""
    engine = Engine(fit_table(train, seed=seed).flow)
    nats, train_nats = (engine.log_prob(torch.from_numpy(each)).numpy() for each in (test, train))
    nats = np.where(np.isnan(nats), -np.inf, nats)  # so far off that there is no number for it
    return {DENSITY: nats, TYPICALITY: typicality(nats, train_nats)}


def _forest(train: np.ndarray, test: np.ndarray, seed: int) -> Scores:
    return {"IsolationForest": IsolationForest(random_state=seed).fit(train).score_samples(test)}


def _neighbours(train: np.ndarray, test: np.ndarray, seed: int) -> Scores:
    return {"LocalOutlierFactor": LocalOutlierFactor(novelty=True).fit(train).score_samples(test)}


def _one_class(train: np.ndarray, test: np.ndarray, seed: int) -> Scores:
    return {"OneClassSVM": OneClassSVM().fit(train).score_samples(test)}


def _mixture(train: np.ndarray, test: np.ndarray, seed: int) -> Scores:
    return {"GaussianMixture": CLASSICAL["mixture"](train, test, seed)}


DETECTORS: tuple[Detector, ...] = (_nice, _forest, _neighbours, _one_class, _mixture)


def _classes(table: str, outlying: int) -> Callable[[Generator], Sides]:
    """One class of a table of scikit-learn against the others."""

    def sides(rng: Generator) -> Sides:
        x, target = TABLES[table](rng), getattr(datasets, f"load_{table}")().target
        return x[target != outlying], x[target == outlying]

    return sides


def _scattered(inliers: np.ndarray, n: int, rng: Generator) -> np.ndarray:
    """Rows drawn evenly from the box of the inliers; some fall among them."""
    return rng.uniform(inliers.min(0), inliers.max(0), (n, inliers.shape[1]))


def _moons(rng: Generator) -> Sides:
    x = TABLES["moons"](rng)
    return x, _scattered(x, 300, rng)


def _blobs(rng: Generator) -> Sides:
    """Three round Gaussians in five columns."""
    x, _ = datasets.make_blobs(900, n_features=5, centers=3, random_state=int(rng.integers(1 << 31)))
    return x, _scattered(x, 300, rng)


def _copula(rng: Generator) -> Sides:
    """Outliers whose columns were shuffled one by one: each is as it should be, their dependence is gone."""
    x = TABLES["copula"](rng)
    inliers, others = np.split(x, [len(x) * 3 // 4])
    return inliers, rng.permuted(others, axis=0)


def _inside(rng: Generator) -> Sides:
    """A Gaussian in 20 columns, and outliers at half its radius: denser than any inlier."""
    return rng.normal(size=(900, 20)), rng.normal(size=(300, 20)) / 2


SETS: dict[str, Callable[[Generator], Sides]] = {
    "iris": _classes("iris", 2),
    "wine": _classes("wine", 2),
    "breast_cancer": _classes("breast_cancer", 0),
    "digits": _classes("digits", 8),
    "moons": _moons,
    "blobs": _blobs,
    "copula": _copula,
    "inside": _inside,
}


def markdown(result: dict[str, Any]) -> str:
    """The table of a comparison: the best of each row in bold."""
    methods = list(dict.fromkeys(row["method"] for row in result["rows"]))
    lines = [f"| table | inliers + outliers, columns | {' | '.join(methods)} |", "|---" * (len(methods) + 2) + "|"]
    for table, found in by_table(result).items():
        best = _best(found)
        cells = [_cell(row, f"{row['mean_auc']:.3f}" == best) for row in found.values()]
        first = next(iter(found.values()))
        size = f"{first['train'] + first['inliers']} + {first['outliers']}, {first['dim']}"
        lines.append(f"| {table} | {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_table(result: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """The records by table and method."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault(row["table"], {})[row["method"]] = row
    return found


def verdict(result: dict[str, Any]) -> str:
    """On how many tables each score of NICE is the best, and where it is not."""
    tables = by_table(result)
    lines = []
    for name in (DENSITY, TYPICALITY):
        behind = [table for table, found in tables.items() if f"{found[name]['mean_auc']:.3f}" != _best(found)]
        where = f"; not on {', '.join(behind)}" if behind else ""
        lines.append(f"{name}: the best on {len(tables) - len(behind)} of {len(tables)} tables{where}.")
    return "\n".join(lines)


def _best(found: dict[str, dict[str, Any]]) -> str:
    """The best mean as it is printed: what cannot be told apart there is a tie."""
    return f"{max(row['mean_auc'] for row in found.values()):.3f}"


def _cell(row: dict[str, Any], best: bool) -> str:
    mean = f"{row['mean_auc']:.3f}"
    return f"{f'**{mean}**' if best else mean} ± {row['sd_auc']:.3f}"
