"""Compare posteriors of simulators: NICE and sbi's own estimators, trained by its NPE. Takes an hour.

Every method gets 10,000 simulations. The metric is the accuracy of a classifier that separates its draws from those of
the true posterior, averaged over ten observations; 0.5 is perfect. Needs the packages sbi and sbibm.

Example: python -m benchmarks compare posteriors two_moons --method NICE --seeds 1 --out posteriors.json
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stdout
from functools import partial
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.model_selection import KFold, cross_val_score
from sklearn.neural_network import MLPClassifier
from torch.distributions import Distribution

from benchmarks.compare import Comparison, Figures
from benchmarks.simulators import OBSERVATIONS, TASKS, files
from nicest.errors import NicestError

SIMULATIONS, DRAWS = 10_000, 10_000
FOLDS = 5
Method = Callable[[Distribution], Any]  # the density estimator for a prior


class Simulations(NamedTuple):
    """Parameters and data of a task, concatenated: (N, P + C)."""

    rows: np.ndarray
    task: str
    left_out: tuple[str, ...] = ()


def simulated(task: str, rng: np.random.Generator) -> Simulations:
    """Draw parameters and data of a task."""
    return Simulations(np.concatenate(TASKS[task].draw(SIMULATIONS, rng), axis=1), task)


def trial(method: Method, table: Simulations, seed: int) -> Mapping[str, Figures]:
    """Return the C2ST of each observation and their mean, and the fraction of draws outside of the prior."""
    task, prior = TASKS[table.task], TASKS[table.task].prior()
    theta, x = torch.from_numpy(table.rows).float().tensor_split(prior.event_shape, 1)
    scores, outside = [], []
    with quiet():
        from sbi.inference import NPE

        inference = NPE(prior, density_estimator=method(prior), show_progress_bars=False)
        estimator = inference.append_simulations(theta, x).train()
        posterior = inference.build_posterior()
        for i in OBSERVATIONS:
            observed = torch.from_numpy(task.observation(i)).float()
            draws = posterior.sample((DRAWS,), x=observed, show_progress_bars=False)
            scores.append(c2st(task.posterior(i), draws.numpy()))
            with torch.no_grad():
                free = estimator.sample(torch.Size((DRAWS,)), observed)[:, 0]
            outside.append(float(task.outside(free).double().mean()))
    each = {f"c2st_{i}": score for i, score in zip(OBSERVATIONS, scores, strict=True)}
    return {"": {"c2st": float(np.mean(scores)), "outside": float(np.mean(outside)), **each}}


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress what sbi prints, its warnings, and the files that it writes into the working directory."""
    with TemporaryDirectory() as folder, chdir(folder), redirect_stdout(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def c2st(real: np.ndarray, drawn: np.ndarray) -> float:
    """Return the cross-validated accuracy of a network that separates the two, as in sbibm; 0.5 is best."""
    mean, spread, dim = real.mean(0), real.std(0, ddof=1), real.shape[1]
    rows = ((np.concatenate([real, drawn]) - mean) / spread).astype(np.float32)
    network = MLPClassifier((10 * dim, 10 * dim), max_iter=10_000, random_state=1)
    folds = KFold(FOLDS, shuffle=True, random_state=1)
    return float(cross_val_score(network, rows, np.arange(len(rows)) < len(real), cv=folds).mean())


def nice(prior: Distribution) -> Any:
    """Return the estimator of nicest."""
    from nicest.sbi import NICEPosterior

    return NICEPosterior(prior)


def of_sbi(kind: str, prior: Distribution) -> str:
    """Return an estimator of sbi by its name."""
    return kind


METHODS: dict[str, Method] = {"NICE": nice, "NSF": partial(of_sbi, "nsf"), "MAF": partial(of_sbi, "maf")}


def comparison() -> Comparison:
    """Return the comparison."""
    if find_spec("sbi") is None:
        raise NicestError("sbi is not installed, which trains the estimators: pip install 'nicest[sbi]'")
    files("two_moons")  # raises an error if sbibm is missing
    unit = "Accuracy of a network that tells draws of a posterior from true ones (C2ST), 0.5 if it cannot"
    tables = {name: partial(simulated, name) for name in TASKS}
    return Comparison("posteriors", unit, {"c2st": 3, "outside": 3, "seconds": 0}, False, tables, METHODS, trial)
