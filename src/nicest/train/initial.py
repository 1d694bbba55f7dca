"""What a flow of a table starts from: a recipe by the table's size, and by cross-validation what size does not tell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nicest.data import Splits
from nicest.flows import Gaussian, Logistic, Prior, SinhArcsinh, moments
from nicest.recipes import Recipe
from nicest.recipes.build import units_of
from nicest.recipes.defaults import FEW, Given, conditional, recipe_for_images, recipes_for
from nicest.recipes.splits import describe
from nicest.runs.runtime import rows_to

SHRINKAGES = (1e-6, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.4, 0.8)  # never 0: columns may depend on each other
SHRINKAGES_OF_IMAGES = SHRINKAGES[:6]  # what couplings find in images goes beyond their covariance, but builds on it
FEWEST = 10  # rows to choose by
UNBENT = {"marginals": "none"}  # where a column has too few cells to bend by
CHOICE_ROWS = 5000  # rows that are enough to choose a start by
PRIORS: dict[str, type[Prior]] = {"gaussian": Gaussian, "logistic": Logistic}


class Start(NamedTuple):
    """What the untrained flow is made of, by the names of the recipe."""

    marginals: str = "none"
    prior: str = "gaussian"
    shrinkage: float = 0.4


def sized(recipe: Recipe, splits: Splits, given: Given) -> list[Recipe]:
    """Recipes to try, with model and training chosen for the rows, but for what is `given`."""
    images = len(splits.shape) > 1
    n = splits.n_fitted
    if splits.targets:
        made = conditional(n, splits.dim, len(splits.targets), given)
        seed = recipe.train.seed
        return [
            replace(recipe, title=e.title, model=e.model, train=replace(e.train, seed=seed), sized=False) for e in made
        ]
    sparse = len(splits.missing) > 0 and splits.fewest_observed < FEW
    made = recipes_for(splits.fewest_observed if sparse else n, splits.dim, given)
    if images:
        made = [recipe_for_images(n, splits.dim, given)]
    noisy = as_reals(recipe, splits)
    found = []
    for each in made:
        fixed: dict[str, Any] = {"marginals": "none"} if images else UNBENT if sparse or n < FEW else {}
        if each.model.law == "spline":
            fixed = fixed | {"prior": each.model.prior}
        trained = replace(each.train, seed=recipe.train.seed)
        title = recipe.title if images else each.title
        changed = replace(recipe, title=title, model=each.model, train=trained, sized=False)
        among = SHRINKAGES_OF_IMAGES if images else SHRINKAGES
        found.append(choose_start(noisy, changed, fixed | dict(given["model"]), among))
    return found


@torch.no_grad()
def as_reals(recipe: Recipe, splits: Splits) -> np.ndarray:
    """Some training rows as the real numbers that the flow is of."""
    units = units_of(describe(recipe, splits).data, splits)
    layers = units.first_layers()
    rows = rows_to(some(splits.training))
    if layers:
        units.fit_rows(rows)
    y = units.enter(rows, generator=torch.Generator().manual_seed(recipe.train.seed))
    for layer in layers.values():
        y, _ = layer(y)
    return y.numpy()


def some(rows: np.ndarray) -> np.ndarray:
    """Rows from all parts, enough to choose a start by."""
    return rows[:: -(-len(rows) // CHOICE_ROWS)]


@torch.no_grad()
def choose_start(
    rows: np.ndarray, recipe: Recipe, chosen: Mapping[str, Any], among: tuple[float, ...] = SHRINKAGES
) -> Recipe:
    """The recipe with marginals, prior and shrinkage such that the untrained flow scores best on rows left out.

    Five folds for up to 2,000 rows, one beyond and for more than 1,000 columns; what `chosen` names stays as it is.
    """
    if len(rows) < FEWEST:
        return recipe.changed({"model": Start()._asdict() | dict(chosen)}, "NICE")
    x = torch.from_numpy(some(rows).copy()).double()
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
                for prior in priors:
                    nats = _unit_variance(PRIORS[prior](x.shape[1]).double(), h) - spread.log().sum()
                    totals[Start(marginals, prior, shrinkage)] += float(nats.sum() + log_det)  # type: ignore[assignment]
    best = max(totals, key=lambda start: totals[start])
    return replace(recipe, model=replace(recipe.model, **best._asdict()))


def bent(seen: Tensor, left: Tensor, marginals: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows after the marginals and a standardisation that were fitted to those seen, and the log-det of those left."""
    log_det = torch.zeros(())
    if marginals == "sinh-arcsinh":
        layer = SinhArcsinh(seen.shape[1]).double()
        layer.initialise(seen)
        left, log_dets = layer(left)
        seen, log_det = layer(seen)[0], log_dets.sum()
    mean, spread = seen.mean(0), seen.std(0, correction=0).clamp_min(1e-3)  # a fold may hold one value
    return (seen - mean) / spread, (left - mean) / spread, log_det - len(left) * spread.log().sum()


def _unit_variance(prior: Prior, h: Tensor) -> Tensor:
    """log p of whitened rows under the prior with unit variance."""
    return prior.log_prob(h * prior.standard_deviation) + h.shape[1] * math.log(prior.standard_deviation)
