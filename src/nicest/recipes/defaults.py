"""Recipes by the size of the data: tables of a hundred rows of two columns to a million of a hundred, and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from nicest.data.splits import IN_MEMORY
from nicest.errors import NicestError
from nicest.recipes.recipe import DataSettings, Recipe

FEW = 50  # rows below which nothing is held out and no coupling is trained
WIDEST_WHITENING = 1000  # columns beyond which whitening costs more than training
STEPS = {"low": 600, "medium": 1_800, "high": 10_000}  # of a training
WORK = {"low": 1e11, "medium": 5e11, "high": 5e12}  # multiplications of a training, of the coupling functions forward
WIDER = {"low": math.inf, "medium": 20_000, "high": 5_000}  # rows from which splines have networks twice as wide
MEMBERS = {"low": 2, "medium": 5, "high": 5}  # flows whose densities are averaged in a prediction, of few rows
HIGH_MEMBERS = 5, 2  # in a density of all columns with effort "high", of few rows and of many
AVERAGED = 4_000  # steps that are enough where several flows are averaged
TREES, FEWER_TREES, MOST_LEAVES = 200, 100, 2048  # of the forest that is averaged with them, from 1,000 rows on fewer
MOST_GROWN = 20_000  # rows from which a forest takes long to grow, and to store
MANY = 5_000  # rows from which steps gain more than members
FAST = 2_000  # rows from which splines learn at a higher rate; fewer, or fewer than 50 a column, are learnt by heart
WIDEST_IMAGES = 4096  # numbers of an image beyond which it takes minutes
Given = Mapping[str, Mapping[str, Any]]


def recipes_for(n: int, dim: int, given: Given) -> list[Recipe]:
    """Recipes to try on n rows of D columns, the likeliest first, with what is `given` in place of what is chosen.

    Splines follow columns that are spiky, clustered or functions of others; they come with and without a whitening
    before them. Few rows teach them little: there additive couplings on top of a copula may do better.
    """
    effort = Recipe().changed({"train": dict(given["train"])}, "NICE").train.effort
    plain = given["model"].get("law", "spline") != "spline" or given["model"].get("couplings") == 0
    if n < FEW or dim > WIDEST_WHITENING or plain:
        kinds: list[Callable[..., Recipe]] = [additive]
    elif dim < 2:
        kinds = [splines]
    elif effort == "low":
        kinds = [additive if n < 20 * dim else splines]
    else:
        kinds = [splines, partial(splines, whitened=True), *([additive] if n < MANY else [])]
    return [kind(n, dim, given, effort) for kind in kinds]


def additive(n: int, dim: int, given: Given, effort: str) -> Recipe:
    """Columns bent and whitened, then additive couplings: width, batch and steps grow with the rows; dropout is for
    tables with few rows for their columns."""
    model = {
        "preprocess": "zca" if dim <= WIDEST_WHITENING else "none",
        "couplings": 0 if n < FEW or dim < 2 else 4 if n < 500 else 6,
        "hidden_layers": 2,
        "width": 32 if n < 500 else 64 if n < 5_000 else 128,
        "dropout": 0.2 if n < 50 * dim else 0.0,
        "initialisation": "whitened",
        "members": members_of(n, dim, effort),
    }
    batch = min(1024, max(64, 1 << round(math.log2(max(10, n) / 10))))

    def train(recipe: Recipe) -> dict[str, Any]:
        steps = min(10_000, round(1_500 * max(1.0, n / 1_000) ** 0.4)) if recipe.model.couplings else 1
        rates = {"lr": 3e-3 if n < 10_000 else 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
        return (
            rates | {"clip": 1.0} | _steps(bounded(steps, recipe, dim, effort), trained(n), recipe, warmup=50, every=20)
        )

    return _chosen(_table("additive couplings"), model, batch, train, given, dim)


def splines(n: int, dim: int, given: Given, effort: str, *, whitened: bool = False) -> Recipe:
    """A learned spline in every column, then couplings with splines, learned mixing and residual networks."""
    model = {
        "preprocess": "zca" if whitened else "none",
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
        "members": members_of(n, dim, effort),
    }
    batch = min(256, max(32, 1 << round(math.log2(n / 4))))

    def train(recipe: Recipe) -> dict[str, Any]:
        steps = STEPS[effort] if recipe.model.members == 1 else min(STEPS[effort], AVERAGED)
        steps = bounded(steps, recipe, dim, effort)
        rates = _rates(fast=n >= max(FAST, 50 * dim) and effort != "high")
        return rates | _steps(steps, trained(n), recipe, warmup=100, every=50) | {"loss": "nats", "ema": 0.995}

    return _chosen(_table("splines after a whitening" if whitened else "splines"), model, batch, train, given, dim)


def members_of(n: int, dim: int, effort: str) -> int:
    """How many flows are averaged in a density of all columns: without couplings they would all be the same."""
    return 1 if effort != "high" or n < FEW or dim < 2 else HIGH_MEMBERS[n >= MANY]


def conditional(n: int, dim: int, targets: int, given: Given) -> list[Recipe]:
    """Recipes to try on n rows of D columns, `targets` of which are predicted from the others, the likeliest first.

    A single target has one coupling, whose law is a spline after a shift and a scaling that follow the given columns;
    a spline in the column before it, the same for all rows, pays where its distribution is odd. The densities of
    several such flows, trained side by side, are averaged.
    """
    effort = Recipe().changed({"train": dict(given["train"])}, "NICE").train.effort
    bins = 8 if n < 500 else 16
    members = 1 if targets > 4 else MEMBERS[effort] if n < MANY else 2
    trees = TREES if n < 1_000 else FEWER_TREES
    several = given["model"].get("members", members) != 1  # one flow that is asked for has latent coordinates
    model = {
        "law": "affine-spline",
        "bins": bins,
        "bound": 5.0,
        "mixing": targets > 1,
        "couplings": 1 if targets == 1 else 4,
        "network": "residual",
        "hidden_layers": 4,
        "width": 64 if n < 150 else 128,
        "dropout": 0.2 if n < 5_000 else 0.1,
        "initialisation": "whitened",
        "prior": "logistic",
        "members": members,
        "trees": trees if several and targets == 1 and FEW <= n < MOST_GROWN else 0,
        "leaves": min(MOST_LEAVES, max(16, n // 3)),
    }
    batch = min(256, max(16, 1 << round(math.log2(max(n, 8) / 8))))

    def train(recipe: Recipe) -> dict[str, Any]:
        steps = bounded(round(STEPS[effort] * max(1.0, MEMBERS[effort] / members)), recipe, dim, effort)
        rows = max(1, round(n * (1 - held_out(n, targets=True))))
        found = _steps(steps, rows, recipe, warmup=100, every=50) | {"loss": "nats", "ema": 0.995}
        epochs = given["train"].get("epochs", found["epochs"])
        patience = max(found["patience"], math.ceil(epochs / 3))  # much is won late, as the rate falls
        return _rates(fast=n >= FAST and effort != "high") | found | {"patience": patience}

    kinds = {"a prediction": 0, "a prediction after a spline": bins}
    if effort == "low" or n < 500:
        kinds.popitem()
    return [
        _chosen(_table(title), model | {"elementwise": knots}, batch, train, given, dim)
        for title, knots in kinds.items()
    ]


def _rates(*, fast: bool) -> dict[str, Any]:
    """How splines learn: at the higher rate, without a long memory of their first gradients."""
    rates = {"lr": 2e-3, "betas": [0.9, 0.95]} if fast else {"lr": 1e-3, "betas": [0.9, 0.999]}
    return rates | {"eps": 1e-8, "weight_decay": 0.01, "clip": 5.0}


def bounded(steps: int, recipe: Recipe, dim: int, effort: str) -> int:
    """No more steps than the work of this effort allows, but 300 at least."""
    model = recipe.model
    size = {"affine": 2, "spline": 3 * model.bins - 1, "affine-spline": 3 * model.bins + 1}.get(model.law, 1)
    each = (1 + size) * dim / 2 * model.width + max(model.hidden_layers) * model.width**2
    networks = max(1, model.couplings * model.members)
    return round(min(steps, max(300, WORK[effort] / (recipe.train.batch * networks * each))))


def _table(title: str) -> Recipe:
    return Recipe("table", f"a table: {title}", data=DataSettings(name=IN_MEMORY))


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
        return rates | _steps(steps, n, recipe, warmup=200, every=50) | {"precision": "auto"}

    return _chosen(Recipe(), model, min(200, max(20, n // 40)), train, given, dim)


def _chosen(
    recipe: Recipe, model: dict[str, Any], batch: int, train: Callable[[Recipe], dict[str, Any]], given: Given, dim: int
) -> Recipe:
    """The recipe with what is chosen, and `given` in its place; how it trains is chosen for its batch and couplings."""
    if dim < 2:
        given = {**given, "model": {**given["model"], "couplings": 0}}
    recipe = recipe.changed({"model": model, "train": {"batch": batch}}, "").changed(given, "NICE")
    return recipe.changed({"train": train(recipe)}, "").changed(given, "NICE")


def _steps(steps: int, rows: int, recipe: Recipe, *, warmup: int, every: int) -> dict[str, Any]:
    """Settings that make so many steps, counted in epochs, of which one of a small table is a step or two.

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


def trained(n: int) -> int:
    """Of n rows of a table, those that do not validate."""
    return round(n * (1 - held_out(n)))


def held_out(n: int, *, targets: bool = False) -> float:
    """The share of n rows that validates, unless it is given: none of very few, a quarter of few, 10,000 of many.

    To predict `targets`, for which every row counts, it is an eighth of few.
    """
    if n < FEW:
        return 0.0
    if targets:
        return min(0.125, 10_000 / n)
    return 0.25 if n < 1_000 else min(0.1, 10_000 / n)
