"""Settings of flows by the size of the data: rows of two to a thousand numbers, and images."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from nicest.data.splits import IN_MEMORY
from nicest.errors import NicestError
from nicest.recipes.recipe import DataSettings, Recipe

FEW = 50  # rows below which nothing is held out and no coupling is trained
ROWS_PER_COLUMN = 20  # below it additive couplings; splines would overfit
WIDEST_WHITENING = 1000  # columns beyond which whitening costs more than training
STEPS = {"low": 600, "medium": 1_800, "high": 10_000}  # of a training
WORK = {"low": 1e11, "medium": 5e11, "high": 5e12}  # multiplications of a training, in the forward passes of networks
WIDER = {"low": math.inf, "medium": 20_000, "high": 5_000}  # rows from which splines have networks twice as wide
FAST = 2_000  # rows from which splines learn at a higher rate; fewer, or fewer than 50 a column, overfit
WIDEST_IMAGES = 4096  # numbers of an image beyond which whitening takes minutes
Given = Mapping[str, Mapping[str, Any]]


def recipe_for_rows(n: int, dim: int, given: Given) -> Recipe:
    """Choose the recipe for n rows of D numbers.

    Splines follow columns that are spiky, clustered or functions of others. With few rows for their columns they
    overfit: there, additive couplings after a Gaussian copula are better.

    Parameters
    ----------
    n, dim : int
        Number of rows to train and validate on, and of columns.
    given : mapping
        Settings of [model] and [train] that replace what would be chosen.
    """
    effort = Recipe().changed({"train": dict(given["train"])}, "NICE").train.effort
    plain = given["model"].get("law", "spline") != "spline" or given["model"].get("couplings") == 0
    few = n < max(FEW, ROWS_PER_COLUMN * dim) and dim > 1
    kind = additive if few or n < FEW or dim > WIDEST_WHITENING or plain else splines
    return kind(n, dim, given, effort)


def additive(n: int, dim: int, given: Given, effort: str) -> Recipe:
    """Choose a whitening of transformed columns, then additive couplings.

    Width, batch and steps grow with the rows; dropout is for few rows for their columns.
    """
    model = {
        "preprocess": "zca" if dim <= WIDEST_WHITENING else "none",
        "couplings": 0 if n < FEW or dim < 2 else 4 if n < 500 else 6,
        "hidden_layers": 2,
        "width": 32 if n < 500 else 64 if n < 5_000 else 128,
        "dropout": 0.2 if n < 50 * dim else 0.0,
        "initialisation": "whitened",
    }
    batch = min(1024, max(64, 1 << round(math.log2(max(10, n) / 10))))

    def train(recipe: Recipe) -> dict[str, Any]:
        steps = min(10_000, round(1_500 * max(1.0, n / 1_000) ** 0.4)) if recipe.model.couplings else 1
        rates = {"lr": 3e-3 if n < 10_000 else 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
        return (
            rates | {"clip": 1.0} | _steps(bounded(steps, recipe, dim, effort), trained(n), recipe, warmup=50, every=20)
        )

    return _chosen(_rows("additive couplings"), model, batch, train, given, dim)


def splines(n: int, dim: int, given: Given, effort: str) -> Recipe:
    """Choose a learned spline in every column, then couplings with splines, learned mixing and residual networks."""
    model = {
        "preprocess": "none",
        "elementwise": 0 if n < 150 else 8 if n < 500 else 16 if n < 2_000 else 32 if n < 20_000 else 64,
        "law": "spline",
        "bins": 16 if dim <= 100 else 8,
        "mixing": True,
        "couplings": 0 if dim < 2 else 4 if effort == "low" else 6,
        "network": "residual",
        "hidden_layers": 4,
        "width": 128 if n >= WIDER[effort] else 64,
        "dropout": 0.2 if n < 5_000 else 0.1,
        "initialisation": "whitened",
        "prior": "gaussian",
    }
    batch = min(256, max(32, 1 << round(math.log2(n / 4))))

    def train(recipe: Recipe) -> dict[str, Any]:
        steps = bounded(STEPS[effort], recipe, dim, effort)
        rates = _rates(fast=n >= max(FAST, 50 * dim) and effort != "high")
        return rates | _steps(steps, trained(n), recipe, warmup=100, every=50) | {"loss": "nats", "ema": 0.995}

    return _chosen(_rows("splines"), model, batch, train, given, dim)


def _rates(*, fast: bool) -> dict[str, Any]:
    """Return the rates of splines: the higher one comes with a shorter memory of the first gradients."""
    rates = {"lr": 2e-3, "betas": [0.9, 0.95]} if fast else {"lr": 1e-3, "betas": [0.9, 0.999]}
    return rates | {"eps": 1e-8, "weight_decay": 0.01, "clip": 5.0}


def bounded(steps: int, recipe: Recipe, dim: int, effort: str) -> int:
    """Limit the number of steps to the work of an effort, but to no fewer than 300."""
    model = recipe.model
    size = {"affine": 2, "spline": 3 * model.bins - 1, "affine-spline": 3 * model.bins + 1}.get(model.law, 1)
    each = (1 + size) * dim / 2 * model.width + max(model.hidden_layers) * model.width**2
    return round(min(steps, max(300, WORK[effort] / (recipe.train.batch * max(1, model.couplings) * each))))


def _rows(title: str) -> Recipe:
    return Recipe("rows", f"rows of numbers: {title}", data=DataSettings(name=IN_MEMORY))


def recipe_for_images(n: int, dim: int, given: Given) -> Recipe:
    """Choose the recipe for n images of D numbers, except for what is `given`.

    Few images teach a network little beyond their covariance: it starts from a whitening with shrunk correlations, is
    narrow, and trains until ten validations bring nothing better.
    """
    model = {
        "preprocess": "zca" if dim <= WIDEST_IMAGES else "none",
        "couplings": 4,
        "hidden_layers": 3,
        "width": 200 if n < 10_000 else 500 if n < 50_000 else 1000,
        "dropout": 0.2 if n < 10_000 else 0.1,
        "initialisation": "whitened",
        "marginals": "none",
    }

    def train(recipe: Recipe) -> dict[str, Any]:
        rates = {"lr": 5e-4, "betas": [0.9, 0.99], "eps": 1e-5, "weight_decay": 0.1}
        steps = round(2_000 * max(1.0, n / 1_000) ** 0.4)
        return rates | _steps(steps, n, recipe, warmup=200, every=50) | {"precision": "auto"}

    return _chosen(Recipe(), model, min(200, max(20, n // 40)), train, given, dim)


def _chosen(
    recipe: Recipe, model: dict[str, Any], batch: int, train: Callable[[Recipe], dict[str, Any]], given: Given, dim: int
) -> Recipe:
    """Return the recipe with what is chosen, or `given`; training is chosen for the resulting batch and couplings."""
    if dim < 2:
        given = {**given, "model": {**given["model"], "couplings": 0}}
    recipe = recipe.changed({"model": model, "train": {"batch": batch}}, "").changed(given, "NICE")
    return recipe.changed({"train": train(recipe)}, "").changed(given, "NICE")


def _steps(steps: int, rows: int, recipe: Recipe, *, warmup: int, every: int) -> dict[str, Any]:
    """Return the settings of a training of a number of steps, which recipes count in epochs.

    A validation comes every few steps or once an epoch; patience lasts for 10 of them.
    """
    per_epoch = max(1, rows // recipe.train.batch)
    epochs = max(1, round(every / per_epoch))
    return {
        "epochs": math.ceil(steps / per_epoch),
        "warmup": min(warmup, steps - 1),
        "schedule": "cosine",
        "loss": "nats-per-dim",
        "ema": 0.99,
        "precision": "float32",
        "evaluate_every": epochs,
        "patience": 10 * epochs,
    }


def settings_given(recipe: Recipe, overrides: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the settings of [model], [table] and [train] that are not the default or that `overrides` name."""
    if recipe.model.blocks:
        raise NicestError(
            "expected model.blocks or a model chosen for the data, got both: set sized=false, or no blocks"
        )
    named, found = {each.partition("=")[0].strip() for each in overrides}, {}
    for table in ("model", "table", "train"):
        settings, default = getattr(recipe, table), getattr(Recipe(), table)
        values = {each.name: getattr(settings, each.name) for each in fields(settings)}
        found[table] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value != getattr(default, name) or f"{table}.{name}" in named
        }
    return found


def trained(n: int) -> int:
    """Return how many of n rows do not validate."""
    return round(n * (1 - held_out(n)))


def held_out(n: int) -> float:
    """Return the fraction of n rows that validates by default: 0 of very few, 1/4 of few, 10,000 rows of many."""
    if n < FEW:
        return 0.0
    return 0.25 if n < 1_000 else min(0.1, 10_000 / n)
