"""Recipes by the size of the data: tables of a hundred rows of two columns to a million of a hundred, and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from nicest.data.splits import IN_MEMORY
from nicest.errors import NicestError
from nicest.recipes.recipe import DataSettings, ModelSettings, Recipe

FEW = 50  # rows below which nothing is held out and no coupling is trained
WIDEST_WHITENING = 1000  # columns beyond which whitening costs more than training
WIDEST_IMAGES = 4096  # numbers of an image beyond which it takes minutes
Given = Mapping[str, Mapping[str, Any]]


def recipe_for(n: int, dim: int, given: Given, work: float = math.inf) -> Recipe:
    """The recipe for n rows of D columns, with what is `given` in place of what would be chosen.

    Width, batch and steps grow with the rows; dropout is for tables with few rows for their columns. `work` bounds the
    multiplications in the coupling functions, forward, of all steps: there are fewer steps then, but 1,000 at least.
    """
    model = {
        "preprocess": "zca" if dim <= WIDEST_WHITENING else "none",
        "couplings": 0 if n < FEW else 4 if n < 500 else 6,
        "hidden_layers": 2,
        "width": 32 if n < 500 else 64 if n < 5_000 else 128 if n < 50_000 else 256,
        "dropout": 0.2 if n < 50 * dim else 0.0,
        "initialisation": "whitened",
    }
    batch = min(1024, max(64, 1 << round(math.log2(max(10, n) / 10))))

    def train(recipe: Recipe) -> dict[str, Any]:
        steps = min(10_000, round(1_500 * max(1.0, n / 1_000) ** 0.4)) if recipe.model.couplings else 1
        if steps > 1_000:
            steps = round(min(steps, max(1_000, work / (recipe.train.batch * _multiplications(recipe.model, dim)))))
        rates = {"lr": 3e-3 if n < 10_000 else 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
        per_epoch = round(n * (1 - held_out(n))) // recipe.train.batch
        return rates | {"clip": 1.0, "precision": "float32"} | _steps(steps, per_epoch, warmup=50, every=20)

    recipe = Recipe("table", "a table of continuous columns", data=DataSettings(name=IN_MEMORY))
    return _chosen(
        recipe, model, batch, train, given if dim > 1 else {**given, "model": {**given["model"], "couplings": 0}}
    )


def recipe_for_images(n: int, dim: int, given: Given) -> Recipe:
    """The recipe for n images of D numbers, with what is `given` in place of what would be chosen.

    Few images teach a network little that their covariance does not tell: it starts from a whitening with shrunk
    correlations, is narrow, and trains until ten validations bring nothing better.
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
        return rates | _steps(steps, n // recipe.train.batch, warmup=200, every=50)

    return _chosen(Recipe(), model, min(200, max(20, n // 40)), train, given)


def _chosen(
    recipe: Recipe, model: dict[str, Any], batch: int, train: Callable[[Recipe], dict[str, Any]], given: Given
) -> Recipe:
    """The recipe with what is chosen, and `given` in its place; how it trains is chosen for its batch and couplings."""
    recipe = recipe.changed({"model": model, "train": {"batch": batch}}, "").changed(given, "NICE")
    return recipe.changed({"train": train(recipe)}, "").changed(given, "NICE")


def _multiplications(model: ModelSettings, dim: int) -> int:
    """About how many the coupling functions take for one row."""
    depths = model.hidden_layers if len(model.hidden_layers) > 1 else model.hidden_layers * model.couplings
    return sum(dim * model.width + max(0, depth - 1) * model.width**2 for depth in depths)


def _steps(steps: int, per_epoch: int, *, warmup: int, every: int) -> dict[str, Any]:
    """Settings that make so many steps, counted in epochs, of which one of a small table is a step or two.

    A validation comes every few steps or once an epoch; training ends after 10 of them without a better one.
    """
    per_epoch = max(1, per_epoch)
    epochs = max(1, round(every / per_epoch))
    return {
        "epochs": math.ceil(steps / per_epoch),
        "warmup": min(warmup, steps - 1),
        "schedule": "cosine",
        "loss": "nats-per-dim",
        "ema": 0.99,
        "evaluate_every": epochs,
        "patience": 10 * epochs,
    }


def settings_given(recipe: Recipe, overrides: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What a recipe says of model and training: all that is not the default, and all that overrides name."""
    if recipe.model.blocks:
        raise NicestError(
            "expected model.blocks or a model chosen for the data, got both: set sized=false, or no blocks"
        )
    named, found = {each.partition("=")[0].strip() for each in overrides}, {}
    for table in ("model", "train"):
        settings, default = getattr(recipe, table), getattr(Recipe(), table)
        values = {each.name: getattr(settings, each.name) for each in fields(settings)}
        found[table] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value != getattr(default, name) or f"{table}.{name}" in named
        }
    return found


def held_out(n: int) -> float:
    """The share of n rows that validates, unless it is given: none of very few, a quarter of few, 10,000 of many."""
    if n < FEW:
        return 0.0
    return 0.25 if n < 1_000 else min(0.1, 10_000 / n)
