"""A flow fitted to rows in memory: what a table's size does not tell is chosen by cross-validation, then the loop."""

from __future__ import annotations

import copy
import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nicest.data import Splits, in_memory
from nicest.data.arrays import widened, with_digits
from nicest.flows import Flow, Gaussian, Logistic, Prior, SinhArcsinh, moments
from nicest.recipes import Recipe
from nicest.recipes.build import build, fit_to_rows
from nicest.recipes.recipe import ModelSettings
from nicest.recipes.sizes import FEW, IN_MEMORY, held_out, recipe_for
from nicest.recipes.splits import describe
from nicest.train.checkpoint import LAST, RunFolder, load_with_recipe
from nicest.train.engine import Engine
from nicest.train.loop import fit
from nicest.train.runtime import choose_device, rows_to
from nicest.train.state import State

SHRINKAGES = (1e-6, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.4, 0.8)  # never 0: columns may depend on each other
FEWEST = 10  # rows to choose by
CHOICE_ROWS = 5000  # rows that are enough to choose a start by
PRIORS: dict[str, type[Prior]] = {"gaussian": Gaussian, "logistic": Logistic}


class Start(NamedTuple):
    """What the untrained flow is made of, by the names of the recipe."""

    marginals: str = "none"
    prior: str = "gaussian"
    shrinkage: float = 0.4


class Fitted(NamedTuple):
    """What came of a fit: the flow in float64, its recipe, the figures it was chosen by, a row for each validation."""

    flow: Flow
    recipe: Recipe
    figures: dict[str, Any]
    metrics: list[dict[str, Any]]


def fit_table(
    rows: np.ndarray,
    *,
    seed: int,
    given: Mapping[str, Mapping[str, Any]] | None = None,
    valid: float | None = None,
    device: str = "cpu",
    quiet: bool = True,
    warm: tuple[Flow, ModelSettings] | None = None,
) -> Fitted:
    """A flow of finite rows (N, D), what is not `given` of its recipe chosen for them; or on from a `warm` one.

    `valid` is the share of rows that validates, by default as their number asks for.
    """
    given = {"model": {}, "train": {}} | dict(given or {})
    recipe = recipe_for(len(rows), rows.shape[1], given).changed({"train": {"seed": seed}}, "NICE")
    share = held_out(len(rows)) if valid is None else valid
    splits = in_memory(IN_MEMORY, with_digits(widened(rows, seed)), seed, share)
    if warm is None:
        recipe = choose_start(splits.train, recipe, given["model"])
        return fit_rows(recipe, splits, device=device, quiet=quiet)
    flow, model = warm
    return fit_rows(replace(recipe, model=model), splits, device=device, quiet=quiet, flow=copy.deepcopy(flow))


def fit_rows(
    recipe: Recipe, splits: Splits, *, device: str = "cpu", quiet: bool = True, flow: Flow | None = None
) -> Fitted:
    """Train a recipe on rows in memory, from `flow` where one is given; the random state of torch stays as it was.

    The constants are fitted to training and validation rows together: they do not change while training, so the
    validation that stops it still compares like with like. Of the start and all that was validated, the best is kept.
    """
    place = choose_device(device)
    recipe = describe(recipe, splits)
    cuda = [place] if place.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(recipe.train.seed)
        if flow is None:
            flow = build(recipe).double()
            fit_to_rows(flow, torch.from_numpy(_all_rows(splits)), recipe.model.shrinkage)
        state, run = State(recipe, flow, place), RunFolder(folder)
        first = state.average_tensors() | state.constants
        start = float(Engine(state.average.eval()).log_prob(rows_to(splits.valid, place)).double().mean())
        state.save(run.path / LAST)
        ended = fit(state, splits, run, quiet=quiet)
        if not ended["finished"]:
            raise KeyboardInterrupt  # the loop ends in good order for the command line; here the caller wants to know
        flow, recipe, figures = load_with_recipe(run.path, dtype=torch.float64, device=place)
        if start >= figures["valid_nats"]:
            flow.load_state_dict(first)
            figures = {"epoch": 0, "step": 0, "valid_nats": start}
        return Fitted(flow, recipe, figures, run.metrics())


@torch.no_grad()
def choose_start(rows: np.ndarray, recipe: Recipe, chosen: Mapping[str, Any]) -> Recipe:
    """The recipe with marginals, prior and shrinkage such that the untrained flow scores best on rows left out.

    Five folds for up to 2,000 rows, one beyond; what `chosen` names stays as it is.
    """
    if len(rows) < FEWEST:
        return recipe.changed({"model": Start()._asdict() | dict(chosen)}, "NICE")
    x = torch.from_numpy(rows[:: -(-len(rows) // CHOICE_ROWS)].copy()).double()
    x = (x - x.mean(0)) / x.std(0, correction=0)
    bends = [chosen["marginals"]] if "marginals" in chosen else ["none", "sinh-arcsinh"][: 1 + (len(x) >= FEW)]
    priors = [chosen["prior"]] if "prior" in chosen else list(PRIORS)
    shrinkages = [chosen["shrinkage"]] if "shrinkage" in chosen else list(SHRINKAGES)
    fold, totals = torch.arange(len(x)) % 5, Counter[Start]()
    for k in range(5 if len(x) <= 2_000 else 1):
        for marginals in bends:
            seen, left, log_det = bent(x[fold != k], x[fold == k], marginals)
            eigenvalues, vectors = _spectrum(seen, recipe.model.preprocess)
            for shrinkage in shrinkages if recipe.model.preprocess == "zca" else shrinkages[:1]:
                spread = torch.lerp(eigenvalues, torch.ones_like(eigenvalues), shrinkage).clamp_min(1e-12).sqrt()
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
        layer = SinhArcsinh(seen.shape[1]).double().fit(seen)
        left, log_dets = layer(left)
        seen, log_det = layer(seen)[0], log_dets.sum()
    mean, spread = seen.mean(0), seen.std(0, correction=0).clamp_min(1e-3)  # a fold may hold one value
    return (seen - mean) / spread, (left - mean) / spread, log_det - len(left) * spread.log().sum()


def _spectrum(x: Tensor, preprocess: str) -> tuple[Tensor, Tensor]:
    """The eigenvalues and eigenvectors that the whitening divides by; without one, those of the identity."""
    if preprocess != "zca":
        return torch.ones(x.shape[1]).double(), torch.eye(x.shape[1]).double()
    eigenvalues, vectors = torch.linalg.eigh(moments(x)[1])
    return eigenvalues, vectors


def _unit_variance(prior: Prior, h: Tensor) -> Tensor:
    """log p of whitened rows under the prior with unit variance."""
    return prior.log_prob(h * prior.standard_deviation) + h.shape[1] * math.log(prior.standard_deviation)


def _all_rows(splits: Splits) -> np.ndarray:
    """Training and validation rows, which are the same ones where there are too few to hold any out."""
    return splits.train if splits.valid is splits.train else np.concatenate([splits.train, splits.valid])
