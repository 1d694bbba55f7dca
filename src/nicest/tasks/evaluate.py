"""The log-likelihood of a trained model, term by term, with its error and the linear baselines beside it."""

from __future__ import annotations

import math
from typing import Any

import torch

from nicest.flows import bits_per_dim
from nicest.progress import track
from nicest.runs.run import Run
from nicest.tasks.baselines import baselines

WHY_POSITIVE = (
    "Nats are the logarithm of a density on the interval of the pixels, not of a probability. They are positive where"
    " the density exceeds 1. Bits/dim do not depend on the interval."
)
WHY_POSITIVE_CONTINUOUS = (
    "Real columns count by the logarithm of their density, which is positive where the density exceeds 1; discrete"
    " columns by that of their probability. If you multiply a real column by c, nats fall by log c."
)


@torch.no_grad()  # not inference_mode: the engine that is made here stays with the run
def evaluate(
    run: Run,
    *,
    split: str = "test",
    draws: int = 8,
    seed: int = 0,
    with_baselines: bool = True,
) -> dict[str, Any]:
    """Mean log-likelihood of a split over several draws of the dequantisation noise (NICE §5.1).

    `terms` is the ledger: it sums to `mean_nats`, on the recipe's interval. `level_terms` are the log-dets of the
    layers between the levels of the data and that interval; with them the sum is `level_nats`, nats in the data's
    own space, which is what `flow.log_prob` gives and bits/dim are made of.
    """
    flow, recipe, splits, rows, draws = run.flow, run.recipe, run.splits, run.rows(split), run.draws(draws)
    generator = torch.Generator(run.device).manual_seed(seed)

    sums: dict[str, float] = {}
    nats = torch.zeros(draws, len(rows), dtype=torch.float64)
    for draw in track(range(draws), "evaluating", draws):
        start = 0
        for terms in run.engine.each("terms", *recipe.data.split(rows), generator=generator):
            for name, term in terms.items():
                nats[draw, start : start + len(term)] += term.double().cpu()
                sums[name] = sums.get(name, 0.0) + float(term.double().sum())
            start += len(term)
    each = nats.mean(0)
    means = {name: value / nats.numel() for name, value in sums.items()}
    levels = flow.units.terms() if flow.units.levels else {}  # between levels and the interval nats are reported on
    terms = {name: value for name, value in means.items() if name not in levels}
    level_nats = float(each.mean())
    dim, whole = flow.dim, not recipe.data.conditional
    return {
        "dataset": recipe.data.name,
        "split": split,
        "n": len(rows),
        "dim": dim,
        "draws": draws,
        "mean_nats": sum(terms.values()),
        "stderr_nats": float(each.std(correction=1)) / math.sqrt(len(rows)) if len(rows) > 1 else math.nan,
        "bits_per_dim": bits_per_dim(level_nats, dim),
        "non_finite": int((~nats.isfinite()).any(0).sum()),
        "terms": terms,
        "level_terms": {name: means[name] for name in levels},
        "level_nats": level_nats,
        "baselines": baselines(splits, split, recipe.data, run.device, generator, draws=draws)
        if with_baselines and whole
        else {},
        "paper_nats": recipe.paper_nats,
        "recipe": recipe.name,
        "interval": list(recipe.data.interval) if recipe.data.levels else None,
        "epoch": run.figures.get("epoch"),
    } | ({"target": list(recipe.data.target)} if recipe.data.target else {})
