"""How much of a mixture its forest is: the weight under which validation rows are likeliest."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from nicest.data import Splits
from nicest.flows import Flow, Mixture
from nicest.runs.runtime import rows_to

PRIOR = 4.0  # rows that speak for the forest before any is looked at, and as many against it
ROUNDS = 200


@torch.no_grad()
def blend(flow: Flow, splits: Splits) -> None:
    """Weigh the forest of a mixture, if it has one, against its trained flows, by rows that neither has seen.

    For this, a second forest is grown from the training rows alone; the flow's own may have seen all.
    """
    if not isinstance(flow, Mixture) or flow.trained == len(flow.chains) or splits.valid is splits.train:
        return
    flow.eval()
    y, valid = (
        flow.enter(rows_to(rows, flow.device).to(flow.units.scale)) for rows in (splits.training, splits.validating)
    )
    trained, own = flow.of_each(valid, all=False), copy.deepcopy(flow.chains[-1])
    own.initialise(y)
    h, log_det = own(valid)
    mean = trained.logsumexp(0) - math.log(len(trained))
    flow.share.fill_(weight(mean, flow.prior.log_prob(h) + log_det))


def weight(without: Tensor, forest: Tensor) -> float:
    """The w that is best for the log-densities of rows, (N,), in (1 - w) p + w q, beside what speaks for a half."""
    finite = without.isfinite() & forest.isfinite()
    difference, w = (forest - without)[finite].double(), 0.5
    for _ in range(ROUNDS):
        belongs = torch.sigmoid(difference + torch.tensor(w, dtype=torch.float64).logit())
        w = float((belongs.sum() + PRIOR) / (len(belongs) + 2 * PRIOR))
    return w
