"""The settings of a model that are chosen from its data: by size, and some by cross-validation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nicest.data import Splits
from nicest.flows import SinhArcsinh, moments
from nicest.recipes import Recipe
from nicest.recipes.build import PRIORS, units_of
from nicest.recipes.defaults import FEW, Given, recipe_for_images, recipe_for_rows
from nicest.recipes.splits import describe
from nicest.runs.runtime import rows_to

SHRINKAGES = (1e-6, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.4, 0.8)  # never 0: columns may depend on each other
SHRINKAGES_OF_IMAGES = SHRINKAGES[:6]  # what couplings find in images goes beyond their covariance, but builds on it
FEWEST = 10  # rows to choose by
CHOICE_ROWS = 5000  # rows that are enough to choose a start by


class Start(NamedTuple):
    """What the untrained flow is made of, by the names of the recipe."""

    marginals: str = "none"
    prior: str = "gaussian"
    shrinkage: float = 0.4


def sized(recipe: Recipe, splits: Splits, given: Given) -> Recipe:
    """Choose the settings of model and training for the data, except for those that are `given`."""
    if splits.schema is not None:
        from nicest.tables.sizes import sized as sized_table  # not needed for images

        table: Recipe = sized_table(recipe, splits.n_fitted, splits.schema, given)
        return replace(table, sized=False)
    images, n, chosen = len(splits.shape) > 1, splits.n_fitted, dict(given["model"])
    made = (recipe_for_images if images else recipe_for_rows)(n, splits.dim, given)
    fixed: dict[str, Any] = {"marginals": "none"} if images or n < FEW else {}
    if made.model.law == "spline":
        fixed["prior"] = made.model.prior
    title = recipe.title if images else made.title
    training = replace(made.train, seed=recipe.train.seed)
    made = replace(recipe, title=title, model=made.model, train=training, sized=False)
    units, rows = units_of(describe(recipe, splits).data), splits.train[:: -(-len(splits.train) // CHOICE_ROWS)]
    with torch.no_grad():
        x = units.enter(rows_to(rows), generator=torch.Generator().manual_seed(recipe.train.seed))
        return choose_start(x, made, fixed | chosen, SHRINKAGES_OF_IMAGES if images else SHRINKAGES)


def choose_start(x: Tensor, recipe: Recipe, chosen: Mapping[str, Any], among: tuple[float, ...]) -> Recipe:
    """Choose marginals, prior and shrinkage such that the untrained flow scores best in cross-validation.

    Of five folds all are used for up to 2,000 rows and 1,000 columns, else one. Settings in `chosen` are kept.
    """
    if len(x) < FEWEST:
        return recipe.changed({"model": Start()._asdict() | dict(chosen)}, "NICE")
    x = x.double()
    x = (x - x.mean(0)) / x.std(0, correction=0)
    bends = [chosen["marginals"]] if "marginals" in chosen else ["none", "sinh-arcsinh"][: 1 + (len(x) >= FEW)]
    priors = [chosen["prior"]] if "prior" in chosen else list(PRIORS)
    shrinkages = [chosen["shrinkage"]] if "shrinkage" in chosen else list(among)
    whitens, ones = recipe.model.preprocess == "zca", torch.ones(x.shape[1]).double()
    fold, totals = torch.arange(len(x)) % 5, Counter[Start]()
    for k in range(5 if len(x) <= 2_000 and x.shape[1] <= 1_000 else 1):
        for marginals in bends:
            seen, left, log_det = bent(x[fold != k], x[fold == k], marginals)
            eigenvalues, vectors = torch.linalg.eigh(moments(seen)[1]) if whitens else (ones, ones.diag())
            for shrinkage in shrinkages if whitens else shrinkages[:1]:
                spread = torch.lerp(eigenvalues, ones, shrinkage).clamp_min(1e-12).sqrt()
                h = (left @ vectors) / spread @ vectors.mT
                for name in priors:  # with variance 1
                    prior = PRIORS[name](x.shape[1]).double()
                    log_scale = x.shape[1] * math.log(prior.standard_deviation) - spread.log().sum()
                    nats = prior.log_prob(h * prior.standard_deviation) + log_scale
                    totals[Start(marginals, name, shrinkage)] += float(nats.sum() + log_det)  # type: ignore[assignment]
    best = max(totals, key=lambda start: totals[start])
    return replace(recipe, model=replace(recipe.model, **best._asdict()))


def bent(seen: Tensor, left: Tensor, marginals: str) -> tuple[Tensor, Tensor, Tensor]:
    """Fit marginals and a standardisation to `seen`; return both parts transformed, and the log-det of `left`."""
    log_det = torch.zeros(())
    if marginals == "sinh-arcsinh":
        layer = SinhArcsinh(seen.shape[1]).double()
        layer.initialise(seen)
        left, log_dets = layer(left)
        seen, log_det = layer(seen)[0], log_dets.sum()
    mean, spread = seen.mean(0), seen.std(0, correction=0).clamp_min(1e-3)  # a fold may hold one value
    return (seen - mean) / spread, (left - mean) / spread, log_det - len(left) * spread.log().sum()
