"""Log-likelihoods of linear models of the same data.

Each baseline is a flow, fitted to the training rows in closed form or by Fisher scoring, with the same units and noise
as the model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nicest.data import Splits
from nicest.flows import ZCA, Bijection, Chain, Flow, Gaussian, Logistic, Prior, TriangularAffine
from nicest.inference import engine
from nicest.progress import track
from nicest.recipes.build import units_of
from nicest.recipes.recipe import DataSettings
from nicest.runs.runtime import rows_to

NAMES = ("diagonal_gaussian", "factorial_logistic", "full_gaussian", "zca_logistic")


def baselines(
    splits: Splits,
    split: str,
    data: DataSettings,
    device: torch.device,
    generator: torch.Generator | None = None,
    *,
    draws: int = 1,
) -> dict[str, float]:
    """Return the mean nats of each baseline on a split, on the recipe's interval; NaN where data does not allow it."""
    rows, held_out = rows_to(splits.train, device), rows_to(splits.split(split), device)
    scores = dict.fromkeys(NAMES, math.nan)
    with engine.drawing_from(generator, device):
        for name in track(NAMES, "baselines", len(NAMES)):
            flow = linear_flow(name, data).double()
            try:
                flow.initialise(rows)
                flow = flow.float().to(device)
                if flow.prior.learned:
                    fit_prior(flow, rows)
            except ValueError:  # dependent columns, or fewer rows than dimensions
                continue
            scorer = engine.Engine(flow)
            nats = sum(float(scorer.log_prob(held_out).double().mean()) for _ in range(draws)) / draws
            scores[name] = nats + flow.units.interval_nats
    return scores


def linear_flow(name: str, data: DataSettings) -> Flow:
    """Return a baseline before it is fitted."""
    linear: dict[str, Bijection] = {}
    prior: Prior = Logistic(data.dim, learned=True)
    if name == "zca_logistic":
        linear["zca"] = ZCA(data.dim)
    elif name == "full_gaussian":
        linear["whitening"], prior = TriangularAffine(data.dim), Gaussian(data.dim)
    elif name == "diagonal_gaussian":
        prior = Gaussian(data.dim, learned=True)
    return Flow(units_of(data), Chain(linear), prior)


@torch.no_grad()
def fit_prior(flow: Flow, rows: Tensor, steps: int = 12) -> None:
    """Fit location and scale of a learned prior by maximum likelihood, for each dimension, on one draw of the noise.

    Gaussian: mean and standard deviation. Logistic: Fisher scoring from the moments; with e = (h - loc)/scale and
    t = tanh(e/2), the scores of loc and log scale are E[t]/scale and E[e t] - 1, their informations 1/(3 scale²)
    and (3 + π²)/9.
    """
    h = torch.cat([flow.encode(part) for part in rows.split(engine.BATCH)])
    loc, scale = h.mean(0), h.std(0, correction=0)
    if isinstance(flow.prior, Logistic):
        log_scale = (scale * math.sqrt(3) / math.pi).log()
        for _ in range(steps):
            score_loc, score_scale = torch.zeros_like(loc), torch.zeros_like(loc)
            for part in h.split(engine.BATCH):
                e = (part - loc) * torch.exp(-log_scale)
                t = torch.tanh(e / 2)
                score_loc += t.sum(0) / len(h)
                score_scale += (e * t).sum(0) / len(h)
            loc = loc + 3 * log_scale.exp() * score_loc
            log_scale = log_scale + (score_scale - 1) * 9 / (3 + math.pi**2)
    else:
        log_scale = scale.log()
    if not bool(log_scale.isfinite().all()):
        raise ValueError("a column has no spread: drop constant columns")
    flow.prior.loc.copy_(loc)
    flow.prior.log_scale.copy_(log_scale)
