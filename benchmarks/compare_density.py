"""Compare the log-density of held-out rows: NICE, a mixture, kernels, zuko's NSF and MAF if installed.

Nats are in units of columns standardised by the training rows. NICETable takes all columns as densities; "NICETable,
values" finds discrete columns, whose probabilities cannot be compared with densities.

Example: python -m benchmarks compare density --data my-tables --out density.json
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import numpy as np
import torch
from sklearn.mixture import GaussianMixture
from sklearn.neighbors import KernelDensity
from torch import nn

from benchmarks.compare import Comparison, Figures
from benchmarks.datasets import TABLES, Table, deviations, split, standardised
from nicest.data.columns import Number
from nicest.estimators.nice import NICE
from nicest.estimators.table import NICETable

Method = Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # training rows, test rows, seed -> log-density of each
COMPONENTS, COVARIANCES = (1, 2, 3, 5, 8, 12, 20, 40), ("full", "tied", "diag", "spherical")
BANDWIDTHS = np.geomspace(0.05, 2, 15)
VALID, MOST_VALID = 0.2, 2_000  # validation rows: a fraction of the training rows, and at most
STEPS, BATCH, LOOK = 3_000, 512, 50  # zuko's flows: steps, batch size, steps between validations


def trial(method: Method, table: Table, seed: int) -> Mapping[str, Figures]:
    """Return the mean log-density of a fifth of the rows, in nats of columns standardised by the others."""
    return {"": {"nats": float(np.mean(method(*split(table.rows, seed), seed)))}}


def nice_table(
    train: np.ndarray, test: np.ndarray, seed: int, *, discrete: Literal["values", "types"] = "types"
) -> np.ndarray:
    """Score by `NICETable`, in nats of standardised columns; discrete values have probabilities, without a unit."""
    model = NICETable(discrete=discrete, random_state=seed, device="cpu").fit(train)
    nats = model.score_samples(test)
    for column, cells, deviation in zip(model.schema_, test.T, deviations(train), strict=True):
        if isinstance(column, Number) and not column.discrete:
            nats += np.where(np.isin(cells, column.spikes), 0, np.log(deviation))
    return nats


def nice(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """Score by the coupling flow `NICE`."""
    train, test = standardised(train, test)
    return NICE(random_state=seed, device="cpu").fit(train).score_samples(test)


def validation(train: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the training rows into fitting and validation rows."""
    count = max(1, min(MOST_VALID, round(VALID * len(train))))
    valid, rest = np.split(np.random.default_rng(seed).permutation(train), [count])
    return rest, valid


def mixture(train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """Score by the best mixture of Gaussians."""
    train, test = standardised(train, test)
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
    train, test = standardised(train, test)
    rest, valid = validation(train, seed)
    best = max(BANDWIDTHS, key=lambda width: KernelDensity(bandwidth=width).fit(rest).score(valid))
    return KernelDensity(bandwidth=best).fit(train).score_samples(test)


def zuko_flow(kind: str, train: np.ndarray, test: np.ndarray, seed: int) -> np.ndarray:
    """Train four autoregressive transforms with two layers of 128, and keep the best weights by validation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import zuko
    train, test = standardised(train, test)
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


ZUKO = {f"zuko {kind}": partial(zuko_flow, kind) for kind in ("NSF", "MAF")}
METHODS: dict[str, Method] = {
    "NICETable": nice_table,
    "NICETable, values": partial(nice_table, discrete="values"),
    "NICE": nice,
    "mixture": mixture,
    "kernels": kernels,
    **ZUKO,
}


def comparison() -> Comparison:
    """Return the comparison."""
    unit, needs = (
        "Mean log-density of held-out rows, in nats of standardised columns",
        {"zuko NSF": "zuko", "zuko MAF": "zuko"},
    )
    return Comparison("density", unit, {"nats": 2, "seconds": 1}, True, TABLES, METHODS, trial, needs)
