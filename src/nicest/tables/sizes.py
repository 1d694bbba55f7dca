"""How large the model of a table is and how long it trains, from its rows and columns and from train.effort."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nicest.data.columns import Schema
from nicest.recipes import Recipe

STEPS = {"low": 0.3, "medium": 1.0, "high": 4.0}
WORK = {"low": 2e11, "medium": 1e12, "high": 8e12}  # multiplications of a training, at most


def sized(recipe: Recipe, n: int, schema: Schema, given: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """Return the recipe with settings for n rows; those that are `given` stay.

    Parameters
    ----------
    recipe : Recipe
    n : int
        Rows that train or validate.
    schema : Schema
    given : mapping
        Settings of [table] and [train] by name.
    """
    effort = given["train"].get("effort", recipe.train.effort)
    members = 8 if n < 2_000 else 4 if n < 10_000 else 1
    table = {
        "width": 64 if n < 2_000 else 128,
        "depth": 3,
        "components": 12,
        "dropout": 0.5 if n < 500 else 0.3 if n < 2_000 else 0.1,
        "members": members,
    } | dict(given.get("table", {}))
    batch = given["train"].get("batch", min(256, max(16, n // 2)) if n < 5_000 else 512)
    outputs = sum(head.categories or 3 * table["components"] for head in schema.heads())
    inputs = sum(head.categories + len(head.knots) + 4 for head in schema.heads())
    each = table["width"] * (inputs + outputs + 4 * table["width"] * table["depth"])  # multiplications of a row
    steps = min(round(STEPS[effort] * 1_000 * max(1.0, n / 1_000) ** 0.4), max(300, round(WORK[effort] / (3 * batch * each))))
    per_epoch = max(1, round(0.9 * n) // batch)
    every = max(1, round(max(25, steps / 40) / per_epoch))
    train = {
        "batch": batch,
        "epochs": math.ceil(steps / per_epoch),
        "lr": 2e-3,
        "betas": [0.9, 0.98],
        "eps": 1e-8,
        "weight_decay": 0.02,
        "clip": 2.0,
        "schedule": "cosine",
        "warmup": min(100, steps // 10),
        "loss": "nats-per-dim",
        "ema": 0.995,
        "precision": "float32",
        "evaluate_every": every,
    } | dict(given["train"])
    return recipe.changed({"table": table, "train": train}, "table")
