"""NICE beside what people use for tables instead: the same rows, the same split, nats in the units of the data."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import multivariate_normal
from sklearn.covariance import LedoitWolf
from sklearn.mixture import GaussianMixture
from sklearn.neighbors import KernelDensity
from torch import nn
from torch.distributions import Distribution

from nicest.errors import NicestError
from nicest.files import to_json, write_text
from nicest.inference.engine import Engine
from nicest.progress import track
from nicest.runs.runtime import choose_device, environment
from nicest.studies.datasets import TABLES
from nicest.train.fit_table import fit_table

Scores = np.ndarray
Method = Callable[[np.ndarray, np.ndarray, int], Scores]
COMPONENTS, COVARIANCES = (1, 2, 3, 5, 8, 12), ("full", "tied", "diag", "spherical")
BANDWIDTHS = np.geomspace(0.05, 2, 15)


def compare_density(*, tables: tuple[str, ...] = (), seeds: int = 3, out: str | Path | None = None) -> dict[str, Any]:
    """Mean log-density of the fifth of the rows that no method has seen, for each table, method and seed.

    Every method gets columns standardised by the training rows, whose log-det is counted; what it has to choose it
    chooses by a quarter of the training rows, and is then fitted to all of them where that is possible.
    """
    methods = {"NICE": _nice} | CLASSICAL | (PEERS if find_spec("zuko") else {})
    for name in tables:
        if name not in TABLES:
            raise NicestError(f"no table {name!r}; there are {', '.join(TABLES)}")
    cases = [(table, method) for table in tables or TABLES for method in methods]
    rows = [_case(*case, methods[case[1]], seeds) for case in track(cases, "comparing", len(cases))]
    result = environment(choose_device("cpu")) | {"unit": "nats", "seeds": seeds, "rows": rows}
    if out is not None:
        write_text(Path(out), to_json(result))
    return result


def _case(table: str, name: str, method: Method, seeds: int) -> dict[str, Any]:
    nats, began = [], time.perf_counter()
    for seed in range(seeds):
        train, test, log_det = standardised_split(table, seed)
        nats.append(float(np.mean(method(train, test, seed))) + log_det)
    return {
        "table": table,
        "n": len(train) + len(test),
        "dim": train.shape[1],
        "method": name,
        "mean_nats": float(np.mean(nats)),
        "nats": nats,
        "seconds": (time.perf_counter() - began) / seeds,
    }


def standardised_split(table: str, seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Training and test rows, four to one, standardised by the former, and the log-det of that."""
    rng = np.random.default_rng(seed)
    x = TABLES[table](rng)
    test, train = np.split(x[rng.permutation(len(x))], [len(x) // 5])
    mean, spread = train.mean(0), train.std(0)
    return (train - mean) / spread, (test - mean) / spread, -float(np.log(spread).sum())


def _held_out(train: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(seed).permutation(len(train))
    valid, rest = np.split(train[order], [len(train) // 4])
    return rest, valid


def _nice(train: np.ndarray, test: np.ndarray, seed: int) -> Scores:
    """What nicest.NICE(random_state) does, with its defaults."""
    flow = fit_table(train, seed=seed).flow
    return Engine(flow).log_prob(torch.from_numpy(test)).numpy()


def _gaussian(train: np.ndarray, test: np.ndarray, seed: int) -> Scores:
    return multivariate_normal(train.mean(0), np.cov(train.T, bias=True)).logpdf(test)


def _ledoit_wolf(train: np.ndarray, test: np.ndarray, seed: int) -> Scores:
    fitted = LedoitWolf().fit(train)
    return multivariate_normal(fitted.location_, fitted.covariance_).logpdf(test)


def _mixture(train: np.ndarray, test: np.ndarray, seed: int) -> Scores:
    """Components and kind of covariance by validation."""
    rest, valid = _held_out(train, seed)

    def mixture(k: int, kind: str) -> GaussianMixture:
        return GaussianMixture(k, covariance_type=kind, reg_covar=1e-4, max_iter=200, random_state=seed)

    choices = [(k, kind) for k in COMPONENTS for kind in COVARIANCES if k < len(rest)]
    best = max(choices, key=lambda choice: mixture(*choice).fit(rest).score(valid))
    return mixture(*best).fit(train).score_samples(test)


def _kernels(train: np.ndarray, test: np.ndarray, seed: int) -> Scores:
    """Bandwidth by validation."""
    rest, valid = _held_out(train, seed)
    best = max(BANDWIDTHS, key=lambda width: KernelDensity(bandwidth=width).fit(rest).score(valid))
    return KernelDensity(bandwidth=best).fit(train).score_samples(test)


def _zuko(kind: str) -> Method:
    def fit(train: np.ndarray, test: np.ndarray, seed: int) -> Scores:
        """Three transforms of two layers of 64, Adam, the best by validation; ends when that gets no better."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import zuko
        Distribution.set_default_validate_args(__debug__)  # zuko turns it off for everybody
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = getattr(zuko.flows, kind)(train.shape[1], transforms=3, hidden_features=(64, 64))
            return _early_stopped(model, *_held_out(train, seed), test)

    return fit


def _early_stopped(model: nn.Module, train: np.ndarray, valid: np.ndarray, test: np.ndarray) -> Scores:
    """Scores of a flow of zuko's after at most 1,500 steps, a validation every 25 and a patience of 8."""
    rows, held, unseen = (torch.from_numpy(part).float() for part in (train, valid, test))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    best, scores, tired = -np.inf, np.full(len(test), -np.inf), 0
    for step in range(1_500):
        batch = rows[torch.randint(len(rows), (min(128, len(rows)),))]
        optimizer.zero_grad()
        (-model().log_prob(batch).mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 25 == 24:
            with torch.no_grad():
                found = float(model().log_prob(held).mean())
                tired = 0 if found > best else tired + 1
                if found > best:
                    best, scores = found, model().log_prob(unseen).double().numpy()
            if tired == 8:
                break
    return scores


CLASSICAL: dict[str, Method] = {
    "Gaussian": _gaussian,
    "Ledoit-Wolf": _ledoit_wolf,
    "mixture": _mixture,
    "kernels": _kernels,
}
PEERS: dict[str, Method] = {"zuko MAF": _zuko("MAF"), "zuko NSF": _zuko("NSF")}


def markdown(result: dict[str, Any]) -> str:
    """The tables of a comparison: nats with their spread between splits, the best of each row in bold; and seconds."""
    methods = list(dict.fromkeys(row["method"] for row in result["rows"]))
    nats = [f"| table | rows x columns | {' | '.join(methods)} |", "|---" * (len(methods) + 2) + "|"]
    seconds = [f"| seconds | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for table in dict.fromkeys(row["table"] for row in result["rows"]):
        found = [row for row in result["rows"] if row["table"] == table]
        best = max(row["mean_nats"] for row in found)
        size = f"{found[0]['n']} x {found[0]['dim']}"
        nats.append(f"| {table} | {size} | {' | '.join(_cell(row, best) for row in found)} |")
        seconds.append(f"| {table} | {' | '.join(_seconds(row['seconds']) for row in found)} |")
    return "\n".join([*nats, "", *seconds])


def _cell(row: dict[str, Any], best: float) -> str:
    mean = f"{row['mean_nats']:.2f}"
    spread = f" ± {np.std(row['nats'], ddof=1):.2f}" if len(row["nats"]) > 1 else ""
    return (f"**{mean}**" if row["mean_nats"] == best else mean) + spread


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}" if seconds >= 0.95 else f"{seconds:.2g}"
