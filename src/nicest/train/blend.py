"""How much of a mixture its forest is: the weight under which validation rows are likeliest."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from nicest.data import Splits
from nicest.flows import Flow, Mixture
from nicest.recipes.recipe import DataSettings
from nicest.runs.runtime import rows_to

PRIOR = 4.0  # rows that speak for the forest before any is looked at, and as many against it
ROUNDS = 200


@torch.no_grad()
def blend(flow: Flow | Mixture, splits: Splits, data: DataSettings) -> None:
    """Weigh the forest of a mixture, if it has one, against its trained flows, by rows that neither has seen.

    For this, a second forest is grown from the training rows alone; the flow's own may have seen all.
    """
    if not isinstance(flow, Mixture) or splits.valid is splits.train:
        return
    flow.eval()
    *others, forest = flow.members
    grown = copy.deepcopy(forest.bijection)
    (y, c), (valid, context) = (
        (flow.units.enter(x.to(flow.units.scale)), forest.embed(context))
        for x, context in (data.split(rows_to(rows, flow.device)) for rows in (splits.training, splits.validating))
    )
    grown.initialise(y, c)
    h, log_det = grown(valid, context)
    each = [one.bijection(valid, context) for one in others]
    trained = torch.stack([flow.prior.log_prob(latent) + inner for latent, inner in each])
    mean = trained.logsumexp(0) - math.log(len(trained))
    found = weight(mean, flow.prior.log_prob(h) + log_det)
    flow.weights[:-1] = (1 - found) / len(others)
    flow.weights[-1] = found


def weight(without: Tensor, forest: Tensor) -> float:
    """The w that is best for the log-densities of rows, (N,), in (1 - w) p + w q, beside what speaks for a half."""
    finite = without.isfinite() & forest.isfinite()
    difference, w = (forest - without)[finite].double(), 0.5
    for _ in range(ROUNDS):
        belongs = torch.sigmoid(difference + torch.tensor(w, dtype=torch.float64).logit())
        w = float((belongs.sum() + PRIOR) / (len(belongs) + 2 * PRIOR))
    return w
