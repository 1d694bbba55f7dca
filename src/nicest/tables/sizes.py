"""How large the model of a table is and how long it trains, from its rows and columns and from train.effort."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nicest.data.columns import Schema
from nicest.recipes import Recipe

STEPS = {"low": 0.3, "medium": 1.0, "high": 4.0}
LEAST = 10  # steps
FEW = 1_000  # rows below which dropout alone must prevent overfitting: validation rows would be too few to tell
WORK = {"low": 1e12, "medium": 4e12, "high": 3e13}  # multiplications of a training, at most


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
    small, large = n < 2_000, n >= 8_000
    table = {
        "width": 64 if small else 128 if large else 96,
        "depth": 2 if small else 3,
        "components": 12,
        "dropout": 0.5 if n < FEW else 0.2 if small else 0.0 if large else 0.05,
        "members": 4 if small else 1 if large else 2,
        "favour": 0.3 if n < FEW else 0.8,
    } | dict(given.get("table", {}))
    batch = given["train"].get("batch", max(8, min(64 if small else 512 if large else 256, n // 2)))
    heads = schema.heads()
    # few rows, and those of many columns, are soon learned by heart
    learned = min(1.0, n / (10 * len(heads))) * min(1.0, n / 500) ** 0.5
    steps = max(LEAST, round(STEPS[effort] * 1_200 * max(1.0, n / 1_000) ** 0.2 * learned))
    outputs = sum(head.categories or 3 * table["components"] + len(head.atoms) for head in heads)
    inputs = sum(head.categories + len(head.knots) + 4 for head in heads)
    each = table["members"] * table["width"] * (inputs + outputs + 4 * table["width"] * table["depth"])
    steps = max(min(steps, round(WORK[effort] / (3 * batch * each))), min(steps, 300))
    per_epoch = max(1, round(0.9 * n) // batch)
    every = max(1, round(max(25, steps / (10 if n < FEW else 30)) / per_epoch))
    train: dict[str, Any] = {
        "batch": batch,
        "epochs": math.ceil(steps / per_epoch),
        "lr": 5e-3,
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
