"""Compare the log-density of held-out rows: NICE, mixtures of Gaussians, kernels, and zuko's flows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from sklearn.mixture import GaussianMixture
from sklearn.neighbors import KernelDensity
from torch import nn

from benchmarks.compare import Comparison, Figures
from benchmarks.datasets import TABLES, Table
from nicest.estimator import NICE
from nicest.recipes.defaults import held_out

Method = Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # training rows, test rows, seed -> log-density of each
TEST = 5  # one row in TEST is in the test set
COMPONENTS, COVARIANCES = (1, 2, 3, 5, 8, 12, 20, 40), ("full", "tied", "diag", "spherical")
BANDWIDTHS = np.geomspace(0.05, 2, 15)
MOST_VALIDATING = 2_000  # validation rows for the bandwidth; each is compared with every training row
STEPS, BATCH, LOOK = 3_000, 512, 50  # zuko's flows: steps, batch size, steps between validations


def trial(method: Method, table: Table, seed: int) -> Mapping[str, Figures]:
    """Return the mean log-density of a fifth of the rows, in nats of columns standardised by the others."""
    test, train = np.split(np.random.default_rng(seed).permutation(table.rows), [len(table.rows) // TEST])
    return {"": {"nats": float(np.mean(method(*standardised(train, test), seed)))}}


def standardised(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Standardise both by the training rows; columns that are constant in training keep their unit."""
    mean, spread = train.mean(0), train.std(0)
    spread[spread == 0] = 1
    return (train - mean) / spread, (test - mean) / spread


def validation(train: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the training rows into fitting and validation rows, as many as NICE holds out."""
    count = max(1, round(len(train) * (held_out(len(train)) or 0.25)))
    valid, rest = np.split(np.random.default_rng(seed).permutation(train), [count])
    return rest, valid


def nice(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    return NICE(random_state=seed).fit(train).score_samples(test)


def mixture(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    return best_mixture(train, seed).score_samples(test)


def best_mixture(train: np.ndarray, seed: int) -> GaussianMixture:
    """Choose the number of components and the covariance type by validation, then fit to all training rows."""
    rest, valid = validation(train, seed)

    def fitted(k: int, kind: str, rows: np.ndarray) -> GaussianMixture:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # not converged in 200 rounds
            return GaussianMixture(k, covariance_type=kind, reg_covar=1e-4, max_iter=200, random_state=seed).fit(rows)

    choices = [(k, kind) for k in COMPONENTS for kind in COVARIANCES if k < len(rest)]
    k, kind = max(choices, key=lambda choice: fitted(choice[0], choice[1], rest).score(valid))
    return fitted(k, kind, train)


def kernels(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """Score by Gaussian kernels whose bandwidth is chosen by validation."""
    rest, valid = validation(train, seed)
    valid = valid[:MOST_VALIDATING]
    best = max(BANDWIDTHS, key=lambda width: KernelDensity(bandwidth=width).fit(rest).score(valid))
    return KernelDensity(bandwidth=best).fit(train).score_samples(test)


def zuko_flow(kind: str, train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """Train four autoregressive transforms with two layers of 128, and keep the best weights by validation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import zuko
    rows, valid, unseen = (torch.from_numpy(part).float() for part in (*validation(train, seed), test))
    flow: nn.Module = getattr(zuko.flows, kind)(train.shape[1], transforms=4, hidden_features=(128, 128))
    optimizer = torch.optim.AdamW(flow.parameters(), lr=1e-3, weight_decay=0.01)
    best, kept = -np.inf, flow.state_dict()
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        (-flow().log_prob(rows[torch.randint(len(rows), (min(BATCH, len(rows)),))]).mean()).backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
        optimizer.step()
        if step % LOOK == 0:
            with torch.no_grad():
                nats = float(flow().log_prob(valid).mean())
            if nats > best:
                best, kept = nats, copy.deepcopy(flow.state_dict())
    flow.load_state_dict(kept)
    with torch.no_grad():
        return flow().log_prob(unseen).double().numpy()


METHODS: dict[str, Method] = {
    "NICE": nice,
    "mixture": mixture,
    "kernels": kernels,
    "zuko NSF": partial(zuko_flow, "NSF"),
    "zuko MAF": partial(zuko_flow, "MAF"),
}
ABSENT = {} if find_spec("zuko") else dict.fromkeys(["zuko NSF", "zuko MAF"], "zuko is not installed: nicest[bench]")
COMPARISON = Comparison(
    name="density",
    unit="Mean log-density of held-out rows, in nats of standardised columns",
    figures={"nats": 2, "seconds": 1},
    highest=True,
    tables=TABLES,
    methods={name: method for name, method in METHODS.items() if name not in ABSENT},
    trial=trial,
    absent=ABSENT,
)
