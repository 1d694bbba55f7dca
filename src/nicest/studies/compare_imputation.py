"""Missing cells of real tables: NICE beside column means, nearest neighbours and chained regressions."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nicest import __version__
from nicest.errors import NicestError
from nicest.files import to_json, write_text
from nicest.flows import Flow
from nicest.inference.impute import Imputed, impute_rows
from nicest.progress import track
from nicest.runs.runtime import describe_device
from nicest.train.fit_table import fit_table

SETS = ("breast_cancer", "wine", "diabetes", "digits")
SEEDS = (0, 1, 2)
HIDDEN = 0.2  # share of the test cells that is hidden, completely at random
TEST = 0.2  # share of the rows that is tested
INTERVAL = 0.9
POSTERIOR_DRAWS = 20  # of the chained regressions
FEW = 20  # distinct whole numbers at most: such a column is of levels, and gets noise (NICE §5.1)


class Guess(NamedTuple):
    """What a method says of the test rows: one table, and where it knows them the ends of the intervals."""

    values: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def fit_flow(rows: np.ndarray, seed: int) -> Flow:
    """What `nicest.NICE` fits to rows (N, D); a level x of a column of few whole numbers is the interval [x, x + 1)."""
    noise = few_levels(rows) * np.random.default_rng(seed).random(rows.shape)
    return fit_table(rows + noise, seed=seed).flow


def few_levels(rows: np.ndarray) -> np.ndarray:
    """Which columns hold few distinct whole numbers, (D,)."""
    columns = [column[~np.isnan(column)] for column in rows.T]
    return np.array([bool((each == each.round()).all()) and len(np.unique(each)) <= FEW for each in columns])


def impute_table(flow: Flow, rows: np.ndarray, train_rows: np.ndarray, seed: int) -> Imputed:
    """Rows with NaN, imputed in real numbers: levels enter as their middles and are bounded by those of training."""
    levels, missing = few_levels(train_rows), np.isnan(rows)
    low = np.where(levels, np.nanmin(train_rows, 0), -np.inf)
    high = np.where(levels, np.nanmax(train_rows, 0) + 1, np.inf)
    x, lower, upper = (torch.from_numpy(each) for each in (rows + levels / 2, low, high))
    return impute_rows(flow, x, torch.from_numpy(missing), interval=INTERVAL, bounds=(lower, upper), seed=seed)


def nice(train_rows: np.ndarray, rows: np.ndarray, seed: int) -> tuple[dict[str, Guess], dict[str, Any]]:
    """NICE: the mean of its draws with their interval, and its mode; and how the chains went."""
    began = time.perf_counter()
    flow = fit_flow(train_rows, seed)
    fitted = time.perf_counter()
    imputed = impute_table(flow, rows, train_rows, seed)
    levels = few_levels(train_rows)
    draws, mode = (np.where(levels, np.floor(each), each) for each in (imputed.draws.numpy(), imputed.mode.numpy()))
    about = {
        "fit_seconds": fitted - began,
        "seconds": time.perf_counter() - began,
        "acceptance": float(imputed.acceptance.mean()),
        "rows_not_mixed": int((~imputed.mixed).sum()),
        "rows": len(rows),
    }
    return {"NICE, mean": Guess(draws.mean(0), *ends(draws)), "NICE, mode": Guess(mode)}, about


def ends(draws: np.ndarray) -> np.ndarray:
    """The interval of draws (draws, ...), (2, ...), by the quantiles of `impute_rows`: fair to few draws."""
    return np.asarray(np.quantile(draws, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], axis=0, method="weibull"))


def others(train_rows: np.ndarray, rows: np.ndarray, seed: int) -> dict[str, Callable[[], Guess]]:
    """The methods of scikit-learn, on standardised columns."""
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train_rows)
    known, holes = scaler.transform(train_rows), scaler.transform(rows)

    def by(imputer: Any) -> Guess:
        return Guess(scaler.inverse_transform(imputer.fit(known).transform(holes)))

    def chained(**options: Any) -> Any:
        """Fitted to training and test rows together: on complete rows alone it would stop after one round."""
        imputer = IterativeImputer(random_state=seed, **options)  # of BayesianRidge
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that ten rounds did not converge
            return imputer.fit(np.concatenate([known, holes]))

    def posterior() -> Guess:
        imputer = chained(sample_posterior=True)
        draws = np.stack([scaler.inverse_transform(imputer.transform(holes)) for _ in range(POSTERIOR_DRAWS)])
        return Guess(draws.mean(0), *ends(draws))

    return {
        "column mean": lambda: by(SimpleImputer()),
        "KNN": lambda: by(KNNImputer()),
        "iterative": lambda: Guess(scaler.inverse_transform(chained().transform(holes))),
        "iterative, draws": posterior,
    }


def read_table(name: str) -> np.ndarray:
    """A table of scikit-learn, without its target."""
    from sklearn import datasets

    options = {"scaled": False} if name == "diabetes" else {}
    return np.asarray(getattr(datasets, f"load_{name}")(**options).data, dtype=np.float64)


def measures(guess: Guess, truth: np.ndarray, missing: np.ndarray, scale: np.ndarray) -> dict[str, float]:
    """Of the hidden cells, in units of `scale`: the error, and of intervals the share that holds the truth."""
    error = ((guess.values - truth) / scale)[missing]
    found = {"rmse": float(np.sqrt(np.mean(error**2)))}
    if guess.low is not None and guess.high is not None:
        inside = (guess.low <= truth) & (truth <= guess.high)
        found["coverage"] = float(inside[missing].mean())
        found["width"] = float(((guess.high - guess.low) / scale)[missing].mean())
    return found


def trial(name: str, seed: int, holes: bool) -> list[dict[str, Any]]:
    """One table, one split, one set of hidden cells: a record for each method."""
    table, rng = read_table(name), np.random.default_rng(seed)
    test, fitted = np.split(rng.permutation(len(table)), [round(TEST * len(table))])
    train_rows, truth = table[fitted], table[test]
    missing = rng.random(truth.shape) < HIDDEN
    rows = np.where(missing, np.nan, truth)
    # pixels have one unit, and some hardly vary
    scale = np.full(table.shape[1], train_rows.std()) if name == "digits" else train_rows.std(0)
    if holes:
        train_rows = np.where(rng.random(train_rows.shape) < HIDDEN, np.nan, train_rows)
    records = []
    for method, guess in others(train_rows, rows, seed).items():
        began = time.perf_counter()
        found = measures(guess(), truth, missing, scale)
        records.append({"method": method, **found, "seconds": time.perf_counter() - began})
    guesses, about = nice(train_rows, rows, seed)
    records += [
        {"method": method, **measures(each, truth, missing, scale), **about} for method, each in guesses.items()
    ]
    return [{"set": name, "seed": seed, **record} for record in records]


def imputation(
    sets: Sequence[str] = SETS, seeds: Sequence[int] = SEEDS, *, holes: bool = False, out: str | Path | None = None
) -> dict[str, Any]:
    """Hide a fifth of the cells of the test rows of tables of scikit-learn, and find them again by every method.

    With `holes`, a fifth of the cells of the training rows is hidden, too. `out` is where the result is written as
    JSON; `markdown` makes the table of docs/tables.md from it.
    """
    if unknown := [name for name in sets if name not in SETS]:
        raise NicestError(f"expected tables of {', '.join(SETS)}, got {unknown[0]!r}")
    began = time.perf_counter()
    trials = [(name, seed) for name in sets for seed in seeds]
    records = [record for each in track(trials, "imputation", len(trials)) for record in trial(*each, holes)]
    result = {
        "device": describe_device(torch.device("cpu")),
        "hidden": HIDDEN,
        "holes_in_training": holes,
        "interval": INTERVAL,
        "seeds": list(seeds),
        "rows": summary(records),
        "trials": records,
        "seconds": time.perf_counter() - began,
        "versions": {"nicest": __version__, "torch": torch.__version__},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if out:
        write_text(Path(out), to_json(result))
    return result


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean over seeds of every figure, for each table and method, and the spread of the error."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["set"], record["method"]), []).append(record)
    rows = []
    for (name, method), group in groups.items():
        figures = [key for key in group[0] if key not in ("set", "method", "seed")]
        means = {key: float(np.mean([record[key] for record in group])) for key in figures}
        rows.append({"set": name, "method": method, **means, "rmse_sd": float(np.std([r["rmse"] for r in group]))})
    return rows


def markdown(result: dict[str, Any]) -> str:
    """The summary as a table."""
    lines = ["| table | method | RMSE | coverage of 90 % | width | seconds |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        intervals = [f"{row[key]:.2f}" if key in row else "" for key in ("coverage", "width")]
        figures = [f"{row['rmse']:.3f} ± {row['rmse_sd']:.3f}", *intervals, f"{row['seconds']:.1f}"]
        lines.append("| " + " | ".join([row["set"], row["method"], *figures]) + " |")
    return "\n".join(lines)
